"""What the emulated devices of one machine see of each other: times and clocks in a file that all of them map.

Times are of ``time.monotonic()``, which all processes of a machine share. Every number has one writer, but for clocks,
and is read and written whole.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from megatron_elas.spec.device import ClockRange
from megatron_elas.spec.errors import BadUsage

TAGS = 1 << 16
"""Messages that a worker's sends are told apart by."""
_COMPUTED, _CLOCK, _ASKED_CLOCK, _CLOCK_FROM = range(4)
_HEADER = 8
"""Numbers of a worker before those of its messages."""
NUMBER_BYTES = 8


class Board:
    """A row of numbers for each worker; zero where nothing was written."""

    def __init__(self, path: Path, workers: int) -> None:
        """Open the file, or make it; it takes only the space of what is written."""
        self._row = _HEADER + TAGS
        size = workers * self._row * NUMBER_BYTES
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, size)
            self._map = mmap.mmap(file, size)
        finally:
            os.close(file)
        self._numbers = memoryview(self._map).cast("d")

    def computed(self, worker: int, at_s: float) -> None:
        """The worker's newest backward pass ended then."""
        self._numbers[worker * self._row + _COMPUTED] = at_s

    def computed_s(self, worker: int) -> float:
        """When the worker's newest backward pass ended."""
        return self._numbers[worker * self._row + _COMPUTED]

    def sent(self, worker: int, tag: int, at_s: float) -> None:
        """The worker's next message with this tag leaves then. Called before it is sent."""
        self._numbers[worker * self._row + _HEADER + tag] = at_s

    def sent_s(self, worker: int, tag: int) -> float:
        """When the worker's newest message with this tag left. Called when it is here."""
        return self._numbers[worker * self._row + _HEADER + tag]

    def ask_clock(self, worker: int, clock: float, from_s: float) -> None:
        """Have a worker's device run at this clock from then on; until then it runs at the one it was asked for before.

        Anybody may ask; ``clock`` is relative to the nominal one.
        """
        if not clock > 0:
            raise BadUsage(f"clock is {clock}: give a number above 0, where 1.0 is nominal")
        at = worker * self._row
        self._numbers[at + _CLOCK] = self._numbers[at + _ASKED_CLOCK]
        self._numbers[at + _CLOCK_FROM] = from_s
        self._numbers[at + _ASKED_CLOCK] = clock

    def clock(self, worker: int, now_s: float) -> float:
        """The clock that a worker's device runs at."""
        at = worker * self._row
        here = _ASKED_CLOCK if now_s >= self._numbers[at + _CLOCK_FROM] else _CLOCK
        return self._numbers[at + here] or 1.0

    def close(self) -> None:
        """Let go of the file."""
        self._numbers.release()
        self._map.close()


def set_clock(board: Board, worker: int, clock: float, clocks: ClockRange, now_s: float, speed: float = 1.0) -> float:
    """Set a worker's clock as its device would: to the next setting that is no slower, and after its latency.

    Args:
        board: Of the job.
        worker: Whose device.
        clock: Relative to the nominal one.
        clocks: What the device can be set to.
        now_s: Of ``time.monotonic()``.
        speed: How much faster than real devices the emulated ones run.

    Returns:
        The setting.
    """
    setting = clocks.at_least(clock)
    board.ask_clock(worker, setting, now_s + clocks.latency_s / speed)
    return setting
