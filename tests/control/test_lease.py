"""A node that cannot hear the controller gives up before the controller gives it up."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_elas.config import ControlTimeouts
from megatron_elas.control.health import Health
from megatron_elas.control.lease import Lease, read_clock

LIMIT_S = 10.0
INTERVAL_S = 0.5
LEASE_S = LIMIT_S - INTERVAL_S
TIMEOUTS = ControlTimeouts(heartbeat_timeout_s=LIMIT_S, heartbeat_interval_s=INTERVAL_S)


def test_a_lease_counts_from_when_the_heartbeat_that_was_answered_left() -> None:
    lease = Lease(TIMEOUTS, 100.0)
    first = lease.ask(101.0)
    second = lease.ask(102.0)
    assert lease.left_s(103.0) == LEASE_S - 3.0, "nothing was answered"
    lease.answered(first)
    assert lease.left_s(104.0) == LEASE_S - 3.0
    lease.answered(second)
    lease.answered(first)  # late: changes nothing
    assert lease.left_s(104.0) == LEASE_S - 2.0
    lease.answered(99)  # never sent
    assert lease.left_s(113.0) == LEASE_S - 11.0


@given(
    st.lists(st.tuples(st.floats(0.1, 3.0), st.floats(0.0, 2.0), st.floats(0.0, 2.0)), max_size=15),
    st.floats(0.0, 3.0),
)
def test_it_ends_an_interval_before_the_node_is_taken_for_lost(
    rounds: list[tuple[float, float, float]], last_way_s: float
) -> None:
    """Rounds: pause before a heartbeat, its way there, the answer's way back. The answer to the last one is lost."""
    lease, health, now, granted_s, heard_s = Lease(TIMEOUTS, 0.0), Health(LIMIT_S), 0.0, 0.0, 0.0
    health.hear(1, 0.0)
    for pause_s, there_s, back_s in rounds:
        now += pause_s
        number = lease.ask(now)
        heard_s = max(heard_s, now + there_s)
        granted_s = now
        now += there_s + back_s
        lease.answered(number)
    now += 0.1
    lease.ask(now)
    heard_s = max(heard_s, now + last_way_s)
    health.hear(1, heard_s)
    assert lease.left_s(granted_s + LIMIT_S - INTERVAL_S) <= 1e-9
    assert not health.find_silent(granted_s + LIMIT_S - 1e-9)


@pytest.mark.parametrize("interval_s", [0.1, 1.0, 4.0, LIMIT_S / 2])
def test_a_healthy_node_keeps_it_though_every_second_answer_is_lost(interval_s: float) -> None:
    """Whatever the interval that the configuration allows."""
    lease = Lease(ControlTimeouts(heartbeat_timeout_s=LIMIT_S, heartbeat_interval_s=interval_s), 0.0)
    assert lease.pause_s <= interval_s
    now = 0.0
    while now < 10 * LIMIT_S:
        number = lease.ask(now)
        if number % 2:
            lease.answered(number)
        now += lease.pause_s
        assert lease.left_s(now) > 0


def test_its_clock_counts_time_in_which_the_machine_was_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "clock_gettime", {time.CLOCK_MONOTONIC: 1.0, time.CLOCK_BOOTTIME: 7.0}.__getitem__)
    assert read_clock() == 7.0
