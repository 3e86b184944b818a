"""The step as seen by one worker: run it, commit it, or recover and run it again.

A step ``k`` of the training loop::

    stage own shard (version k), start to send it to the backup     overlaps with
    forward, backward, reduce, optimizer, parameter gather          the host's step
    wait for the copies of version k, sent and received
    commit barrier                                                  now step k counts

Version ``v`` is the state before step ``v``. Two versions are kept, so whenever a membership ends
there is one that is whole on all survivors: ``k`` if the lost worker's copy of it had arrived,
``k - 1`` otherwise. Steps from there are run again on the same samples; a step the loop has
already returned from is run again silently.

Between steps (logging, evaluation, saving) collectives are *tolerant*: they finish locally when
the membership ends, and the next step's entry recovers. A worker whose loop is behind the
furthest survivor's is *muted* between steps, because the others will not join those collectives.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from megatron_elas.runtime.executor import Executor, make_store
from megatron_elas.runtime.ports import Control, FaultPoint, Groups, Host
from megatron_elas.runtime.replicator import Replicator
from megatron_elas.runtime.state import WorkerState
from megatron_elas.runtime.transport.base import Transport
from megatron_elas.spec.errors import EpochChanged, PeerLost
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.report import RecoveryReport, SettleReport

logger = logging.getLogger(__name__)

Body = Callable[[int], Any]
"""Runs the host's own step of the given number, from the state before it."""


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
    ) -> None:
        self.worker = worker
        self._plan = plan
        self._transport = transport
        self._groups = groups
        self._control = control
        self._strike = strike
        self._replicator = Replicator(transport)
        self._state: WorkerState | None = None
        self._executor: Executor | None = None
        self._host: Host | None = None
        self._body: Body | None = None
        self._outcome: tuple[int, Any] | None = None
        self._lead = 0
        self._open_report: RecoveryReport | None = None

    @property
    def plan(self) -> ElasticPlan:
        """The plan in force."""
        return self._state.plan if self._state is not None else self._plan

    @property
    def interrupted(self) -> bool:
        """A membership has ended and this worker has not recovered yet."""
        return self._transport.cancelled or self._groups.pending_error is not None

    def attach(self, host: Host, first_step: int) -> None:
        """Give the session its host, when model and optimizer exist. Called once, before the first step."""
        seat = self._plan.placement.seat(self.worker)
        self._host = host
        self._state = WorkerState(
            worker=self.worker,
            plan=self._plan,
            live=first_step,
            fitted=self._plan.placement.replicas(seat.stage, seat.lane),
        )
        store = make_store(host, self._plan, self.worker)
        self._state.stores[self._plan.epoch] = (self._plan, store)
        self._executor = Executor(self._state, host, self._transport, self._replicator, self._control, self._strike)
        logger.info(
            "worker %d: optimizer shard of %d elements, backup on worker %s, copies take %.1f MiB of host memory",
            self.worker, store.layout.numel, store.backup, store.num_bytes / 2**20,
        )  # fmt: skip

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[bool]:
        """For collectives between steps that must be whole or not at all (evaluation, saving).

        Gives False when this worker must leave them out: a membership has ended, or its loop is behind.
        Inside, a membership change raises EpochChanged instead of being passed over.
        """
        if self.interrupted or self._groups.muted:
            yield False
            return
        self._groups.tolerant = False
        try:
            yield True
        finally:
            self._groups.tolerant = True

    def interrupt(self, error: EpochChanged) -> None:
        """Something between steps was cut short by ``error``: the next step's entry recovers."""
        self._report_peer(error)
        self._transport.cancel()

    def mark_dirty(self) -> None:
        """The optimizer is about to change parameters: what is in use is no complete version until the step ends."""
        assert self._state is not None
        self._state.live = None

    def run_step(self, step: int, body: Body) -> Any:
        """Run and commit step ``step`` of the loop, through any number of membership changes.

        Args:
            step: Number of the step, counted from 0 over the whole training.
            body: Runs the host's step of the given number; called again for steps that are run again.

        Returns:
            What ``body(step)`` returned in the run that counts.
        """
        self._body = body
        self._groups.muted = self._groups.tolerant = False
        self._advance(step)
        self._groups.muted = step < self._lead
        self._groups.tolerant = True
        assert self._outcome is not None and self._outcome[0] == step
        self._strike(step, "between", None)
        return self._outcome[1]

    def finish(self, next_step: int) -> None:
        """Training is over: wait until it is over for all, recovering once more if need be."""
        self._groups.muted = self._groups.tolerant = False
        while True:
            try:
                self._run_until(next_step)
                dist.barrier()
                break
            except EpochChanged as error:
                self._recover(next_step, error)
        self._control.finished()
        self._replicator.close()

    # ------------------------------------------------------------ the step

    def _advance(self, step: int) -> None:
        while True:
            try:
                self._run_until(step + 1)
                return
            except EpochChanged as error:
                self._recover(step, error)

    def _run_until(self, stop: int) -> None:
        """Run steps from the live version up to ``stop``."""
        assert self._state is not None
        pending = self._groups.pending_error
        if pending is not None:
            raise EpochChanged(f"a collective between steps was cut short: {pending}") from pending
        if self._transport.cancelled:
            raise EpochChanged("the membership ended between steps")
        while (live := self._state.live) is not None and live < stop:
            self._transact(live)

    def _transact(self, step: int) -> None:
        state, host, body = self._state, self._host, self._body
        assert state is not None and host is not None and body is not None
        self._control.progress(state.plan.epoch, step)
        store = state.store
        if step not in store.own.held:
            host.read_shard(store.own.begin(step))
            store.own.complete(step)
            self._replicator.start(store, step)
            if not state.captures:  # no older version to fall back to: be safe before the first forward
                self._replicator.wait()
        state.captures[step] = host.capture()
        state.captures.pop(step - 2, None)
        self._strike(step, "snapshot", None)
        result = body(step)
        state.live = step + 1
        self._outcome = (step, result)
        self._replicator.wait()
        self._strike(step, "commit", None)
        dist.barrier()
        state.retire_old_layouts()
        if self._open_report is not None:
            report, self._open_report = self._open_report, None
            report.marks_s["first_step"] = time.time()
            self._control.recovered(report)

    # ------------------------------------------------------------ recovery

    def _recover(self, step: int, error: EpochChanged) -> None:
        """Take part in recoveries until one succeeds. A spare stays here until it gets a seat or is ended."""
        state = self._state
        assert state is not None
        self._groups.muted = self._groups.tolerant = False
        idle = False
        while True:
            self._report_peer(error)
            error.__traceback__ = None  # it holds the frames, and with them the activations, of the cancelled step
            try:
                seated = self._recover_once(step, idle)
            except EpochChanged as newer:
                logger.warning("worker %d: another change during the recovery: %s", self.worker, newer)
                error = newer
                continue
            if seated:
                return
            logger.info("worker %d: no seat in epoch %d, waiting as a spare", self.worker, state.plan.epoch)
            idle = True

    def _recover_once(self, step: int, idle: bool) -> bool:
        """One recovery. Gives whether this worker has a seat after it."""
        state, executor, control = self._state, self._executor, self._control
        assert state is not None and executor is not None
        announcement = control.wait_quiesce(state.plan.epoch, idle=idle)
        self._transport.cancel()  # also ends what is in flight after a link broke
        self._groups.drain()
        self._groups.clear_pending()  # or the groups would stay silent during the recovery
        self._replicator.drain()
        unwound_s = time.time()
        holdings = state.holdings()
        control.settled(SettleReport(worker=self.worker, epoch=announcement.epoch, step=step, holdings=holdings))
        report = executor.apply(control.wait_recover(announcement.epoch))
        report.marks_s["quiesce"] = unwound_s
        self._lead = max(self._lead, executor.lead_step)
        seated = state.stores[state.plan.epoch][1] is not None
        if seated:
            self._open_report = report
        else:
            control.recovered(report)
        return seated

    def _report_peer(self, error: BaseException | None) -> None:
        """Tell the controller when a broken link is behind ``error``."""
        assert self._state is not None
        while error is not None:
            if isinstance(error, PeerLost):
                self._control.peer_unreachable(self._state.plan.epoch, error.peer, str(error))
                return
            error = error.__cause__
