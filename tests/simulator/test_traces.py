"""A trace is in order, within its length, and of devices that there are."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from megatron_elas.simulator.traces import Event, Failure, Slowdown, Trace
from megatron_elas.spec.errors import BadUsage


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Failure(at_s=-1, devices=(1,)), "at_s must be at least 0, got -1"),
        (lambda: Failure(at_s=math.nan, devices=(1,)), "at_s must be at least 0, got nan"),
        (lambda: Failure(at_s=0, devices=()), "devices must be numbers from 0 up, at least one, each once, got []"),
        (lambda: Failure(at_s=0, devices=(2, 2)), "each once, got [2, 2]"),
        (lambda: Failure(at_s=0, devices=(-1,)), "numbers from 0 up"),
        (lambda: Failure(at_s=0, devices=(1,), repair_s=0), "repair_s must be above 0, got 0: write inf for never"),
        (lambda: Failure(at_s=0, devices=(1,), repair_s=math.nan), "repair_s must be above 0, got nan"),
        (lambda: Slowdown(at_s=0, device=-1, factor=2, seconds=1), "device must be at least 0, got -1"),
        (lambda: Slowdown(at_s=0, device=0, factor=1, seconds=1), "factor must be above 1 and finite, got 1"),
        (lambda: Slowdown(at_s=0, device=0, factor=2, seconds=0), "seconds must be above 0, got 0"),
    ],
)
def test_an_event_that_cannot_be_is_refused(make: Callable[[], Event], sentence: str) -> None:
    with pytest.raises(BadUsage) as error:
        make()
    assert sentence in str(error.value)


def test_events_are_in_order_and_within_the_trace() -> None:
    early, late = Failure(at_s=1, devices=(1,)), Failure(at_s=5, devices=(2,))
    assert Trace(name="t", seconds=10, events=(early, late)).cut(5).events == (early,)
    with pytest.raises(BadUsage, match="t: events are not in the order of their time: sort them by at_s"):
        Trace(name="t", seconds=10, events=(late, early))
    with pytest.raises(BadUsage, match=r"t: an event at 5 s is not within the 5 s of the trace"):
        Trace(name="t", seconds=5, events=(early, late))


@pytest.mark.parametrize(
    "event", [Failure(at_s=60, devices=(3, 96)), Slowdown(at_s=60, device=96, factor=2, seconds=1)]
)
def test_a_device_that_a_cluster_does_not_have_is_named(event: Event) -> None:
    trace = Trace(name="t", seconds=100, events=(event,))
    trace.check_devices(97, "a cluster")
    with pytest.raises(BadUsage, match=r"t: the event at 60 s is of device 96, and npu-96 has devices 0 to 95: choose"):
        trace.check_devices(96, "npu-96")
