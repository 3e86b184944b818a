"""How workers agree on a migration without asking anybody: by two polls in a sum that they make in every step anyway.

Every seated worker votes for the epoch of the order that it knows of at the begin of the step, and for that of the one
whose state is complete. Each hears how many vote as it does. When that is all of them, all hear it in the same step:

* all know the order in step ``j``: its state is streamed from step ``j + 1`` on; where it is to move at once
  (``blocking``) the switch is between ``j`` and ``j + 1``;
* all have the state in step ``k``, whose gradients are handed over after the poll: the switch is between ``k`` and
  ``k + 1``.

Any end of the membership ends the migration, and the controller asks for another one if it wants.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from megatron_elas.runtime.ports import Control, Host, Migration
from megatron_elas.runtime.state import WorkerState
from megatron_elas.runtime.streaming import Streaming
from megatron_elas.runtime.transport.base import Transport
from megatron_elas.spec.catalogue import Catalogue
from megatron_elas.spec.migration import MigrationMode
from megatron_elas.spec.moves import Move
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.remap import plan_remap
from megatron_elas.spec.streams import Stream, plan_streams
from megatron_elas.spec.transaction import Update

logger = logging.getLogger(__name__)

PREBUILD_S = 0.01
"""Between two steps, for layers that are made ahead; one is made in any case."""


class Migrating:
    """One worker's part in migrations, up to the switch. Called on its main thread."""

    def __init__(
        self, state: WorkerState, host: Host, transport: Transport, control: Control, mode: MigrationMode
    ) -> None:
        """Nothing is known.

        Args:
            state: Of this worker.
            host: Holds the shard in use.
            transport: Links to the others.
            control: Has the newest order.
            mode: The same on all workers.
        """
        self._state = state
        self._host = host
        self._transport = transport
        self._control = control
        self._mode = mode
        self._order: Migration | None = None
        """What this worker votes for."""
        self._prebuilt = False
        """Whether the host has made ahead what it can for this order."""
        self._ahead: Future[tuple[tuple[Move, ...], tuple[Stream, ...]]] | None = None
        """Of the order: all moves, and what of them is streamed; made beside steps."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="elas-migrating")
        self._vote = 0
        """Of the step under way."""
        self._refused = 0
        self._stream_from: int | None = None
        self._switch_at: int | None = None
        self.streaming: Streaming | None = None
        """From the first step on in which something is sent."""

    def begin_step(self, step: int) -> bool:
        """Look for an order. Gives whether state is sent or followed in this step, so that ``stream`` is due."""
        if self._mode == "off":
            return False
        if self._stream_from is None:
            self._look()
        elif self._mode == "async" and self._order is not None and step == self._stream_from:
            assert self._ahead is not None
            _, streams = self._ahead.result()
            self.streaming = Streaming(self._state.worker, streams, step, self._transport, self._host, self._thread)
        if self._order is not None and not self._prebuilt:
            self._prebuild(self._order)
        return self.streaming is not None

    def _prebuild(self, order: Migration) -> None:
        began_s = time.monotonic()
        try:
            while not self._prebuilt and time.monotonic() < began_s + PREBUILD_S:
                self._prebuilt = self._host.prebuild(order.plan)
        except Exception as error:  # nothing has changed yet, and training needs nothing of it
            self._host.forget_prebuilt()
            if self._stream_from is None:
                self._decline(order, error)
            else:  # all have agreed: the switch makes what it needs
                logger.warning("worker %d could not make layers ahead", self._state.worker, exc_info=error)
                self._prebuilt = True

    def _decline(self, order: Migration, error: BaseException) -> None:
        """Never vote for it: what a migration needs has failed here, ahead of it."""
        self._refused, self._order, self._prebuilt = order.plan.epoch, None, False
        logger.warning(
            "worker %d cannot go over to the plan of epoch %d", self._state.worker, order.plan.epoch, exc_info=error
        )
        self._control.declined(order.plan.epoch, f"{type(error).__name__}: {error}")

    def stream(self, step: int) -> None:
        """Begin to send what is due in this step."""
        assert self.streaming is not None
        self.streaming.begin_step(step)

    def _look(self) -> None:
        """For an order that can be followed from the plan in force."""
        state, order = self._state, self._control.migration
        if order is None or order.plan.epoch <= state.plan.epoch:
            self._order = None
            return
        if order.plan.epoch == self._refused:
            self._order = None
            return
        if self._order is not None and self._order.plan.epoch == order.plan.epoch:
            failed = self._ahead.exception() if self._ahead is not None and self._ahead.done() else None
            if failed is not None:
                self._decline(order, failed)
            return
        strangers = set(order.plan.placement.workers) - set(state.plan.placement.workers)
        if strangers:
            self._decline(order, ValueError(f"it seats workers {sorted(strangers)}, which have no part in steps now"))
            return
        self._order = order
        self._prebuilt = order.plan.placement.find_seat(state.worker) is None
        self._ahead = self._thread.submit(_look_ahead, state.catalogue, state.plan, order.plan)

    def ballot(self) -> tuple[int, int]:
        """See ``Session.ballot``."""
        ready = self._ahead is not None and self._ahead.done() and self._ahead.exception() is None
        known = self._vote = self._order.plan.epoch if self._order is not None and ready else 0
        complete = self._prebuilt and self.streaming is not None and self.streaming.complete
        return known, known if complete else 0

    def count_ballots(self, votes: tuple[int, int], voters: int, step: int) -> None:
        """See ``Session.count_ballots``."""
        if not self._vote:
            return
        known, complete = votes
        if self._stream_from is None and known == voters:
            if self._mode == "blocking":
                self._switch_at = step + 1
            self._stream_from = step + 1
        if self._mode == "async" and complete == voters:
            self._switch_at = step + 1

    def hand_over(self, step: int, gradients: torch.Tensor) -> None:
        """The step's gradients are reduced: begin to bring those of moving pieces to new owners.

        Raises:
            EpochChanged, PeerLost: What was sent before was cut short.
        """
        if self.streaming is not None:
            self.streaming.hand_over(step, gradients)

    def follow(self, update: Update) -> None:
        """The step is sure to be finished."""
        if self.streaming is not None:
            self.streaming.follow(update)

    @property
    def moves(self) -> tuple[Move, ...]:
        """All that lead to the plan that is gone over to."""
        assert self._ahead is not None
        moves, _ = self._ahead.result()
        return moves

    def due(self, step: int) -> Migration | None:
        """The order to go over to before this step, if any."""
        return self._order if step == self._switch_at else None

    def end(self) -> None:
        """This migration is over, or the membership has ended: forget it, and what was sent for it."""
        streaming, self.streaming = self.streaming, None
        if self._order is not None:
            self._host.forget_prebuilt()  # where it was used, none is left
        self._order = self._ahead = None
        self._prebuilt = False
        self._stream_from = self._switch_at = None
        self._vote = 0
        if streaming is not None:
            streaming.drain()

    def close(self) -> None:
        """End the thread."""
        self.end()
        self._thread.shutdown()


def _look_ahead(
    catalogue: Catalogue, base: ElasticPlan, plan: ElasticPlan
) -> tuple[tuple[Move, ...], tuple[Stream, ...]]:
    moves = plan_remap(catalogue, base, plan, {worker: worker for worker in base.placement.workers})
    return moves, plan_streams(catalogue, base, moves)
