"""A node that cannot hear the controller gives up before the controller gives it up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_elas.control.health import Health
from megatron_elas.control.lease import Lease

LIMIT_S = 10.0


def test_a_lease_counts_from_when_the_heartbeat_that_was_answered_left() -> None:
    lease = Lease(LIMIT_S, 100.0)
    first = lease.ask(101.0)
    second = lease.ask(102.0)
    assert lease.left_s(103.0) == 7.0, "nothing was answered"
    lease.answered(first)
    assert lease.left_s(104.0) == 7.0
    lease.answered(second)
    lease.answered(first)  # late: changes nothing
    assert lease.left_s(104.0) == 8.0
    lease.answered(99)  # never sent
    assert lease.left_s(113.0) == -1.0


@given(
    st.lists(st.tuples(st.floats(0.1, 3.0), st.floats(0.0, 2.0), st.floats(0.0, 2.0)), max_size=15),
    st.floats(0.0, 3.0),
)
def test_it_ends_before_the_node_is_taken_for_lost(rounds: list[tuple[float, float, float]], last_way_s: float) -> None:
    """Rounds: pause before a heartbeat, its way there, the answer's way back. The answer to the last one is lost."""
    lease, health, now, ended_s, heard_s = Lease(LIMIT_S, 0.0), Health(LIMIT_S), 0.0, LIMIT_S, 0.0
    health.hear(1, 0.0)
    for pause_s, there_s, back_s in rounds:
        now += pause_s
        number = lease.ask(now)
        heard_s = max(heard_s, now + there_s)
        ended_s = now + LIMIT_S
        now += there_s + back_s
        lease.answered(number)
    now += 0.1
    lease.ask(now)
    heard_s = max(heard_s, now + last_way_s)
    health.hear(1, heard_s)
    assert lease.left_s(ended_s) <= 1e-9
    assert not health.find_silent(ended_s)
