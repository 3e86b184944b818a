"""The step as seen by one worker: run it, finish or drop it when the membership ends, and run it again.

A step ``k`` of the training loop goes through the phases of ``spec.transaction``. The host runs its own step in
``body(k)`` and calls back: ``exchange_gradients`` when they are reduced, ``prepare`` when the norm is known,
``applied`` when the optimizer has changed the shard.

Version ``v`` is the state before step ``v``. When a membership ends, all survivors go on from one version: the one
after the open step if that step commits, else the one before it. A step the loop has already returned from
is run again silently, where copies are kept the way that needs it (see ``snapshots``).

Steps, evaluations and saves are *joint activities*: all workers do them in the same order, and each has
a point that nobody passes before all have come to it (the norm of a step, a barrier at the end of the others), so no
loop is ever more than one ahead of another. An evaluation or a save that is cut short
is run again after the recovery, unless somebody has left its barrier already: then it counts for all.

Between activities (logging) collectives are *tolerant*: they finish locally when the membership ends, and the
next activity recovers. A worker whose loop was behind another's at a recovery is *muted* there until its next
activity, because the others have done those collectives already.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megatron_elas.runtime.comparison import BadCopy
from megatron_elas.runtime.executor import Executor, gather_catalogue
from megatron_elas.runtime.migrating import Migrating
from megatron_elas.runtime.ports import Control, FaultPoint, Groups, Host, Migration
from megatron_elas.runtime.restoring import make_store
from megatron_elas.runtime.snapshots import SnapshotMode, SnapshotPool
from megatron_elas.runtime.state import Fit, WorkerState
from megatron_elas.runtime.transport.base import Transport
from megatron_elas.spec.errors import ElasticError, EpochChanged, PeerLost, VerificationFailed, comes_of
from megatron_elas.spec.migration import MigrationMode, MigrationReport
from megatron_elas.spec.plan import ElasticPlan, Settlement
from megatron_elas.spec.report import RecoveryReport, SettleReport
from megatron_elas.spec.transaction import FOLLOWS, StepPhase, Update

logger = logging.getLogger(__name__)

Body = Callable[[int], Any]
"""Runs the host's own step of the given number, from the state before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispensable[R]:
    """Marks what training can do without when it fails."""

    purpose: str
    """For people: ``save the checkpoint of iteration 8``."""
    instead: Callable[[], R]
    """What stands for it when it is left out."""


class FailedElsewhere(Exception):
    """What a body raises when it failed on the worker ``culprit``; the text is the reason."""

    def __init__(self, culprit: int, reason: str) -> None:
        super().__init__(reason)
        self.culprit = culprit


class ToldElsewhere(Exception):
    """What a body raises when it failed on some worker, and another one is told which and why, and passes it on."""


class _Unseated(EpochChanged):
    """A migration has left this worker without a seat."""


class Session:
    """One per worker process."""

    def __init__(
        self,
        worker: int,
        plan: ElasticPlan,
        transport: Transport,
        groups: Groups,
        control: Control,
        strike: FaultPoint,
        mode: SnapshotMode = SnapshotMode.REPLAY,
        verify_interval: int = 0,
        *,
        moves_beside: bool = True,
        migration: MigrationMode = "off",
    ) -> None:
        """Args:
        worker: Its id.
        plan: Of epoch 0.
        transport: Links to the others.
        groups: The process groups of this worker.
        control: Line to the controller.
        strike: Called where a fault script may strike.
        mode: How copies are kept.
        verify_interval: Steps from one comparison of copies with their owners to the next; 0: none.
        moves_beside: Whether optimizer state may move while the first step after a loss runs.
        migration: Whether, and how, to go over to other plans while everybody lives.
        """
        self.worker = worker
        self._first_plan: ElasticPlan | None = plan
        """Until ``attach``; from then on the state has the plan."""
        self._transport = transport
        self._groups = groups
        self._control = control
        self._strike = strike
        self._mode = mode
        self._verify_interval = verify_interval
        """Steps from one comparison of copies with their owners to the next; 0: none."""
        self._moves_beside = moves_beside
        self._migration: MigrationMode = migration
        self._migrating: Migrating | None = None
        self._pool: SnapshotPool | None = None
        self._state: WorkerState | None = None
        self._executor: Executor | None = None
        self._host: Host | None = None
        self._body: Body | None = None
        self._outcome: tuple[int, Any] | None = None
        self._finished: Update | None = None
        """Of the step that was finished in the newest recovery."""
        self._phase = StepPhase.COMPUTE
        self._running: int | None = None
        """The step whose body has begun and not returned."""
        self._next_step = 0
        self._activity = 0
        """Joint activities that the loop has completed."""
        self._inside = False
        self._copied = False
        """Whether all first copies are at the backups."""
        self._lead = 0
        """The most that any survivor had completed at the last recovery."""
        self._open_report: RecoveryReport | None = None
        self._open_migration: MigrationReport | None = None
        self._unlooked = False
        """Whether the membership has ended and nobody has looked yet of which version the parameters are."""

    @property
    def plan(self) -> ElasticPlan:
        """The plan in force."""
        plan = self._state.plan if self._state is not None else self._first_plan
        assert plan is not None
        return plan

    @property
    def next_step(self) -> int:
        """The step that the training loop is in, or about to enter."""
        return self._next_step

    @property
    def coming_activity(self) -> int | None:
        """Number of the joint activity that the training loop comes to next; None inside one."""
        return None if self._inside else self._activity

    @property
    def attached(self) -> bool:
        """Whether training has begun here, so that a loss can be recovered from."""
        return self._state is not None

    def attach(self, host: Host, first_step: int) -> None:
        """Give the session its host, when model and optimizer exist. Called once, before the first step."""
        plan = self.plan
        catalogue = gather_catalogue(host, self._groups)
        self._host = host
        self._next_step = first_step
        self._state = WorkerState(
            worker=self.worker,
            plan=plan,
            live=first_step,
            catalogue=catalogue,
            fitted=Fit.of(plan, self.worker),
        )
        self._first_plan = None
        self._pool = SnapshotPool(self._transport, host, self._mode, self._verify_interval, self._report_copy)
        store = make_store(catalogue, plan, self.worker, self._mode.versions)
        self._state.stores[plan.epoch] = (plan, store)
        self._executor = Executor(
            self._state, host, self._transport, self._pool, self._groups, self._control, self._strike,
            self._moves_beside,
        )  # fmt: skip
        self._migrating = Migrating(self._state, host, self._transport, self._control, self._migration)
        logger.info(
            "worker %d: optimizer shard of %d elements, backups on workers %s, copies take %.1f MiB of host memory",
            self.worker, store.layout.numel, list(store.backups), store.num_bytes / 2**20,
        )  # fmt: skip

    # ------------------------------------------------------------ called by the host inside a step

    def ballot(self) -> tuple[int, int]:
        """What this worker votes for in the two polls of all seated workers in every step, before it exchanges
        gradients: the epoch of the migration that it is ready for, and of the one whose state it has; else 0.
        """
        return self._migrating_in_use.ballot()

    def count_ballots(self, votes: tuple[int, int], voters: int) -> None:
        """How many of all ``voters`` vote as this worker does. Only if all do, all hear so: they come to the same
        conclusion in the same step.
        """
        _, step = self._in_step()
        self._migrating_in_use.count_ballots(votes, voters, step)

    def exchange_gradients(self) -> None:
        """The gradients of the step under way are reduced: have them at the backups before going on, and what migrates
        in this step at its new owners.

        Raises:
            EpochChanged: The membership ended.
        """
        state, step = self._in_step()
        self._enter(StepPhase.REDUCE)
        self._complete_remap()
        self._strike(step, "snapshot", None)
        gradients = self._pool_in_use.exchange(state.store, step)
        migrating = self._migrating_in_use
        if migrating.streaming is not None:
            assert gradients is not None, "copies cannot follow where gradients are not handed over"
            self._strike(step, "migrate-hand-over", None)
            migrating.hand_over(step, gradients)

    def prepare(self, update: Update) -> None:
        """The step's norm is known: from here on it is finished, whoever is lost. The optimizer runs after."""
        state, _ = self._in_step()
        self._enter(StepPhase.PREPARED)
        state.gathered = None
        self._pool_in_use.follow(state.store, update)
        self._migrating_in_use.follow(update)
        self._enter(StepPhase.APPLY)
        if self._mode is SnapshotMode.COPY:  # a half-applied update is undone; with replay it is finished
            state.live = None
        if not update.applies:
            self.applied()

    def applied(self) -> None:
        """The optimizer has changed all of the own shard."""
        state, step = self._in_step()
        self._enter(StepPhase.SYNC)
        state.live = step + 1

    def captured(self, step: int) -> object:
        """What the host captured at the start of the step under way or the one before."""
        assert self._state is not None
        return self._state.captures[step]

    def _in_step(self) -> tuple[WorkerState, int]:
        assert self._state is not None and self._running is not None, "no step is under way"
        return self._state, self._running

    def _enter(self, phase: StepPhase) -> None:
        assert phase in FOLLOWS[self._phase], f"worker {self.worker}: {phase} does not follow {self._phase}"
        self._phase = phase

    @property
    def _migrating_in_use(self) -> Migrating:
        assert self._migrating is not None
        return self._migrating

    @property
    def _pool_in_use(self) -> SnapshotPool:
        assert self._pool is not None
        return self._pool

    # ------------------------------------------------------------ called by the training loop

    def run_step(self, step: int, body: Body) -> Any:
        """Run and commit step ``step`` of the loop, through any number of membership changes.

        Args:
            step: Number of the step, counted from 0 over the whole training.
            body: Runs the host's step of the given number; called again for steps that are run again.

        Returns:
            What ``body(step)`` returned in the run that counts.
        """
        self._body = body
        self._begin_activity()
        while True:
            try:
                self._run_until(step + 1)
                break
            except EpochChanged as error:
                self._recover(step, error)
        self._end_activity()
        self._next_step = step + 1
        if self._outcome is None or self._outcome[0] != step:  # run by others while this worker had no seat
            assert self._host is not None and self._state is not None
            assert self._state.live is not None and self._state.live > step
            update = self._finished if self._finished is not None and self._finished.step == step else None
            self._outcome = (step, self._host.missed_step(step, update))
        self._strike(step, "between", None)
        return self._outcome[1]

    def run_between[R](
        self,
        body: Callable[[], R],
        optional: Dispensable[R] | None = None,
        missed: Callable[[], R] | None = None,
    ) -> R:
        """Run something between steps that all workers join and that must be whole: an evaluation, a save.

        Args:
            body: Called again after a membership change, from the state before the next step. Must leave the
                host as it found it when it raises EpochChanged, or anything that is tolerated.
            optional: Given where training can do without. An exception of ``body()`` on any worker then ends the
                epoch; in the next one it is not run again, and all take ``optional.instead()`` for it.
            missed: What stands for it on a worker that had no seat when the others ran it. Left out: ``body``, which
                then must not communicate.

        Returns:
            What ``body()`` returned in the run that counts, or what stands for it.
        """
        if self._host is None:  # before the first step nothing can be recovered
            return body()
        done: list[R] = []
        self._begin_activity()
        while True:
            try:
                self._run_until(self._next_step)
                if self._lead > self._activity:  # others have left its barrier: it counts
                    if not done:  # and this worker had no seat then
                        done[:] = [(missed or body)()]
                    break  # what is on its way is waited for where the others do, in the activity after
                self._complete_remap()
                if self._open_report is not None:  # no step is to be run here: all have passed the verification
                    self._report_recovery()
                if optional is not None and self._executor_in_use.waived_activity >= self._activity:
                    done[:] = [optional.instead()]
                    self._groups.barrier()
                    break
                # On every worker, or the replicas would not meet: one may just have run a step again, after which
                # overlapped gathers would only come with the next training step; a muted one may have missed a gather.
                self._host.sync_parameters()
                done[:] = [body() if optional is None else self._attempt(body, optional.purpose)]
                self._groups.barrier()
                break
            except EpochChanged as error:
                self._recover(self._next_step, error)
        self._end_activity()
        return done[0]

    def _attempt[R](self, body: Callable[[], R], purpose: str) -> R:
        """``body()``, whose failure ends the epoch and not the worker.

        Raises:
            EpochChanged: It failed, or the membership ended, whatever the body made of that.
        """
        assert self._state is not None
        try:
            return body()
        except ElasticError:
            raise
        except ToldElsewhere as error:
            self._executor_in_use.waived_activity = self._activity
            raise EpochChanged(str(error)) from error
        except Exception as error:  # told to everybody by the controller; training does not need what failed
            if self._transport.cancelled or comes_of(error, EpochChanged):
                raise EpochChanged(f"the membership ended, so this worker could not {purpose}: {error}") from error
            self._executor_in_use.waived_activity = self._activity
            culprit, reason = self.worker, f"{type(error).__name__}: {error}"
            if isinstance(error, FailedElsewhere):
                culprit, reason = error.culprit, str(error)
            detail = f"could not {purpose}: {reason}"
            logger.warning("worker %d %s", culprit, detail)
            self._control.leave_out(self._state.plan.epoch, culprit, detail)
            raise EpochChanged(detail) from error

    def finish(self, tell: Callable[[], None] | None = None) -> None:
        """Training is over: wait until it is over for all, recovering once more if need be.

        Args:
            tell: Tells the controller, if there is more to say than that it is over.
        """
        self.run_between(lambda: None)
        if tell is None:
            self._control.finished(self._next_step)
        else:
            tell()
        if self._pool is not None:
            self._migrating_in_use.close()
            self._pool.close()

    @property
    def _executor_in_use(self) -> Executor:
        assert self._executor is not None
        return self._executor

    # ------------------------------------------------------------ joint activities

    def _begin_activity(self) -> None:
        assert self._host is not None
        self._groups.muted = self._groups.tolerant = False
        self._host.begin_activity(self._activity)
        self._inside = True

    def _end_activity(self) -> None:
        """Between activities the loop's own collectives are tolerant; muted on a worker that is behind."""
        self._groups.muted = self._activity < self._lead
        self._groups.tolerant = True
        self._activity += 1
        self._inside = False

    # ------------------------------------------------------------ the step

    def _run_until(self, stop: int) -> None:
        """Run steps from the live version up to ``stop``.

        Raises:
            EpochChanged: The membership has ended, also when something tolerant noticed it.
        """
        assert self._state is not None
        pending = self._groups.pending_error
        if pending is not None:
            raise EpochChanged(f"a collective between steps was cut short: {pending}") from pending
        if self._transport.cancelled:
            raise EpochChanged("the membership ended between steps")
        while (live := self._state.live) is not None and live < stop:
            migration = self._migrating_in_use.due(live)
            if migration is not None:
                self._go_over(migration)
            self._transact(live)

    def _go_over(self, order: Migration) -> None:
        """Take the plan of a migration between two steps.

        Raises:
            EpochChanged: The membership has ended, or this worker has no seat under the plan.
        """
        assert self._state is not None
        migrating = self._migrating_in_use
        self._open_migration = self._executor_in_use.go_over(order, migrating.moves, migrating.streaming)
        migrating.end()
        if self._state.live is None:
            self._open_migration = None
            self._control.drained()
            raise _Unseated(f"worker {self.worker} has no seat in epoch {order.plan.epoch}")

    def _complete_remap(self) -> None:
        """Have all optimizer state in its place, and tell with the report what brought it there."""
        began_s = time.monotonic()
        if self._open_migration is not None:
            self._strike(self._open_migration.step, "migrate-verify", None)
        try:
            arrived = self._executor_in_use.complete()
        except VerificationFailed as failed:
            self._control.unverified(self.plan.epoch, failed)
            raise EpochChanged(str(failed)) from failed
        if arrived is None:
            return
        if self._open_migration is not None:
            verify_s = time.monotonic() - began_s
            self._open_migration = replace(self._open_migration, verify_s=verify_s)
            logger.info("worker %d: epoch %d was verified in %.1f ms", self.worker, self.plan.epoch, 1e3 * verify_s)
        else:
            assert self._open_report is not None
            self._open_report = replace(
                self._open_report, moved_bytes=arrived.moved_bytes, background_s=arrived.background_s
            )

    def _report_recovery(self) -> None:
        assert self._open_report is not None
        report, self._open_report = self._open_report, None
        self._control.recovered(report)

    def _transact(self, step: int) -> None:
        state, host, body = self._state, self._host, self._body
        assert state is not None and host is not None and body is not None
        self._control.progress(state.plan.epoch, step)
        store, pool = state.store, self._pool_in_use
        pool.begin_step(store, step)
        if not self._copied:  # nothing to fall back to: nobody may begin before all copies are there
            pool.wait()
            self._groups.barrier()
            self._copied = True
        state.captures[step] = host.capture()
        state.captures.pop(step - 2, None)
        if self._migrating_in_use.begin_step(step):
            self._strike(step, "migrate-stream", None)
            self._migrating_in_use.stream(step)
        self._phase = StepPhase.COMPUTE
        self._running = step
        result = body(step)
        self._running = None
        state.live = step + 1
        self._outcome = (step, result)
        self._strike(step, "commit", None)
        done_s = time.time()
        state.retire_old_layouts()
        pool.settle_in(store)
        if self._open_report is not None:
            self._open_report.marks_s["first_step"] = done_s
            self._report_recovery()
        if self._open_migration is not None:
            migration, self._open_migration = self._open_migration, None
            self._control.migrated(migration)

    # ------------------------------------------------------------ recovery

    def _recover(self, step: int, error: EpochChanged) -> None:
        """Take part in recoveries until one succeeds. A spare stays here until it gets a seat or is ended."""
        state = self._state
        assert state is not None
        self._groups.muted = self._groups.tolerant = False
        self._unlooked = True
        idle = isinstance(error, _Unseated)
        while True:
            self._report_peer(error)
            _release_frames(error)
            try:
                seated = self._recover_once(step, idle)
            except EpochChanged as newer:
                logger.warning("worker %d: another change during the recovery: %s", self.worker, newer)
                error = newer
                continue
            except VerificationFailed as failed:
                self._control.unverified(state.plan.epoch, failed)
                error = EpochChanged(str(failed))
                continue
            if seated:
                return
            logger.info("worker %d: no seat in epoch %d, waiting as a spare", self.worker, state.plan.epoch)
            idle = True

    def _recover_once(self, step: int, idle: bool) -> bool:
        """One recovery. Gives whether this worker has a seat after it."""
        state, executor, control, host = self._state, self._executor, self._control, self._host
        assert state is not None and executor is not None and host is not None
        announcement = control.wait_quiesce(state.plan.epoch, idle=idle)
        self._transport.cancel()  # also ends what is in flight after a link broke
        self._groups.drain()
        self._groups.clear_pending()  # or the groups would stay silent during the recovery
        self._pool_in_use.drain()
        self._migrating_in_use.end()
        self._open_migration = None
        unwound_s = time.time()
        self._note_parameters()
        executor.abandon()
        self._strike(step, "recovery-quiesce", None)
        holdings = state.holdings()
        control.settled(
            SettleReport(
                worker=self.worker,
                epoch=announcement.epoch,
                step=step,
                phase=self._phase,
                activity=self._activity,
                waived=executor.waived_activity,
                checkpoint=-1 if host.checkpoint is None else host.checkpoint,
                holdings=holdings,
            )
        )
        order = control.wait_recover(announcement.epoch)
        self._finish_open_step(order.settlement)
        report = executor.apply(order, step)
        self._copied = True  # a recovery ends with that
        report.marks_s["quiesce"] = unwound_s
        self._lead = max(self._lead, executor.lead_activity)
        seated = state.stores[state.plan.epoch][1] is not None
        if seated:
            self._open_report = report
        else:
            control.recovered(report)
        return seated

    def _note_parameters(self) -> None:
        """See of which version all parameters in the model are, as the membership's end has found them."""
        state, host = self._state, self._host
        assert state is not None and host is not None
        if not self._unlooked:  # a recovery that was cut short knows what it did to them
            return
        self._unlooked = False
        if self._executor_in_use.remapping and state.gathered is None:
            return  # masters were written into them that nobody has verified
        if self._running is None:
            whole = host.has_gathered(in_step=False)
        else:  # at REDUCE all forward passes have run, on gathered parameters; after it they change
            whole = self._phase is StepPhase.REDUCE or (
                self._phase is StepPhase.COMPUTE and host.has_gathered(in_step=True)
            )
        state.gathered = state.live if whole else None

    def _finish_open_step(self, settlement: Settlement) -> None:
        """Apply the step that is committed, where that has not been done, in the layout it was computed in."""
        state, host, update = self._state, self._host, settlement.commit
        assert state is not None and host is not None
        if update is not None:
            self._finished = update
        _, store = state.stores.get(settlement.base_epoch, (None, None))
        if update is not None and store is not None:
            self._pool_in_use.finish_open_step(store, update)
            if state.live == update.step and store.ready == update.step:
                host.apply_update(store.gradients(), update)
                state.live = update.step + 1
            if self._running == update.step:
                outcome = host.conclude_step(update.step, state.captures[update.step], update)
                self._outcome = (update.step, outcome)
        self._running = None
        self._phase = StepPhase.COMPUTE

    def _report_copy(self, copy: BadCopy) -> None:
        assert self._state is not None
        self._control.copy_differed(self._state.plan.epoch, copy.owner, copy.step, copy.slot)

    def _report_peer(self, error: BaseException | None) -> None:
        """Tell the controller when a broken link is behind ``error``."""
        assert self._state is not None
        while error is not None:
            if isinstance(error, PeerLost):
                self._control.peer_unreachable(self._state.plan.epoch, error.peer, error.detail)
                return
            error = error.__cause__


def _release_frames(error: BaseException | None) -> None:
    """Let go of the frames of a cancelled step: they hold its activations until the recovery is over."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
