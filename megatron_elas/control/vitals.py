"""What an agent sees of its workers' lives from outside, without asking them anything.

Two signs, looked at every ``LOOK_S``: whether the kernel has stopped the process (SIGSTOP, a debugger), and its pulse
(``pulse.py``), which also ends when the process is frozen. A stop or a silence is counted in the looks of this
process, each for at most ``LONGEST_LOOK_S``: when the machine holds the agent up, that time counts against nobody.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

LOOK_S = 0.05
"""Between two looks."""
LONGEST_LOOK_S = 2 * LOOK_S
"""What one look counts at most."""
STOPPED = frozenset("tT")
"""States in /proc/PID/stat: stopped by a signal, stopped by a tracer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What one look saw of one worker."""

    stopped: bool
    pulse: int
    """The last beat; 0 when it has no pulse."""


@dataclass(slots=True)
class _Record:
    pulse: int = 0
    beaten: bool = False
    """Since the last ``take_beating``."""
    silent_s: float = 0.0
    stopped_s: float = 0.0
    told: bool = False


class Vitals:
    """Judges what was seen. No clock and no processes: every look brings its time and its signs."""

    def __init__(self, *, hang_timeout_s: float, heartbeat_timeout_s: float) -> None:
        self._stop_limit_s = hang_timeout_s
        self._silence_limit_s = heartbeat_timeout_s
        self._records: dict[int, _Record] = {}
        self._looked_s: float | None = None

    def look(self, signs: Mapping[int, Sign], now: float) -> tuple[tuple[int, str], ...]:
        """Take one look at all workers that run.

        Args:
            signs: By worker.
            now: Seconds on a clock that does not jump.

        Returns:
            Workers found to hang, each with a few words for people; once per hang.
        """
        passed_s = 0.0 if self._looked_s is None else min(now - self._looked_s, LONGEST_LOOK_S)
        self._looked_s = now
        self._records = {worker: self._records.get(worker, _Record()) for worker in signs}
        found = []
        for worker, sign in signs.items():
            record = self._records[worker]
            self._note(record, sign, passed_s)
            words = self._explain(record)
            if words is None:
                record.told = False
            elif not record.told:
                record.told = True
                found.append((worker, words))
        return tuple(found)

    @staticmethod
    def _note(record: _Record, sign: Sign, passed_s: float) -> None:
        beaten = sign.pulse != record.pulse and sign.pulse != 0
        record.beaten |= beaten
        record.silent_s = record.silent_s + passed_s if sign.pulse and not beaten else 0.0
        # One that has beaten since the last look ran in between.
        record.stopped_s = record.stopped_s + passed_s if sign.stopped and not beaten else 0.0
        record.pulse = sign.pulse

    def _explain(self, record: _Record) -> str | None:
        if record.stopped_s >= self._stop_limit_s:
            return f"its process is stopped, for {record.stopped_s:.2f} s"
        if record.silent_s >= self._silence_limit_s:
            return f"its process is frozen, no pulse for {record.silent_s:.1f} s"
        return None

    def take_beating(self) -> tuple[int, ...]:
        """Workers whose pulse was seen to beat since the last call, ascending."""
        beating = tuple(sorted(worker for worker, record in self._records.items() if record.beaten))
        for record in self._records.values():
            record.beaten = False
        return beating


class StateFile:
    """``/proc/PID/stat`` of one process, held open: it never becomes that of another process with the same number."""

    def __init__(self, pid: int) -> None:
        """Raises OSError when the process is gone."""
        self._fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)

    def is_stopped(self) -> bool:
        """Whether the process is stopped now; False for one that is gone."""
        with contextlib.suppress(OSError):
            _, _, rest = os.pread(self._fd, 512, 0).rpartition(b")")
            return rest[1:2].decode() in STOPPED
        return False

    def close(self) -> None:
        """Let go."""
        os.close(self._fd)
