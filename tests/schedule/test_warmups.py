"""Whole micro-batches go through 1F1B without getting stuck, and take what the general timing says they take."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elas.schedule.items import reroute
from megatron_elas.schedule.one_f_one_b import one_f_one_b, one_f_one_b_program, stock_warmup
from megatron_elas.schedule.routes import Flow
from megatron_elas.schedule.timing import Deadlock, Durations, Program
from megatron_elas.schedule.warmups import find_warmups, run_items
from megatron_elas.spec.cost import PassTime, StageTimes
from megatron_elas.spec.items import StageItems, whole_micro_batches
from tests.schedule.cases import all_items, durations_of

Numbers = tuple[tuple[tuple[int, ...], ...], ...]


@st.composite
def dealt(draw: st.DrawFn) -> Numbers:
    """Micro-batches of stages that each kept some of their rows."""
    all_rows = draw(st.integers(1, 4))
    total = all_rows * draw(st.integers(1, 5))
    stages = []
    for _ in range(draw(st.integers(1, 5))):
        rows = draw(st.sets(st.integers(0, all_rows - 1), min_size=1))
        cells = reroute(total, 1, sorted(rows), all_rows)
        stages.append(tuple(tuple(item.number for item in own) for own in cells))
    return tuple(stages)


def whole(numbers: Sequence[Sequence[Sequence[int]]]) -> list[StageItems]:
    return [whole_micro_batches(cells, 1) for cells in numbers]


def program_of(numbers: Numbers, warmups: Sequence[int]) -> Program | None:
    try:
        return Program(one_f_one_b(whole(numbers), warmups))
    except Deadlock:
        return None


@given(numbers=dealt(), data=st.data())
@settings(max_examples=200, deadline=None)
def test_times_and_deadlocks_are_those_of_the_general_timing(numbers: Numbers, data: st.DataObject) -> None:
    warmups = [data.draw(st.integers(0, 6)) for _ in numbers]
    times = [data.draw(st.tuples(*(st.integers(0, 9) for _ in range(3))), label="times") for _ in numbers]
    program = program_of(numbers, warmups)
    durations = Durations.of(
        [
            StageTimes(
                forward=PassTime(sample_s=forward_s),
                input_gradient=PassTime(sample_s=backward_s),
                weight_gradient=PassTime(sample_s=0.0),
            )
            for forward_s, backward_s, _ in times
        ],
        numbers,
        [PassTime(sample_s=sent_s) for _, _, sent_s in times[:-1]],
    )
    found = run_items(Flow(whole(numbers)), warmups, durations)
    if program is None:
        assert found is None
        return
    assert found == program.run(durations).step_s


@given(numbers=dealt())
@settings(max_examples=200, deadline=None)
def test_warm_ups_that_are_found_do_not_get_stuck_whether_cells_join_or_not(numbers: Numbers) -> None:
    warmups = find_warmups(whole(numbers))
    assert program_of(numbers, warmups) is not None
    assert gets_through_with_a_barrier(numbers, warmups)


def gets_through_with_a_barrier(numbers: Numbers, warmups: Sequence[int]) -> bool:
    """Slowly, pass by pass: nobody's first pass runs before all cells of the stage have their first input."""
    done = [[0 for _ in cells] for cells in numbers]
    orders = [[order_of(own, ahead) for own in cells] for cells, ahead in zip(numbers, warmups, strict=True)]
    ran: set[tuple[int, str, int]] = set()

    def has_input(stage: int, kind: str, item: int) -> bool:
        if kind == "F":
            return stage == 0 or (stage - 1, "F", item) in ran
        return stage == len(numbers) - 1 or (stage + 1, "B", item) in ran

    moved = True
    while moved:
        moved = False
        for stage, cells in enumerate(orders):
            for cell, order in enumerate(cells):
                if done[stage][cell] == len(order):
                    continue
                kind, item = order[done[stage][cell]]
                firsts = [other[0] for other in cells]
                if done[stage][cell] == 0 and not all(has_input(stage, *first) for first in firsts):
                    continue
                if has_input(stage, kind, item):
                    ran.add((stage, kind, item))
                    done[stage][cell] += 1
                    moved = True
    return done == [[len(order) for order in cells] for cells in orders]


def order_of(own: Sequence[int], ahead: int) -> list[tuple[str, int]]:
    order = [("F", item) for item in own[:ahead]]
    for later, item in zip(own[ahead:], own, strict=False):
        order += [("F", later), ("B", item)]
    return order + [("B", item) for item in own[max(0, len(own) - ahead) :]]


@given(items=all_items(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_items_of_any_size_take_what_the_general_timing_says(
    items: tuple[StageItems, ...], data: st.DataObject
) -> None:
    flow = Flow(items)
    warmups = [data.draw(st.integers(0, 6)) for _ in items]
    durations = data.draw(durations_of(items))
    found = run_items(flow, warmups, durations)
    try:
        program = one_f_one_b_program(flow, warmups)
    except Deadlock:
        assert found is None
        return
    assert found == program.run(durations).step_s


def test_a_narrow_stage_in_front_of_a_wide_one_feeds_all_its_cells_first() -> None:
    numbers = ((tuple(range(6)),), ((0, 3), (1, 4), (2, 5)))
    flow = Flow(whole(numbers))
    assert run_items(flow, [1, 0]) is not None, "without a barrier one forward pass ahead is enough"
    assert run_items(flow, [1, 0], joined=True) is None
    assert find_warmups(whole(numbers)) == tuple(stock_warmup(stage, [1, 3]) for stage in range(2)) == (3, 0)


@pytest.mark.parametrize("widths", [(4, 4, 4), (4, 3, 4), (1, 4, 2)])
def test_stock_warm_ups_stay_where_they_are_enough(widths: tuple[int, ...]) -> None:
    numbers = [[[item.number for item in own] for own in reroute(16, 1, range(width), 4)] for width in widths]
    assert find_warmups(whole(numbers)) == tuple(stock_warmup(stage, widths) for stage in range(len(widths)))
