"""How long the agent of another node may go on without an answer of the controller.

The controller takes a node for lost ``heartbeat_timeout_s`` after it heard of it. The lease of the node ends
``heartbeat_timeout_s - heartbeat_interval_s`` after its agent *sent* the last heartbeat that was answered, which is at
least ``heartbeat_interval_s`` earlier. In that margin the agent kills its workers: when the others go on without the
node, nothing there runs on, also where no message can tell it. What holds the agent up for longer than the margin, but
not the controller and the workers, is not covered.
"""

from __future__ import annotations

import time

from megatron_elas.config import ControlTimeouts

ATTEMPTS = 3
"""So many heartbeats at least leave within a lease, so that one that is late does not end a healthy node."""


def read_clock() -> float:
    """Seconds, also those in which the machine was suspended: a lease does not stand still then."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """Of one agent. No clock of its own: every call says what time it is (``read_clock``)."""

    def __init__(self, timeouts: ControlTimeouts, now: float) -> None:
        self.limit_s = timeouts.heartbeat_timeout_s - timeouts.heartbeat_interval_s
        """How long it lasts."""
        self.pause_s = min(timeouts.heartbeat_interval_s, self.limit_s / ATTEMPTS)
        """Between two heartbeats."""
        self._sent_s: dict[int, float] = {}
        self._next = 0
        self._granted_s = now

    def ask(self, now: float) -> int:
        """A heartbeat is sent now; gives its number."""
        number = self._next
        self._next += 1
        self._sent_s[number] = now
        return number

    def answered(self, number: int) -> None:
        """The controller has heard that one, and so all before it."""
        self._granted_s = max(self._granted_s, self._sent_s.get(number, self._granted_s))
        self._sent_s = {later: at_s for later, at_s in self._sent_s.items() if later > number}

    def left_s(self, now: float) -> float:
        """Until it ends; zero or less when it has."""
        return self._granted_s + self.limit_s - now
