"""Moves of state take the time of the emulated links."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from megatron_elas.platform.emulated.links import LinkTimes
from megatron_elas.runtime.transport.base import Part
from megatron_elas.spec.cluster import Link
from megatron_elas.spec.errors import EpochChanged

MOVES, OTHER = 7, 8


class InstantTransport:
    """Remembers what it is given."""

    worker = 0

    def __init__(self) -> None:
        self.cancelled = False
        self.calls: list[tuple[Any, ...]] = []

    def exchange(self, *arguments: Any) -> None:
        if self.cancelled:
            raise EpochChanged("cancelled")
        self.calls.append(arguments)


def timed(transport: Any, channel: int, sends: list[Part], receives: list[Part]) -> float:
    begin_s = time.monotonic()
    transport.exchange(channel, 0, sends, receives)
    return time.monotonic() - begin_s


def parts(peer: int, *sizes: int) -> list[Part]:
    return [Part(peer, memoryview(bytearray(size))) for size in sizes]


def wrap(inner: InstantTransport, *, bandwidth: float = 1000.0, speed: float = 1.0) -> LinkTimes:
    return LinkTimes(inner, (MOVES,), lambda a, b: Link(bandwidth=bandwidth, latency_s=0.01), growth=10.0, speed=speed)


def test_a_move_takes_as_long_as_the_larger_direction() -> None:
    inner = InstantTransport()
    assert timed(wrap(inner), MOVES, parts(1, 4, 4), parts(2, 1)) >= 2 * 0.01 + 0.08
    assert timed(wrap(inner, speed=0.5), MOVES, parts(1, 1), parts(2, 4)) >= 2 * (0.01 + 0.04)
    assert len(inner.calls) == 2


def test_other_channels_and_operations_are_the_transports_own() -> None:
    inner = InstantTransport()
    wrapped = wrap(inner, bandwidth=1e-3)
    assert timed(wrapped, OTHER, parts(1, 100), []) < 5
    assert wrapped.worker == 0 and wrapped.cancelled is False
    assert inner.calls[0][0] == OTHER


def test_a_move_that_waits_for_its_time_ends_with_a_cancel() -> None:
    inner = InstantTransport()
    wrapped = wrap(inner, bandwidth=1e-3)
    canceller = threading.Timer(0.1, lambda: setattr(inner, "cancelled", True))
    canceller.start()
    with pytest.raises(EpochChanged):
        wrapped.exchange(MOVES, 0, parts(1, 100), [])
    canceller.join()
