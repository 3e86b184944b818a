"""One device's time, as it passes while its process waits.

The device runs one operation after the other. An operation starts when the one before has ended and what it needs has
arrived, and ends after the time that it is asked to take. These are points in wall-clock time, and the process sleeps
until the end of each operation. What the process computes meanwhile, with its tiny tensors, is so hidden in the
operations' times, and a wake-up that comes late delays no later operation: the next one counts from the end that was
planned. Only a process that is later than ``slack_s`` pushes its device's time back, and that is counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from megatron_elas.platform.emulated.waiting import sleep_until

SLACK_S = 0.25
"""How late a process may be without loss of time: above what Megatron does between two steps on a crowded machine."""


class Ran(NamedTuple):
    """One operation."""

    asked_s: float
    achieved_s: float
    """From the end of the operation before, or the arrival of what was waited for, to this one's, by the wall clock."""
    worked_s: float
    """Of these, until the process came to wait: what it really computed, and waited for a processor."""
    late_s: float
    """From the operation's planned end to its real one."""


class Timeline:
    """Not thread-safe: a device has one thread that runs its operations."""

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = sleep_until,
        slack_s: float = SLACK_S,
    ) -> None:
        """Begin now.

        Args:
            now: The wall clock, in seconds.
            sleep: Until a time of that clock.
            slack_s: See the module.
        """
        self.now = now
        self._sleep, self._slack_s = sleep, slack_s
        self.end_s = now()
        """Of the newest operation, or the time before which the next one cannot start."""
        self.pushed_s = 0.0
        """By how much in all the device's time was pushed back because the process was too late."""
        self.start_anew()

    def start_anew(self) -> None:
        """What was late is given up: the next operation starts now at the earliest."""
        now_s = self._ready_s = self._began_s = self.now()
        self.end_s = max(self.end_s, now_s)

    @property
    def is_behind(self) -> bool:
        """Whether the device has been idle for longer than a process may be late."""
        return self.now() - self.end_s > self._slack_s

    def wait_for(self, at_s: float) -> None:
        """What the next operation needs arrives at this time; sleep until then."""
        self.end_s = max(self.end_s, at_s)
        self._sleep(at_s)
        self._ready_s = max(self._ready_s, at_s)
        self._began_s = self._push()

    def run(self, seconds: float) -> Ran:
        """An operation takes this long; called when its real work is done, sleeps until its end."""
        called_s = self.now()
        self.end_s += seconds
        self._sleep(self.end_s)
        planned_s = self.end_s
        now_s = self._push()
        ran = Ran(
            asked_s=seconds,
            achieved_s=now_s - self._ready_s,
            worked_s=called_s - self._began_s,
            late_s=now_s - planned_s,
        )
        self._ready_s = self._began_s = now_s
        return ran

    def _push(self) -> float:
        """Push the device's time back if the process is too late. Gives the wall clock."""
        now_s = self.now()
        late_s = now_s - self.end_s - self._slack_s
        if late_s > 0:
            self.end_s += late_s
            self.pushed_s += late_s
        return now_s
