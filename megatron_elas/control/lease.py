"""How long the agent of another node may go on without an answer of the controller.

The controller takes a node for lost ``heartbeat_timeout_s`` after it heard of it. An agent counts the same time from
when it *sent* the last heartbeat that was answered, so its lease ends first: when the others go on without this node,
its workers have been ended, also where no message can tell it.
"""

from __future__ import annotations


class Lease:
    """Of one agent. No clock of its own: every call says what time it is."""

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
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
        return self._granted_s + self._limit_s - now
