"""``steps.jsonl`` in the job's log folder: what workers measured of their steps, one JSON object per line.

Written by the controller's process, on a thread of its own, because the folder may be on a disk that hangs. Each line
is one write(2) to a file opened for appending, so a controller that is killed leaves whole lines, and the next one goes
on behind them. What cannot be written is dropped with one warning: training does not need it.

Of each worker the first ``ALL`` reports of an epoch are written, of all together ``MOST``; then one of each worker in
``PAUSE_S``, and of all together one in ``SPACING_S``.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_elas.spec.step_report import StepReport
from megatron_elas.spec.tables import as_table

logger = logging.getLogger(__name__)

STEPS_FILE = "steps.jsonl"
ALL = 100
"""Reports of a worker and an epoch that are all written."""
MOST = 20_000
"""Of all workers together."""
PAUSE_S = 60.0
"""Between two of a worker after those."""
SPACING_S = 0.1
"""Between two of any workers after those."""
WAITING = 10_000
"""Lines that may wait for the disk; more are dropped."""
LONGEST_LINE = 1 << 16
"""Bytes."""
CLOSE_TIMEOUT_S = 2.0
"""For the last lines."""


@dataclass(slots=True)
class _Written:
    """Of one worker."""

    epoch: int
    count: int
    at_s: float


class StepLog:
    """Of one controller. ``close`` it."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is opened before there is something to write.

        Args:
            path: Of the file; made if it is not there.
            clock: Gives seconds; never goes back.
        """
        self._path = path
        self._clock = clock
        self._written: dict[int, _Written] = {}
        self._epoch, self._count, self._last_s = -1, 0, -math.inf
        """Of all workers: reports written of this epoch, and when the last one was."""
        self._reports: queue.Queue[StepReport | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._run, name="elas-steps", daemon=True)
        self._thread.start()

    def write(self, report: StepReport) -> None:
        """Have it written, if it is its turn. Returns at once."""
        if not self._is_due(report):
            return
        try:
            self._reports.put_nowait(report)
        except queue.Full:
            self._written.pop(report.worker, None)

    def _is_due(self, report: StepReport) -> bool:
        now = self._clock()
        if report.epoch != self._epoch:
            self._epoch, self._count = report.epoch, 0
        last = self._written.get(report.worker)
        if last is None or last.epoch != report.epoch:
            last = _Written(report.epoch, 0, -math.inf)
        is_late = now >= last.at_s + PAUSE_S and now >= self._last_s + SPACING_S
        if (last.count >= ALL or self._count >= MOST) and not is_late:
            return False
        last.count, last.at_s = last.count + 1, now
        self._written[report.worker] = last
        self._count, self._last_s = self._count + 1, now
        return True

    def close(self) -> None:
        """Write what waits, if the disk takes it."""
        try:
            self._reports.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(CLOSE_TIMEOUT_S)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        descriptor: int | None = None
        while (report := self._reports.get()) is not None:
            line = json.dumps(as_table(report)).encode() + b"\n"
            try:
                if descriptor is None:
                    descriptor = _open(self._path)
                if os.write(descriptor, line) < len(line):
                    raise OSError("the disk is full")
            except OSError as error:
                logger.warning("steps are not written down any more: %s (%s)", self._path, error)
                break
        else:
            if descriptor is not None:
                os.close(descriptor)
            return
        while self._reports.get() is not None:
            pass


def _open(path: Path) -> int:
    """The file, to append to. A line that an earlier controller could not finish is taken away."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o666)
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, LONGEST_LINE, max(0, size - LONGEST_LINE))
    if tail and not tail.endswith(b"\n"):
        os.ftruncate(descriptor, max(0, size - len(tail)) + tail.rfind(b"\n") + 1)
    return descriptor
