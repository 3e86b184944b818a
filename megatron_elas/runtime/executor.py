"""Carries out a plan on one worker: edit groups, restore, rebuild, verify.

Optimizer state is needed only for the update at a step's end. When all workers have the parameters of the step that is
next (``Settlement.parameters_whole``) and keep their layers, the step begins while the state moves (a *remap*), and
``complete`` waits for it before the norm of the gradients; else all is in its place before the step begins.

It decides nothing. Each step may be cut short by a further membership change (EpochChanged); the
layout the state was found in stays whole until a step is committed under the new one, so the next
recovery starts from there.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from megatron_elas.runtime.communicator.membership import Membership
from megatron_elas.runtime.ports import Control, FaultPoint, Groups, Host, Migration, Order
from megatron_elas.runtime.restoring import Restoring, make_store, take_over
from megatron_elas.runtime.snapshots import SnapshotPool
from megatron_elas.runtime.state import Fit, WorkerState
from megatron_elas.runtime.store import ShardStore
from megatron_elas.runtime.streaming import Streaming
from megatron_elas.runtime.transport.base import Transport
from megatron_elas.runtime.verification.checks import BEFORE_FORWARD
from megatron_elas.runtime.verification.inspection import Inspection
from megatron_elas.runtime.verification.rows import Row, Sums
from megatron_elas.runtime.verification.verify import Copy, Evidence, verify
from megatron_elas.spec.catalogue import Catalogue, StageContents
from megatron_elas.spec.errors import EpochChanged, StateInvalid
from megatron_elas.spec.migration import MIGRATION_PHASES, MigrationReport
from megatron_elas.spec.moves import Move
from megatron_elas.spec.plan import ElasticPlan, Settlement
from megatron_elas.spec.remap import keeps_model, lacking_parameters
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """What a remap beside the first step has done, on this worker."""

    moved_bytes: int
    background_s: float


class _Looked(NamedTuple):
    """What this worker has to show, and to tell of it."""

    evidence: Evidence
    row: Row


@dataclass(frozen=True, slots=True, kw_only=True)
class _Remap:
    """State that is on its way under the plan in force, while the step that needs it last runs already."""

    plan: ElasticPlan
    store: ShardStore
    restoring: Restoring
    write: bool
    """Whether the optimizer in use is to be filled."""
    base: ShardStore | None
    borrowed: tuple[tuple[int, int], ...]
    """See ``Evidence``."""
    looked: Future[_Looked] | None = None
    """Under way beside the step; None: the state is looked at when that is needed."""


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
        beside: bool = True,
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
        self._beside = beside
        self._remap: _Remap | None = None

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
        self._enter(plan, {worker: order.addresses[worker] for worker in sorted(alive)})
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
        version, restoring, beside = settlement.resume_step, None, False
        if settlement.checkpoint is None:
            restoring = self._prepare(base_plan, base, plan, settlement, alive)
            store = None if restoring is None else restoring.store
            beside = store is not None and self._goes_on(base_plan, plan, settlement)
            if restoring is not None and not beside:
                restoring.run()
        else:
            state.stores.clear()
            store = make_store(state.catalogue, plan, state.worker, self._pool.mode.versions) if seated else None
            state.stores[plan.epoch] = (plan, store)
        marks["restore"] = time.time()
        if store is not None:
            borrowed = _replaceable(base_plan, settlement, alive)
            if beside:
                assert restoring is not None
                self._pool.arrive(store, version, restoring.run)
            elif restoring is not None:
                self._pool.renew(store, version)  # on its way while the optimizer is built
            self._strike(place, "recovery-rebuild", None)
            stale = False
            if settlement.checkpoint is None:
                stale = self._rebuild(plan, version, parameters_too=not beside)
                if not beside:
                    self._fill(store, version, stale)
                self._rewind(version, behind=base is None)
                self._tell_history(base_plan, plan)
            else:
                self._load(plan, store, settlement.checkpoint)
                self._pool.renew(store, version)
            marks["rebuild"] = time.time()
            if not beside:
                self._pool.wait()
            self._strike(place, "recovery-verify", None)
            if beside:
                assert restoring is not None
                self._verify_parameters(plan, version)
                self._remap = _Remap(
                    plan=plan, store=store, restoring=restoring, write=stale, base=base, borrowed=borrowed
                )
            else:
                self._verify(plan, store, version, None if restoring is None else restoring.sent, base, borrowed)
            marks["verify"] = time.time()
        else:
            state.fitted = None
            self._pool.forget_copies()
        state.stores[plan.epoch] = (plan, store)
        state.live = version if store is not None else None
        if store is not None:
            self._strike(place, "recovery-resume", None)
        return RecoveryReport(
            worker=state.worker, epoch=plan.epoch, resume_step=version, marks_s=marks,
            moved_bytes=0 if beside or restoring is None else restoring.moved_bytes,
        )  # fmt: skip

    def _enter(self, plan: ElasticPlan, addresses: Mapping[int, str]) -> None:
        """Enter the plan's epoch. Raises EpochChanged when a newer one was announced."""
        seated = plan.placement.find_seat(self._state.worker) is not None
        self._groups.edit(
            Membership(
                epoch=plan.epoch,
                addresses=addresses,
                ranks={worker: rank for rank, worker in enumerate(plan.placement.workers)},
                groups=self._host.plan_groups(plan) if seated else {},
            )
        )
        if self._control.latest_epoch > plan.epoch:  # announced before the edit, which undid its cancel
            raise EpochChanged(f"epoch {self._control.latest_epoch} was announced before epoch {plan.epoch} began")

    def go_over(self, order: Migration, moves: Sequence[Move], streaming: Streaming | None) -> MigrationReport:
        """Between two steps, take the state to the plan of a migration. All workers with a seat call it; who has none
        under the new plan is a spare after.

        The old layout stays whole until a step is finished under the new one, whose ``complete`` compares the state.

        Args:
            order: The plan; nobody is lost.
            moves: All that lead to it, see ``plan_remap``.
            streaming: What has brought the state; None: it moves now.

        Returns:
            What is known so far.

        Raises:
            EpochChanged, PeerLost: Cut short.
        """
        state, plan = self._state, order.plan
        assert state.live is not None
        version, base_plan, base, worker = state.live, state.plan, state.store, state.worker
        whole = self._host.has_gathered(in_step=False)
        marks = [time.monotonic()]
        self._strike(version, "migrate-switch", None)
        self._groups.drain()
        self._pool.drain()
        arrivals = None if streaming is None else streaming.finish(version)
        self._groups.barrier()  # all that came before is over for all: their log lines, too
        marks.append(time.monotonic())
        restoring = Restoring(
            worker=worker,
            version=version,
            catalogue=state.catalogue,
            base_plan=base_plan,
            base=base,
            plan=plan,
            store=take_over(state.catalogue, base_plan, base, plan, worker, self._pool.mode.versions),
            holders={owner: owner for owner in base_plan.placement.workers},
            reader=None if version in base.own.held else self._host.shard_reader(),
            transport=self._transport,
            arrivals=arrivals,
            moves=moves,
        )
        restoring.run()  # in the old epoch, in which everybody who has something takes part
        marks.append(time.monotonic())
        self._strike(version, "migrate-enter", None)
        self._enter(plan, order.addresses)
        state.plan = plan
        store = restoring.store
        if store is None:
            state.live = state.fitted = state.gathered = None
            state.captures.clear()
            self._pool.forget_copies()
        else:
            self._host.follow_groups(plan)
            self._host.clear_step()
            self._groups.open_links()
            marks.append(time.monotonic())
            self._strike(version, "migrate-rebuild", None)
            stale = self._rebuild(plan, version, parameters_too=True)
            if stale:
                self._host.write_shard(store.own.get(version))
            self._rewind(version)
            marks.append(time.monotonic())
            self._host.sync_parameters(lacking_parameters(state.catalogue, base_plan, plan, worker) if whole else None)
            state.gathered = None if stale else version  # what was written is not compared yet
            # From here on all that the first step under the plan waits for at its end goes beside its passes.
            self._pool.renew(store, version)
            looked = self._pool.beside(functools.partial(self._look, plan, store, version, restoring.sent))
            self._remap = _Remap(
                plan=plan, store=store, restoring=restoring, write=False, base=base, borrowed=(), looked=looked
            )
            state.live = version
        state.stores[plan.epoch] = (plan, store)
        marks.append(time.monotonic())
        if store is not None:
            self._strike(version, "migrate-resume", None)
        phases_s = dict(zip(MIGRATION_PHASES, (end - begin for begin, end in pairwise(marks)), strict=False))
        return MigrationReport(
            worker=worker,
            epoch=plan.epoch,
            step=version,
            streamed_steps=0 if streaming is None else streaming.steps,
            streamed_bytes=0 if streaming is None else streaming.sent_bytes,
            gradient_bytes=0 if streaming is None else streaming.gradient_bytes,
            hand_over_s=0.0 if streaming is None else streaming.hand_over_s,
            moved_bytes=restoring.moved_bytes,
            blocked_s=marks[-1] - marks[0],
            phases_s=phases_s,
        )

    @property
    def remapping(self) -> bool:
        """Whether optimizer state of the plan in force is still on its way here, or unverified."""
        return self._remap is not None

    def complete(self) -> Arrived | None:
        """Wait for the state that is on its way, and make it the one in use: from here on the plan's layout counts.
        All seated workers call it, before an update of the parameters.

        Returns:
            None when nothing was on its way.

        Raises:
            EpochChanged, PeerLost: Cut short; the layout before is whole.
            VerificationFailed: A check failed; copies that are bad are dropped.
        """
        remap, state = self._remap, self._state
        if remap is None:
            return None
        took_s = self._pool.wait()
        assert state.live is not None
        version, state.gathered = state.live, None
        if remap.write:
            self._host.write_shard(remap.store.own.get(version))
        looked = None if remap.looked is None else remap.looked.result()
        self._verify(remap.plan, remap.store, version, remap.restoring.sent, remap.base, remap.borrowed, looked)
        state.gathered = version
        self._remap = None
        return Arrived(moved_bytes=remap.restoring.moved_bytes, background_s=took_s)

    def abandon(self) -> None:
        """The membership has ended and nothing is in flight: a layout that is not complete is not held."""
        if self._remap is not None:
            if self._remap.looked is not None:
                self._remap.looked.exception()  # waits; copies that it waited for may have been cut short
            del self._state.stores[self._remap.plan.epoch]
            self._state.live = None
            self._remap = None

    def _prepare(
        self,
        base_plan: ElasticPlan | None,
        base: ShardStore | None,
        plan: ElasticPlan,
        settlement: Settlement,
        alive: Collection[int],
    ) -> Restoring | None:
        """What is to be done for this worker's copies under the new plan; None when it takes no part."""
        state, version = self._state, settlement.resume_step
        if base_plan is None:
            if plan.placement.find_seat(state.worker) is None:
                return None
            raise StateInvalid(
                f"epoch {plan.epoch}: worker {state.worker} gets a seat and does not know the plan of epoch "
                f"{settlement.base_epoch}, in whose layout the state is. Restart from the newest checkpoint with --load"
            )
        reader = None
        if base is not None:
            if version not in base.own.held:
                assert state.live == version, f"worker {state.worker} reported version {version} but has {state.live}"
                reader = self._host.shard_reader()
            base.forget_after(version)
        owners = base_plan.placement.workers
        return Restoring(
            worker=state.worker,
            version=version,
            catalogue=state.catalogue,
            base_plan=base_plan,
            base=base,
            plan=plan,
            store=take_over(state.catalogue, base_plan, base, plan, state.worker, self._pool.mode.versions),
            holders={worker: worker for worker in owners if worker in alive} | dict(settlement.holders),
            reader=reader,
            transport=self._transport,
        )

    def _goes_on(self, base_plan: ElasticPlan | None, plan: ElasticPlan, settlement: Settlement) -> bool:
        """Whether the step can begin before optimizer state is in its place; the same answer on all seated workers."""
        return (
            self._beside
            and base_plan is not None
            and settlement.parameters_whole
            and all(keeps_model(base_plan, plan, worker) for worker in plan.placement.workers)
        )

    def _rebuild(self, plan: ElasticPlan, version: int, *, parameters_too: bool) -> bool:
        """Have a model and an optimizer that fit the plan. Gives whether the optimizer has another state than that of
        ``version``; with ``parameters_too`` the parameters may have, too.
        """
        state = self._state
        fit = Fit.of(plan, state.worker)
        stale = state.live != version
        state.live = None
        if parameters_too:
            state.gathered = None
        if state.fitted != fit:
            state.fitted = None
            self._host.rebuild(plan)
            state.fitted = fit
            stale = True
        return stale

    def _fill(self, store: ShardStore, version: int, stale: bool) -> None:
        """Make the restored shard the one in use, and gather the parameters."""
        if stale:
            self._host.write_shard(store.own.get(version))
        self._host.sync_parameters()
        self._state.gathered = version

    def _rewind(self, version: int, *, behind: bool = False) -> None:
        """Take what the host counts to the version. ``behind``: this worker had no seat in the layout that the state
        is taken from, so it counts what it has missed from the start of its last step. Not before that is sure: where
        the recovery that took its seat is cut short, that step is as finished as for all others.
        """
        captures = self._state.captures
        if behind and captures:
            self._host.rewind(captures[max(captures)])
            captures.clear()
            self._host.catch_up(version)
        elif version in captures:
            self._host.rewind(captures[version])
        else:  # this worker had not yet entered that step, or had no seat
            self._host.catch_up(version)

    def _tell_history(self, base_plan: ElasticPlan | None, plan: ElasticPlan) -> None:
        """Have workers that get a seat know how the steps went that they have not run. All seated workers call it."""
        assert base_plan is not None
        known = set(base_plan.placement.workers)
        if known.issuperset(plan.placement.workers):
            return
        rows = dict(zip(plan.placement.workers, self._groups.all_gather_rows(self._host.read_history()), strict=True))
        if self._state.worker not in known:
            self._host.write_history(next(row for worker, row in rows.items() if worker in known))

    def _load(self, plan: ElasticPlan, store: ShardStore, step: int) -> None:
        """Take parameters, optimizer and counters from the checkpoint; nothing of what this worker held counts."""
        state, host = self._state, self._host
        state.live = None
        state.captures.clear()
        state.fitted = state.gathered = None
        host.rebuild(plan)  # also where it fits: it may be what did not stand the checks
        state.fitted = Fit.of(plan, state.worker)
        host.load_checkpoint(step)
        host.sync_parameters()
        state.gathered = step
        self._pool.keep_own(store, step)

    def _verify_parameters(self, plan: ElasticPlan, version: int) -> None:
        """Compare what forward passes use. Every seated worker calls it; it is also a barrier.

        Raises:
            VerificationFailed: Something does not fit.
        """
        verify(plan, self._evidence(plan, version), self._groups.all_gather_rows, lambda owner: None, BEFORE_FORWARD)

    def _evidence(
        self,
        plan: ElasticPlan,
        version: int,
        *,
        store: ShardStore | None = None,
        sent: Sums | None = None,
        borrowed: tuple[tuple[int, int], ...] = (),
        inspection: Inspection | None = None,
    ) -> Evidence:
        """What this worker has to show; of optimizer state only with a ``store`` that is complete."""
        worker = self._state.worker
        parameters = self._state.catalogue.parameters(plan, plan.placement.seat(worker).stage)
        mirrors = {}
        if store is not None:
            for ward, copies in store.wards.items():
                mirrors[ward] = Copy(layout=store.ward_layouts[ward], flat=copies.get(version))
        return Evidence(
            worker=worker,
            version=version,
            inspection=self._host.inspect() if inspection is None else inspection,
            expected={parameter.name: parameter.count for parameter in parameters},
            sent=sent,
            source=None if store is None else store.own.get(version),
            borrowed=borrowed,
            mirrors=mirrors,
        )

    def _look(
        self, plan: ElasticPlan, store: ShardStore, version: int, sent: Sums | None, wait: Callable[[], float]
    ) -> _Looked:
        """On the thread that follows, after a migration: all that ``_verify`` compares, but for the exchange."""
        inspection = self._host.inspect()
        wait()
        evidence = self._evidence(plan, version, store=store, sent=sent, inspection=inspection)
        return _Looked(evidence, evidence.row(plan))

    def _verify(
        self,
        plan: ElasticPlan,
        store: ShardStore,
        version: int,
        sent: Sums | None,
        base: ShardStore | None,
        borrowed: tuple[tuple[int, int], ...],
        looked: _Looked | None = None,
    ) -> None:
        """Compare what must fit together across workers. Every seated worker calls it; it is also the barrier
        after which the new layout counts.

        Raises:
            VerificationFailed: Something does not fit.
        """
        evidence, row = looked or (
            self._evidence(plan, version, store=store, sent=sent, borrowed=borrowed), None,
        )  # fmt: skip

        def drop(owner: int) -> None:
            for copies in (store.wards.get(owner), None if base is None else base.wards.get(owner)):
                if copies is not None:
                    copies.forget_after(version - 1)

        verify(plan, evidence, self._groups.all_gather_rows, drop, row=row)


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
