"""A transport whose transfers of state take the time of the emulated devices' links."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from megatron_elas.spec.cluster import Link

POLL_S = 2e-3
"""From a cancel to its notice in a transfer that waits for its time."""


class Part(Protocol):
    """One directed transfer."""

    @property
    def peer(self) -> int:
        """The other worker."""

    @property
    def buffer(self) -> memoryview:
        """What is transferred."""


class LinkTimes:
    """In the place of a worker's transport, for what moves state; everything but ``exchange`` is the transport's own.

    A device sends one thing after the other, and receives one after the other, both at once. What is sent is as large
    as the real model's state in the proportion of all its parameters to those of the tiny one.
    """

    def __init__(
        self,
        transport: Any,
        channels: Collection[int],
        link: Callable[[int, int], Link],
        growth: float,
        speed: float,
    ) -> None:
        """Wrap a transport.

        Args:
            transport: See ``runtime.transport.base``.
            channels: On which exchanges take time.
            link: From a worker to another.
            growth: Bytes of the real model's state for one of the tiny model's.
            speed: How much faster than real links these are.
        """
        self._transport = transport
        self._channels = frozenset(channels)
        self._link = link
        self._growth, self._speed = growth, speed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def exchange(
        self,
        channel: int,
        tag: int,
        sends: Sequence[Part],
        receives: Sequence[Part],
        limit_s: float | None = None,
    ) -> None:
        """As the transport's; returns after the links' time at the earliest."""
        begin_s = time.monotonic()
        self._transport.exchange(channel, tag, sends, receives, limit_s)
        if channel in self._channels:
            own = self._transport.worker
            sent_s = self._transfers_s((self._link(own, part.peer), part) for part in sends)
            received_s = self._transfers_s((self._link(part.peer, own), part) for part in receives)
            self._wait(begin_s + max(sent_s, received_s) / self._speed)

    def _transfers_s(self, parts: Any) -> float:
        return sum(link.transfer_s(part.buffer.nbytes * self._growth) for link, part in parts)

    def _wait(self, until_s: float) -> None:
        while (left := until_s - time.monotonic()) > 0:
            if self._transport.cancelled:
                self._transport.exchange(next(iter(self._channels)), 0, (), ())  # raises as any operation does then
                return
            time.sleep(min(left, POLL_S))
