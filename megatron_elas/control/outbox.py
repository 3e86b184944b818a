"""What a worker says to the controller, kept until it is noted, so that a restarted controller hears it too."""

from __future__ import annotations

from collections import deque

from megatron_elas.control.messages import Heartbeat, Hello, HelloAgain, Measured, Message, Stalled, Traced

NOT_KEPT = Heartbeat | Hello | HelloAgain | Measured | Stalled | Traced
"""What is never repeated as it was: it may not be true any more. Both ends count only the others."""


class Outbox:
    """Of one worker. Not for several threads at once."""

    def __init__(self) -> None:
        self._kept: deque[Message] = deque()
        self._noted = 0
        """Of this connection."""

    def keep(self, message: Message) -> None:
        """It is about to be sent, if there is a connection."""
        if not isinstance(message, NOT_KEPT):
            self._kept.append(message)

    def repeat(self) -> tuple[Message, ...]:
        """A new connection begins: what to send on it, oldest first."""
        self._noted = 0
        return tuple(self._kept)

    def note(self, count: int) -> None:
        """The controller has noted ``count`` messages of this connection."""
        while self._noted < count and self._kept:
            self._kept.popleft()
            self._noted += 1

    @property
    def empty(self) -> bool:
        """Whether everything was noted."""
        return not self._kept
