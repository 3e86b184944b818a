"""Sends and receives of a group on an accelerator, started together.

``batch_isend_irecv`` calls ``isend`` and ``irecv`` one by one on a group that is no C++ one. Started like that, two
workers that send to each other would wait for each other for ever, since a send on an accelerator is done when it is
received. So sends and receives are collected, and started with the first ``wait`` or the next operation on the device:
per peer as one, on an inner group of the two workers.

Pairs are readied in the order of their worker ids, which is the same everywhere, so no circle of workers can wait for
each other either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from megatron_elas.runtime.communicator.accelerators.accelerator import Accelerator
from megatron_elas.runtime.communicator.accelerators.moves import Move
from megatron_elas.runtime.communicator.accelerators.plane import DevicePlane
from megatron_elas.spec.errors import EpochChanged

Tolerate = Callable[[EpochChanged], bool]


class TransferWork(Work):
    """A send or receive that starts when it is waited for, if not before."""

    def __init__(self, start: Callable[[], None], move: Move) -> None:
        super().__init__()
        self._start = start
        self.move = move
        self.started: Work | None = None
        """The work of everything that was started with it."""
        self.error: BaseException | None = None
        self.void = False
        """It never took place, and that is no error."""

    def _begun(self) -> Work | None:
        if self.started is None and self.error is None and not self.void:
            self._start()
        if self.error is not None:
            raise self.error.with_traceback(None)
        return self.started

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait for it. Raises as ``DeviceWork.wait``."""
        started = self._begun()
        if started is not None:
            started.wait() if timeout is None else started.wait(timeout)
        return True

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def block_current_stream(self) -> None:
        """As ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the device is done with it; asking starts it."""
        started = self._begun()
        return started is None or started.is_completed()

    def is_success(self) -> bool:
        """Whether it is done, without an error."""
        started = self._begun()
        return started is None or started.is_success()

    def result(self) -> list[Tensor]:
        """Its tensors."""
        return self.move.tensors

    def get_future(self) -> Future[Any]:
        """The vendor's future; complete at once for what never took place."""
        started = self._begun()
        if started is not None:
            return started.get_future()
        future: Future[Any] = Future()
        future.set_result(self.move.tensors)
        return future


class Transfers:
    """Those of one group."""

    def __init__(self, accelerator: Accelerator, worker: int, name: str, tolerate: Tolerate) -> None:
        """``tolerate`` is asked about errors that an epoch's end causes, as for ``DevicePlane.run``."""
        self._accelerator = accelerator
        self._worker = worker
        self._name = name
        self._tolerate = tolerate
        self._lock = threading.RLock()
        self._waiting: dict[int, list[TransferWork]] = {}
        self._pairs: dict[int, DevicePlane] = {}

    @property
    def planes(self) -> list[DevicePlane]:
        """One per peer that was ever sent to or received from, and is still a member."""
        return list(self._pairs.values())

    def add(self, direction: str, tensors: list[Tensor], peer: int, tag: int, channel: int) -> TransferWork:
        """Ask for a send or receive.

        Args:
            direction: ``"send"`` or ``"recv"``.
            tensors: One.
            peer: Worker id.
            tag: torch's.
            channel: Where the two workers meet.
        """
        work = TransferWork(lambda: self.start(channel), Move(direction, tensors, int(peer > self._worker), tag))
        with self._lock:
            self._waiting.setdefault(peer, []).append(work)
        self._accelerator.start_later(self, lambda: self.start(channel))
        return work

    def start(self, channel: int) -> None:
        """Start all that wait. Errors surface in their works."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            for peer, works in sorted(waiting.items(), key=lambda item: sorted((self._worker, item[0]))):
                moves = [work.move for work in works]
                kind = moves[0].direction if len(moves) == 1 else "sends and receives"
                try:
                    started = self._pair(peer).run(
                        kind,
                        lambda inner, moves=moves: self._accelerator.driver.transfer(inner, moves),  # type: ignore[misc]
                        channel,
                        self._tolerate,
                    )
                except Exception as error:  # raised by whoever waits
                    self._fail(works, error)
                else:
                    for work in works:
                        work.started = started

    def edit(self, members: Sequence[int]) -> None:
        """Drop what waits, and the inner groups with those who are no members any more."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for works in waiting.values():
            self._fail(works, EpochChanged(f"a transfer of group {self._name} was dropped when its epoch ended"))
        for peer in [peer for peer in self._pairs if peer not in members]:
            pair = self._pairs.pop(peer)
            pair.drop()
            pair.clear()
        for pair in self.planes:
            pair.edit(pair.members)

    def _fail(self, works: Sequence[TransferWork], error: BaseException) -> None:
        tolerated = isinstance(error, EpochChanged) and self._tolerate(error)
        for work in works:
            work.void = tolerated
            work.error = None if tolerated else error

    def _pair(self, peer: int) -> DevicePlane:
        pair = self._pairs.get(peer)
        if pair is None:
            both = tuple(sorted((self._worker, peer)))
            pair = self._accelerator.open_plane(f"workers {both[0]} and {both[1]} of group {self._name}", both)
            self._pairs[peer] = pair
        return pair
