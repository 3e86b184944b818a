"""Carries out a plan on one worker: edit groups, restore, rebuild, verify.

It decides nothing. Each step may be cut short by a further membership change (EpochChanged); the
layout the state was found in stays whole until a step is committed under the new one, so the next
recovery starts from there.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from megatron_elas.runtime.communicator.membership import Membership
from megatron_elas.runtime.migration import apply_moves
from megatron_elas.runtime.ports import Control, FaultPoint, Groups, Host, Order
from megatron_elas.runtime.snapshots import SnapshotPool
from megatron_elas.runtime.state import Fit, WorkerState
from megatron_elas.runtime.store import ShardStore
from megatron_elas.runtime.transport.base import Transport
from megatron_elas.runtime.verification.rows import Sums
from megatron_elas.runtime.verification.verify import Copy, Evidence, verify
from megatron_elas.spec.catalogue import Catalogue, StageContents
from megatron_elas.spec.errors import EpochChanged, StateInvalid
from megatron_elas.spec.plan import ElasticPlan, Settlement
from megatron_elas.spec.remap import keeps_shard, plan_remap
from megatron_elas.spec.report import RecoveryReport


def gather_catalogue(host: Host, groups: Groups) -> Catalogue:
    """What the model consists of, from what each worker's host says of its stage. Called on all workers at launch.

    Raises:
        StateInvalid: They do not fit together.
    """
    texts = groups.all_gather_texts(host.describe_parameters().to_json())
    catalogue = Catalogue.gathered([StageContents.from_json(text) for text in texts])
    host.take_catalogue(catalogue)
    return catalogue


def make_store(catalogue: Catalogue, plan: ElasticPlan, worker: int, versions: int) -> ShardStore:
    """Empty copies for a seated worker's own shard and its wards' under the plan."""
    return ShardStore(
        layout=catalogue.layout(plan, worker),
        backups=plan.backups_of(worker),
        wards={ward: catalogue.layout(plan, ward) for ward in plan.wards_of(worker)},
        versions=versions,
    )


class Executor:
    """Applies orders to a worker's state."""

    def __init__(
        self,
        state: WorkerState,
        host: Host,
        transport: Transport,
        pool: SnapshotPool,
        groups: Groups,
        control: Control,
        strike: FaultPoint,
    ) -> None:
        self.lead_activity = 0
        """The most joint activities any survivor's loop had completed at the last recovery."""
        self.waived_activity = -1
        """The newest joint activity that nobody runs again, since it failed somewhere."""
        self._state = state
        self._host = host
        self._transport = transport
        self._pool = pool
        self._groups = groups
        self._control = control
        self._strike = strike

    def apply(self, order: Order, loop_step: int) -> RecoveryReport:
        """Take the state to ``order.settlement.resume_step`` under ``order.plan``.

        Args:
            order: What to do.
            loop_step: The step that this worker's training loop is in; names the place for fault scripts, unless it
                is a spare, whose loop has stood still.

        Returns:
            Marks of the phases done here and the bytes sent.

        Raises:
            EpochChanged: Another change struck meanwhile.
            VerificationFailed: A check failed; copies that are bad are dropped.
            StateInvalid: The checkpoint that is to take the state's place cannot be read.
        """
        state, plan, settlement = self._state, order.plan, order.settlement
        marks: dict[str, float] = {"settle": time.time()}
        alive = {*plan.placement.workers, *plan.placement.spares}
        seated = plan.placement.find_seat(state.worker) is not None
        self._groups.edit(
            Membership(
                epoch=plan.epoch,
                addresses={worker: order.addresses[worker] for worker in sorted(alive)},
                ranks={worker: rank for rank, worker in enumerate(plan.placement.workers)},
                groups=self._host.plan_groups(plan) if seated else {},
            )
        )
        if self._control.latest_epoch > plan.epoch:  # announced before the edit, which undid its cancel
            raise EpochChanged(f"epoch {self._control.latest_epoch} was announced before epoch {plan.epoch} began")
        self.lead_activity = settlement.lead_activity
        self.waived_activity = max(self.waived_activity, settlement.waived_activity)
        # A spare that was behind may not have seen the layout; it holds nothing of it either.
        base_plan, base = state.stores.get(settlement.base_epoch, (order.base, None))
        for epoch in [e for e in state.stores if e != settlement.base_epoch]:
            del state.stores[epoch]
        state.plan = plan
        if seated:
            self._host.follow_groups(plan)
            self._host.clear_step()
            self._groups.open_links()
        marks["groups"] = time.time()

        place = loop_step if base is not None or settlement.checkpoint is not None else settlement.resume_step
        self._strike(place, "recovery", None)
        self._strike(place, "recovery-restore", None)
        moved_bytes, sent = 0, None
        if settlement.checkpoint is None:
            store, moved_bytes, sent = self._restore(base_plan, base, plan, settlement, alive)
        else:
            state.stores.clear()
            store = make_store(state.catalogue, plan, state.worker, self._pool.mode.versions) if seated else None
            state.stores[plan.epoch] = (plan, store)
        marks["restore"] = time.time()
        if store is not None:
            if settlement.checkpoint is None:
                self._pool.renew(store, settlement.resume_step)  # on its way while the optimizer is built
            self._strike(place, "recovery-rebuild", None)
            if settlement.checkpoint is None:
                self._rebuild(plan, store, settlement.resume_step)
            else:
                self._load(plan, store, settlement.checkpoint)
                self._pool.renew(store, settlement.resume_step)
            marks["rebuild"] = time.time()
            self._pool.wait()
            self._strike(place, "recovery-verify", None)
            self._verify(plan, store, settlement.resume_step, sent, base, _replaceable(base_plan, settlement, alive))
            marks["verify"] = time.time()
        else:
            state.fitted = None
        state.stores[plan.epoch] = (plan, store)
        state.live = settlement.resume_step if store is not None else None
        if store is not None:
            self._strike(place, "recovery-resume", None)
        return RecoveryReport(
            worker=state.worker, epoch=plan.epoch, resume_step=settlement.resume_step, marks_s=marks,
            moved_bytes=moved_bytes,
        )  # fmt: skip

    def _restore(
        self,
        base_plan: ElasticPlan | None,
        base: ShardStore | None,
        plan: ElasticPlan,
        settlement: Settlement,
        alive: Collection[int],
    ) -> tuple[ShardStore | None, int, Sums | None]:
        """This worker's copies under the new plan, own shard complete; bytes sent to others; checksums of what came."""
        state, version = self._state, settlement.resume_step
        if base_plan is None:
            if plan.placement.find_seat(state.worker) is None:
                return None, 0, None
            raise StateInvalid(
                f"epoch {plan.epoch}: worker {state.worker} gets a seat and does not know the plan of epoch "
                f"{settlement.base_epoch}, in whose layout the state is. Restart from the newest checkpoint with --load"
            )
        if base is not None:
            if version not in base.own.held:
                assert state.live == version, f"worker {state.worker} reported version {version} but has {state.live}"
                self._pool.keep_own(base, version)
            base.forget_after(version)
        owners = base_plan.placement.workers
        holders = {worker: worker for worker in owners if worker in alive} | dict(settlement.holders)
        moves = plan_remap(state.catalogue, base_plan, plan, holders)
        sources = {}
        if base is not None:
            held = (owner for owner, holder in holders.items() if holder == state.worker)
            sources = {owner: base.copy_of(owner, state.worker).get(version) for owner in held}
        store = self._take_over(base_plan, base, plan)
        target = None
        if store is not None and version not in store.own.held:
            target = store.own.begin(version)
            target[-1] = 0  # stays where there is nothing to own but padding
        moved_bytes, sent = apply_moves(moves, state.worker, sources, target, self._transport)
        if store is not None:
            store.own.complete(version)
        return store, moved_bytes, None if target is None else sent

    def _take_over(self, base_plan: ElasticPlan, base: ShardStore | None, plan: ElasticPlan) -> ShardStore | None:
        """The store under the new plan, with those copies that are the same as under the old one; the old one itself
        if all are; None for a spare.
        """
        state, catalogue = self._state, self._state.catalogue
        if plan.placement.find_seat(state.worker) is None:
            return None
        store = make_store(catalogue, plan, state.worker, self._pool.mode.versions)
        if base is None:
            return store
        kept = [owner for owner in (state.worker, *store.wards) if keeps_shard(catalogue, base_plan, plan, owner)]
        if state.worker in kept and kept[1:] == list(base.wards) == list(store.wards) and base.backups == store.backups:
            return base
        for owner in kept:
            if owner == state.worker:
                store.own = base.own
            elif owner in base.wards:
                store.wards[owner] = base.wards[owner]
        return store

    def _rebuild(self, plan: ElasticPlan, store: ShardStore, version: int) -> None:
        """Make the restored shard the one in use, on a model and an optimizer that fit the plan."""
        state, host = self._state, self._host
        fit = Fit.of(plan, state.worker)
        stale = state.live != version
        state.live = None
        if state.fitted != fit:
            state.fitted = None
            host.rebuild(plan)
            state.fitted = fit
            stale = True
        if stale:
            host.write_shard(store.own.get(version))
        host.sync_parameters()
        if version in state.captures:
            host.rewind(state.captures[version])
        else:  # this worker had not yet entered that step, or had no seat
            host.catch_up(version)

    def _load(self, plan: ElasticPlan, store: ShardStore, step: int) -> None:
        """Take parameters, optimizer and counters from the checkpoint; nothing of what this worker held counts."""
        state, host = self._state, self._host
        state.live = None
        state.captures.clear()
        state.fitted = None
        host.rebuild(plan)  # also where it fits: it may be what did not stand the checks
        state.fitted = Fit.of(plan, state.worker)
        host.load_checkpoint(step)
        host.sync_parameters()
        self._pool.keep_own(store, step)

    def _verify(
        self,
        plan: ElasticPlan,
        store: ShardStore,
        version: int,
        sent: Sums | None,
        base: ShardStore | None,
        borrowed: tuple[tuple[int, int], ...],
    ) -> None:
        """Compare what must fit together across workers. Every seated worker calls it; it is also the barrier
        after which the new layout counts.

        Raises:
            VerificationFailed: Something does not fit.
        """
        worker, catalogue = self._state.worker, self._state.catalogue
        parameters = catalogue.parameters(plan, plan.placement.seat(worker).stage)
        evidence = Evidence(
            worker=worker,
            version=version,
            inspection=self._host.inspect(),
            expected={parameter.name: parameter.count for parameter in parameters},
            sent=sent,
            source=store.own.get(version),
            borrowed=borrowed,
            mirrors={
                ward: Copy(layout=store.ward_layouts[ward], flat=copies.get(version))
                for ward, copies in store.wards.items()
            },
        )

        def drop(owner: int) -> None:
            for copies in (store.wards.get(owner), None if base is None else base.wards.get(owner)):
                if copies is not None:
                    copies.forget_after(version - 1)

        verify(plan, evidence, self._groups.all_gather_rows, drop)


def _replaceable(
    base_plan: ElasticPlan | None, settlement: Settlement, alive: Collection[int]
) -> tuple[tuple[int, int], ...]:
    """Pairs (lost owner, backup) of the copies that are used, if every such owner has another backup that lives."""
    if base_plan is None or settlement.checkpoint is not None:
        return ()
    for owner, holder in settlement.holders:
        if not any(backup in alive and backup != holder for backup in base_plan.backups_of(owner)):
            return ()
    return settlement.holders
