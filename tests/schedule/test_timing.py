"""Times are exact: they equal those of a slow way that shares no code, and known formulas."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elas.schedule.actions import Schedule, parse_order
from megatron_elas.schedule.greedy import Limit, Taste, greedy
from megatron_elas.schedule.items import deal_round
from megatron_elas.schedule.one_f_one_b import one_f_one_b
from megatron_elas.schedule.routes import Flow
from megatron_elas.schedule.timing import Deadlock, Durations, Program, time_schedule
from megatron_elas.spec.cost import PassTime
from megatron_elas.spec.errors import BadUsage
from tests.schedule.cases import UNIT, all_items, durations_of, time_slowly, times, unit_durations


@settings(max_examples=40)
@given(st.data())
def test_times_equal_those_of_the_slow_way(data: st.DataObject) -> None:
    items = data.draw(all_items())
    durations = data.draw(durations_of(items))
    split = data.draw(st.booleans())
    limits = [Limit(samples=1e9)] * len(items)
    schedule, step_s = greedy(Flow(items), durations, limits, [Taste(split=split)] * len(items))
    timeline = time_schedule(schedule, durations)
    slow = time_slowly(schedule, durations)
    for i, action in enumerate(timeline.program.actions):
        assert (timeline.starts[i], timeline.ends[i]) == pytest.approx(slow[action])
    assert timeline.step_s == pytest.approx(max(end for _, end in slow.values())) == pytest.approx(step_s)


@pytest.mark.parametrize(("stages", "count"), [(1, 3), (2, 2), (4, 8), (4, 3), (8, 16)])
def test_1f1b_on_equal_cells_takes_one_pipeline_length_more_than_its_work(stages: int, count: int) -> None:
    items = [deal_round(2 * count, 1, 2)] * stages
    timeline = time_schedule(one_f_one_b(items), unit_durations(items))
    assert timeline.step_s == 3 * (count + stages - 1)
    assert timeline.busy_s(0, 1) == 3 * count
    assert timeline.bubble(0, 1) == pytest.approx((stages - 1) / (count + stages - 1))
    assert timeline.stage_end_s(0) == timeline.step_s


def test_a_slow_cell_and_a_slow_link_make_others_wait() -> None:
    items = [deal_round(2, 3, 2), deal_round(2, 3, 2)]
    schedule = one_f_one_b(items)
    link = PassTime(sample_s=0.1, fixed_s=0.5)
    durations = Durations.of([UNIT, [UNIT, times(2, 2, 2)]], items, [link])
    timeline = time_schedule(schedule, durations)
    assert timeline.cell(1, 0) == [(schedule.orders[1][0][0], 3.8, 6.8), (schedule.orders[1][0][1], 6.8, 12.8)]
    assert timeline.cell_end_s(0, 0) == pytest.approx(12.8 + 0.8 + 6)
    assert timeline.cell_end_s(0, 1) == pytest.approx(3.8 + 18 + 0.8 + 6)


def test_stages_may_begin_at_different_times() -> None:
    items = [deal_round(2, 1, 1), deal_round(2, 1, 1)]
    program = Program(one_f_one_b(items))
    assert program.run(unit_durations(items)).step_s == 9
    late = program.run(unit_durations(items), begin_s=[0, 5])
    assert late.cell(1, 0)[0][1] == 5
    assert late.step_s == 13


def test_one_program_is_timed_under_many_durations() -> None:
    items = [deal_round(8, 1, 2), deal_round(8, 1, 1), deal_round(8, 1, 2)]
    program = Program(one_f_one_b(items))
    steps = [program.run(Durations.of([UNIT, times(f, f, f), UNIT], items)).step_s for f in (1.0, 0.5, 2.0)]
    assert steps[1] < steps[0] < steps[2]


def test_orders_that_wait_for_each_other_are_found_and_named() -> None:
    items = (deal_round(2, 1, 1), deal_round(2, 1, 1))
    orders = ((parse_order("0F0 0B0 0F1 0B1"),), (parse_order("1F0 1F1 1B0 1B1"),))
    with pytest.raises(Deadlock, match="wait for each other: cell 0 of stage 0 at 0B0, cell 0 of stage 1 at 1F1"):
        Program(Schedule(items=items, orders=orders))


@pytest.mark.parametrize(
    ("first", "second", "error", "sentence"),
    [
        ("0F0 0B0", "1F0 1F1 1B0 1B1", Deadlock, "1F1 waits for item 1 of stage 0, which is never run there"),
        ("0F0 0F2 0B0", "1F0 1B0", BadUsage, "0F2 is listed on cell 0 of stage 0, which has no such item"),
        ("0F0 1F1 0B0", "1F0 1B0", BadUsage, "1F1 is listed on cell 0 of stage 0, which has no such item"),
    ],
)
def test_actions_without_an_item_are_refused(first: str, second: str, error: type[Exception], sentence: str) -> None:
    items = (deal_round(2, 1, 1), deal_round(2, 1, 1))
    orders = ((parse_order(first),), (parse_order(second),))
    with pytest.raises(error, match=sentence):
        Program(Schedule(items=items, orders=orders))
