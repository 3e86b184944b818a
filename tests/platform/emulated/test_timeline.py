"""A device's operations follow each other without gaps, however late its process wakes."""

from __future__ import annotations

import pytest

from megatron_elas.platform.emulated.timeline import Timeline


class Wall:
    """A clock that goes on when somebody works or sleeps; sleepers wake ``late_s`` late."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now_s, self.late_s = 100.0, late_s

    def now(self) -> float:
        return self.now_s

    def sleep(self, at_s: float) -> None:
        if at_s > self.now_s:
            self.now_s = at_s + self.late_s

    def timeline(self, slack_s: float = 1.0) -> Timeline:
        return Timeline(self.now, self.sleep, slack_s)


def test_an_operation_takes_its_time_whatever_was_really_computed_meanwhile() -> None:
    wall = Wall()
    timeline = wall.timeline()
    wall.now_s += 0.3
    ran = timeline.run(0.5)
    assert wall.now_s == timeline.end_s == pytest.approx(100.5)
    assert ran.achieved_s == pytest.approx(0.5)
    assert ran.worked_s == pytest.approx(0.3)
    assert ran.late_s == pytest.approx(0)


def test_late_wake_ups_do_not_add_up() -> None:
    wall = Wall(late_s=0.01)
    timeline = wall.timeline()
    rans = [timeline.run(0.1) for _ in range(100)]
    assert timeline.end_s == pytest.approx(110.0)
    assert wall.now_s == pytest.approx(110.01)
    assert rans[0].achieved_s == pytest.approx(0.11)
    assert all(ran.achieved_s == pytest.approx(0.1) and ran.late_s == pytest.approx(0.01) for ran in rans[1:])
    assert timeline.pushed_s == 0


def test_real_work_that_is_too_long_is_made_up_for_by_the_operations_that_follow() -> None:
    wall = Wall()
    timeline = wall.timeline()
    wall.now_s += 0.7
    late = timeline.run(0.5)
    assert late.late_s == pytest.approx(0.2) and late.worked_s > late.asked_s
    assert timeline.run(0.5).late_s == pytest.approx(0)
    assert wall.now_s == pytest.approx(101.0)


def test_time_is_lost_only_beyond_the_slack_and_counted() -> None:
    wall = Wall()
    timeline = wall.timeline(slack_s=1.0)
    wall.now_s += 5.0
    timeline.run(0.5)
    assert timeline.pushed_s == pytest.approx(3.5)
    assert timeline.end_s == pytest.approx(104.0)
    timeline.run(0.5)
    assert timeline.pushed_s == pytest.approx(3.5)


def test_an_operation_starts_when_its_input_arrives() -> None:
    wall = Wall()
    timeline = wall.timeline()
    timeline.run(0.5)
    timeline.wait_for(102.0)
    assert wall.now_s == pytest.approx(102.0)
    ran = timeline.run(0.25)
    assert timeline.end_s == pytest.approx(102.25)
    assert ran.achieved_s == pytest.approx(0.25) and ran.worked_s == pytest.approx(0)


def test_an_input_that_came_before_the_last_operation_ended_delays_nothing() -> None:
    wall = Wall()
    timeline = wall.timeline()
    timeline.run(0.5)
    timeline.wait_for(100.2)
    timeline.run(0.5)
    assert wall.now_s == timeline.end_s == pytest.approx(101.0)


def test_a_process_that_hears_late_of_an_input_works_from_when_it_came() -> None:
    wall = Wall()
    timeline = wall.timeline()
    wall.now_s = 100.3
    timeline.wait_for(100.2)
    timeline.run(0.5)
    assert wall.now_s == timeline.end_s == pytest.approx(100.7)


def test_what_is_late_is_given_up_on_demand() -> None:
    wall = Wall()
    timeline = wall.timeline()
    wall.now_s += 0.9
    timeline.start_anew()
    timeline.run(0.5)
    assert wall.now_s == timeline.end_s == pytest.approx(101.4)
    timeline.start_anew()
    assert timeline.end_s == pytest.approx(101.4)


def test_a_process_that_did_something_else_is_behind() -> None:
    wall = Wall()
    timeline = wall.timeline(slack_s=1.0)
    timeline.run(0.5)
    wall.now_s += 0.9
    assert not timeline.is_behind
    wall.now_s += 0.2
    assert timeline.is_behind
    timeline.start_anew()
    assert not timeline.is_behind and timeline.pushed_s == 0


def test_the_real_clock_is_not_outrun() -> None:
    timeline = Timeline()
    begin_s = timeline.now()
    assert all(timeline.run(0.002).late_s >= 0 for _ in range(10))
    assert timeline.now() - begin_s >= 0.02
