"""``steps.jsonl`` in the job's log folder: what workers measured of their steps, one JSON object per line.

Of each worker the first ``ALL`` reports of an epoch are written, of all together ``MOST``; then one of each worker in
``PAUSE_S``, and of all together one in ``SPACING_S``.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_elas.control.line_log import LineLog
from megatron_elas.spec.step_report import StepReport
from megatron_elas.spec.tables import as_table

STEPS_FILE = "steps.jsonl"
ALL = 100
"""Reports of a worker and an epoch that are all written."""
MOST = 20_000
"""Of all workers together."""
PAUSE_S = 60.0
"""Between two of a worker after those."""
SPACING_S = 0.1
"""Between two of any workers after those."""


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
        self._lines = LineLog(path, "steps", _encode)
        self._clock = clock
        self._written: dict[int, _Written] = {}
        self._epoch, self._count, self._last_s = -1, 0, -math.inf
        """Of all workers: reports written of this epoch, and when the last one was."""

    def write(self, report: StepReport) -> None:
        """Have it written, if it is its turn. Returns at once."""
        if not self._is_due(report):
            return
        if not self._lines.put(report):
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
        self._lines.close()


def _encode(report: StepReport) -> bytes:
    return json.dumps(as_table(report)).encode()
