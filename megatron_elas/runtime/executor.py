"""Carries out a plan on one worker: edit groups, restore, rebuild, verify.

It decides nothing. Each step may be cut short by a further membership change (EpochChanged); the
layout the state was found in stays whole until a step is committed under the new one, so the next
recovery starts from there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from megatron_elas.runtime.communicator.membership import Membership
from megatron_elas.runtime.migration import apply_moves
from megatron_elas.runtime.ports import Control, FaultPoint, Groups, Host, Order
from megatron_elas.runtime.snapshots import SnapshotPool
from megatron_elas.runtime.state import WorkerState
from megatron_elas.runtime.store import ShardStore
from megatron_elas.runtime.transport.base import Transport
from megatron_elas.spec.errors import EpochChanged, StateInvalid
from megatron_elas.spec.moves import plan_moves
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.report import RecoveryReport

FIELDS = ("stage", "lane", "resume step", "consumed samples", "parameter hash", "owned elements", "total elements")


def make_store(host: Host, plan: ElasticPlan, worker: int, versions: int) -> ShardStore:
    """Empty copies for a seated worker's own shard and its wards' under the plan."""
    seat = plan.placement.seat(worker)
    layouts = host.shard_layouts(plan.placement.replicas(seat.stage, seat.lane))
    return ShardStore(
        layout=layouts[worker],
        backups=plan.backups_of(worker),
        wards={ward: layouts[ward] for ward in plan.wards_of(worker)},
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
            loop_step: The step that this worker's training loop is in; names the place for fault scripts.

        Returns:
            Marks of the phases done here and the bytes sent.

        Raises:
            EpochChanged: Another change struck meanwhile.
            StateInvalid: A check failed.
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
        # A spare that was behind may not have the layout; it holds nothing of it either.
        base_plan, base = state.stores.get(settlement.base_epoch, (plan, None))
        for epoch in [e for e in state.stores if e != settlement.base_epoch]:
            del state.stores[epoch]
        state.plan = plan
        if seated:
            self._host.follow_groups(plan)
            self._host.clear_step()
            self._groups.open_links()
        marks["groups"] = time.time()

        self._strike(loop_step, "recovery", None)
        self._strike(loop_step, "recovery-restore", None)
        store, moved_bytes = self._restore(base_plan, base, plan, settlement.resume_step, alive)
        marks["restore"] = time.time()
        if store is not None:
            self._pool.renew(store, settlement.resume_step)  # on its way while the optimizer is built
            self._strike(loop_step, "recovery-rebuild", None)
            self._rebuild(plan, store, settlement.resume_step)
            marks["rebuild"] = time.time()
            self._pool.wait()
            self._strike(loop_step, "recovery-verify", None)
            self._verify(plan, settlement.resume_step)
            marks["verify"] = time.time()
        state.stores[plan.epoch] = (plan, store)
        state.live = settlement.resume_step if store is not None else None
        return RecoveryReport(
            worker=state.worker, epoch=plan.epoch, resume_step=settlement.resume_step, marks_s=marks,
            moved_bytes=moved_bytes,
        )  # fmt: skip

    def _restore(
        self, base_plan: ElasticPlan, base: ShardStore | None, plan: ElasticPlan, version: int, alive: set[int]
    ) -> tuple[ShardStore | None, int]:
        """This worker's copies under the new plan, own shard complete; bytes sent to others."""
        state, host = self._state, self._host
        if base is None:  # was a spare already, holds nothing
            return None, 0
        if version not in base.own.held:
            assert state.live == version, f"worker {state.worker} reported version {version} but has {state.live}"
            self._pool.keep_own(base, version)
        base.forget_after(version)
        seat = base_plan.placement.seat(state.worker)
        old_members = base_plan.placement.replicas(seat.stage, seat.lane)
        new_members = plan.placement.replicas(seat.stage, seat.lane)
        if old_members == new_members:
            return base, 0
        old_layouts = host.shard_layouts(old_members)
        new_layouts = host.shard_layouts(new_members)
        holders = {owner: owner if owner in alive else _backup(base_plan, owner) for owner in old_members}
        moves = plan_moves(old_layouts, new_layouts, holders)
        sources = {
            owner: base.copy_of(owner, state.worker).get(version)
            for owner, holder in holders.items()
            if holder == state.worker
        }
        store = None
        target = None
        if state.worker in new_members:
            store = make_store(host, plan, state.worker, self._pool.mode.versions)
            target = store.own.begin(version)
            target[-1] = base.own.get(version)[-1]
        moved_bytes = apply_moves(moves, state.worker, sources, target, self._transport)
        if store is not None:
            store.own.complete(version)
        return store, moved_bytes

    def _rebuild(self, plan: ElasticPlan, store: ShardStore, version: int) -> None:
        """Make the restored shard the one in use, on buffers and an optimizer that fit the groups."""
        state, host = self._state, self._host
        seat = plan.placement.seat(state.worker)
        members = plan.placement.replicas(seat.stage, seat.lane)
        stale = state.live != version
        state.live = None
        if state.fitted != members:
            state.fitted = ()
            host.rebuild(plan)
            state.fitted = members
            stale = True
        if stale:
            host.write_shard(store.own.get(version))
        host.sync_parameters()
        if version in state.captures:  # not there on a worker that had not yet entered that step
            host.rewind(state.captures[version])

    def _verify(self, plan: ElasticPlan, version: int) -> None:
        """Compare what must be equal across workers. Every seated worker calls it; it is also the barrier
        after which the new layout counts.

        Raises:
            StateInvalid: Replicas differ, a counter differs, or owned elements do not add up.
        """
        seat = plan.placement.seat(self._state.worker)
        digest = self._host.digest()
        row = (
            seat.stage, seat.lane, version, digest.consumed_samples, digest.parameter_hash, digest.owned_numel,
            digest.total_numel,
        )  # fmt: skip
        check_digests(plan, self._groups.all_gather_rows(row))


def _backup(plan: ElasticPlan, owner: int) -> int:
    backup = plan.backup_of(owner)
    assert backup is not None, f"worker {owner} is lost and had no backup; the controller should not have settled"
    return backup


def check_digests(plan: ElasticPlan, rows: Sequence[Sequence[int]]) -> None:
    """Raise StateInvalid when workers disagree.

    Args:
        plan: The plan in force.
        rows: One per seated worker by ascending worker id, the columns of FIELDS.
    """
    by_worker = dict(zip(plan.placement.workers, rows, strict=True))
    first_worker, first = next(iter(by_worker.items()))
    for worker, row in by_worker.items():
        for column in (2, 3):
            if row[column] != first[column]:
                raise StateInvalid(
                    f"epoch {plan.epoch}: worker {worker} is at {FIELDS[column]} {row[column]}, worker {first_worker} "
                    f"at {first[column]}: training cannot go on. Restart from the newest checkpoint with --load"
                )
    for stage in range(plan.placement.num_stages):
        for lane in range(plan.placement.tensor_parallel):
            members = plan.placement.replicas(stage, lane)
            hashes = {worker: by_worker[worker][4] for worker in members}
            if len(set(hashes.values())) > 1:
                raise StateInvalid(
                    f"epoch {plan.epoch}: the parameters of stage {stage} lane {lane} differ between replicas "
                    f"(hashes {hashes}): training cannot go on. Restart from the newest checkpoint with --load"
                )
            owned = sum(by_worker[worker][5] for worker in members)
            total = by_worker[members[0]][6]
            if owned != total:
                raise StateInvalid(
                    f"epoch {plan.epoch}: workers {list(members)} own the optimizer state of {owned} elements of stage "
                    f"{stage} lane {lane}, the stage has {total}. Restart from the newest checkpoint with --load"
                )
