"""``traces.jsonl`` in the job's log folder: steps around losses and migrations, pass by pass, one worker's per line.

Of each epoch at most ``MOST`` bytes are written, of a job ``MOST_OF_JOB``. Only a few workers tell traces
(``spec.step_trace.traces_steps``), so this is for jobs of many events.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from pathlib import Path

import msgspec

from megatron_elas.control.line_log import LineLog
from megatron_elas.spec.step_trace import StepTrace

logger = logging.getLogger(__name__)

TRACES_FILE = "traces.jsonl"
MOST = 1 << 26
"""Bytes of one epoch."""
MOST_OF_JOB = 1 << 30
"""Bytes of all epochs, of one controller."""


class TraceLog:
    """Of one controller. ``close`` it."""

    def __init__(self, path: Path) -> None:
        """Nothing is opened before there is something to write; the file is made if it is not there."""
        self._lines = LineLog(path, "traces", _encode)
        self._written: dict[int, int] = defaultdict(int)
        """Bytes by epoch, estimated."""
        self._warned = False

    def write(self, trace: StepTrace) -> None:
        """Have it written, if there is room. Returns at once."""
        size = 300 + 100 * len(trace.spans)
        if self._written[trace.epoch] + size > MOST or sum(self._written.values()) + size > MOST_OF_JOB:
            if not self._warned:
                self._warned = True
                logger.warning("traces of epoch %d take more than %d MiB: not all are kept", trace.epoch, MOST >> 20)
            return
        if self._lines.put(trace):
            self._written[trace.epoch] += size

    def close(self) -> None:
        """Write what waits, if the disk takes it."""
        self._lines.close()


def _encode(trace: StepTrace) -> bytes:
    return msgspec.json.encode(trace)
