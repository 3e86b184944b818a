"""Who was heard from, and when. No clock of its own: every call says what time it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

LINK_GRACE_S = 1.0
"""A worker whose link ended is given this long: its agent usually says better why."""


@dataclass(slots=True, kw_only=True)
class Pulse:
    """The last sign of life of one worker."""

    heard_s: float
    vouched_s: float = -math.inf
    """When its agent last saw it run."""
    step: int | None = None
    epoch: int = 0
    waiting: bool = False
    hung_up: bool = False


class Health:
    """Watches the workers that joined. Another one watches the agents."""

    def __init__(self, heartbeat_timeout_s: float, interpreter_timeout_s: float = math.inf) -> None:
        self._limit_s = heartbeat_timeout_s
        self._vouched_limit_s = interpreter_timeout_s
        self._pulses: dict[int, Pulse] = {}
        self._looked_s: float | None = None

    def hear(self, worker: int, now: float) -> None:
        """Anything came from the worker. The first time starts watching it."""
        pulse = self._pulses.setdefault(worker, Pulse(heard_s=now))
        pulse.heard_s = now
        pulse.hung_up = False

    def hear_progress(self, worker: int, epoch: int, step: int, now: float, waiting: bool = False) -> None:
        """A heartbeat came."""
        self.hear(worker, now)
        pulse = self._pulses[worker]
        pulse.epoch, pulse.step, pulse.waiting = epoch, step, waiting

    @property
    def waiting(self) -> frozenset[int]:
        """Workers whose last heartbeat said that they wait for others."""
        return frozenset(worker for worker, pulse in self._pulses.items() if pulse.waiting)

    def vouch(self, worker: int, now: float) -> None:
        """Its agent saw its process run, though it may have said nothing itself. Begins no watching."""
        if worker in self._pulses:
            self._pulses[worker].vouched_s = now

    def hang_up(self, worker: int, now: float) -> None:
        """The worker's link ended."""
        if worker in self._pulses:
            self._pulses[worker].hung_up = True
            self._pulses[worker].heard_s = now

    def forget(self, worker: int) -> None:
        """Watch it no longer."""
        self._pulses.pop(worker, None)

    def step_of(self, worker: int) -> int | None:
        """The step that it said last; None before it said any, and for a worker that is not watched."""
        return self._pulses[worker].step if worker in self._pulses else None

    def silence_of(self, worker: int, now: float) -> float | None:
        """Seconds since it was heard; None for a worker that is not watched."""
        return now - self._pulses[worker].heard_s if worker in self._pulses else None

    def find_silent(self, now: float) -> tuple[tuple[int, float], ...]:
        """Workers over the limit, each with the seconds of its silence.

        Called regularly. When the last call is long ago this process itself was held up (stopped,
        suspended, starved) and heard nobody: that time counts against no worker.
        """
        if self._looked_s is not None and now - self._looked_s > self._limit_s / 2:
            for pulse in self._pulses.values():
                pulse.heard_s += now - self._looked_s
                pulse.vouched_s += now - self._looked_s
        self._looked_s = now
        return tuple(
            (worker, now - pulse.heard_s)
            for worker, pulse in sorted(self._pulses.items())
            if self._is_silent(pulse, now)
        )

    def _is_silent(self, pulse: Pulse, now: float) -> bool:
        if pulse.hung_up:
            return now - pulse.heard_s > min(LINK_GRACE_S, self._limit_s)
        if now - pulse.vouched_s <= self._limit_s:
            return now - pulse.heard_s > self._vouched_limit_s
        return now - pulse.heard_s > self._limit_s
