"""The search is never slower than 1F1B, never beats its bound, and reaches it where memory allows."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elas.schedule.actions import Schedule, parse_order
from megatron_elas.schedule.checks import check_schedule, peak_samples
from megatron_elas.schedule.greedy import Limit
from megatron_elas.schedule.items import deal_round
from megatron_elas.schedule.one_f_one_b import one_f_one_b
from megatron_elas.schedule.routes import Flow
from megatron_elas.schedule.split_backward import bound_s, split_backward
from megatron_elas.schedule.timing import Deadlock, Durations, Program, time_schedule
from tests.schedule.cases import all_items, durations_of, times, unit_durations


@settings(max_examples=40)
@given(st.data())
def test_an_order_is_between_the_bound_and_1f1b_and_keeps_to_memory(data: st.DataObject) -> None:
    items = data.draw(all_items())
    durations = data.draw(durations_of(items))
    split = data.draw(st.booleans())
    stock = one_f_one_b(items)
    peaks = [max(peak_samples(stock, stage, cell) for cell in range(len(cells))) for stage, cells in enumerate(items)]
    limits = [Limit(samples=peak + data.draw(st.integers(0, 3)), kept_share=1.0) for peak in peaks]
    found = split_backward(items, durations, limits, tries=4, split=split)
    check_schedule(found.schedule, limits)
    assert found.step_s <= time_schedule(stock, durations).step_s
    assert found.bound_s <= found.step_s * (1 + 1e-9)
    assert time_schedule(found.schedule, durations).step_s == pytest.approx(found.step_s)
    assert split or not any(found.schedule.is_split(*place) for place in found.schedule.cells())


@given(st.data())
def test_the_bound_holds_for_1f1b_too(data: st.DataObject) -> None:
    items = data.draw(all_items())
    durations = data.draw(durations_of(items))
    step = time_schedule(one_f_one_b(items), durations).step_s
    for split in (False, True):
        assert bound_s(items, durations, split=split) <= step * (1 + 1e-9)


@pytest.mark.parametrize("lost", [0, 3, 7])
def test_a_lost_cell_costs_no_more_than_its_work_where_memory_is_twice_that_of_1f1b(lost: int) -> None:
    items = [deal_round(24, 1, 2 if stage == lost else 3) for stage in range(8)]
    limits = [Limit(samples=16, kept_share=1.0)] * 8
    found = split_backward(items, unit_durations(items), limits)
    assert found.step_s == found.bound_s == (39 if lost == 0 else 36 + lost)
    assert found.step_s < time_schedule(one_f_one_b(items), unit_durations(items)).step_s


def test_more_tries_are_never_worse_and_the_same_tries_give_the_same() -> None:
    items = [deal_round(24, 1, 2 if stage == 0 else 3) for stage in range(6)]
    durations = Durations.of([times(9, 11, 7)] * 5 + [times(10, 13, 8)], items)
    limits = [Limit(samples=8, kept_share=1.0)] * 6
    steps = [split_backward(items, durations, limits, tries=tries).step_s for tries in (1, 4, 16, 48)]
    assert all(more <= fewer for fewer, more in pairwise(steps))
    assert steps[-1] < steps[0]
    again = split_backward(items, durations, limits, tries=16)
    once_more = split_backward(items, durations, limits, tries=16)
    assert again == once_more and again.schedule == once_more.schedule
    assert again.tries == 16


def test_more_memory_gives_shorter_steps() -> None:
    items = [deal_round(16, 1, 1 if stage == 2 else 2) for stage in range(4)]
    steps = [
        split_backward(items, unit_durations(items), [Limit(samples=size, kept_share=1.0)] * 4).step_s
        for size in (2, 3, 8)
    ]
    assert steps[0] > steps[1] > steps[2]


def test_a_search_stops_at_the_bound() -> None:
    items = [deal_round(8, 1, 2)] * 2
    found = split_backward(items, unit_durations(items), [Limit(samples=99)] * 2, tries=50)
    assert found.step_s == found.bound_s
    assert found.tries < 50


def test_memory_for_not_even_one_item_is_refused() -> None:
    items = [deal_round(4, 2, 2)] * 2
    with pytest.raises(Deadlock, match="holds 0 samples of at most 1 and can take no more"):
        split_backward(items, unit_durations(items), [Limit(samples=1)] * 2)


def arrangements(items: int) -> list[tuple[str, ...]]:
    """Every order of F, B and W of so many items, each kind in order of the items, B after F and W after B."""
    found: list[tuple[str, ...]] = []

    def go(order: tuple[str, ...], counts: tuple[int, int, int]) -> None:
        if counts == (items,) * 3:
            found.append(order)
        for kind, most in enumerate((items, counts[0], counts[1])):
            if counts[kind] < most:
                more = tuple(count + (k == kind) for k, count in enumerate(counts))
                go((*order, f"{'FBW'[kind]}{counts[kind]}"), (more[0], more[1], more[2]))

    go((), (0, 0, 0))
    return found


@pytest.mark.parametrize("first", [(1, 1, 1), (3, 4, 2), (2, 3, 3)])
@pytest.mark.parametrize("second", [(1, 1, 1), (4, 5, 3), (1, 2, 2)])
def test_two_stages_get_the_best_of_all_orders(first: tuple[float, ...], second: tuple[float, ...]) -> None:
    items = (deal_round(3, 1, 1),) * 2
    flow = Flow(items)
    durations = Durations.of([times(*first), times(*second)], items)
    orders = [
        [parse_order(" ".join(f"{stage}{word}" for word in order)) for order in arrangements(3)] for stage in (0, 1)
    ]
    best = float("inf")
    for upper, lower in product(*orders):
        try:
            program = Program(Schedule(items=items, orders=((upper,), (lower,))), flow)
        except Deadlock:
            continue
        best = min(best, program.run(durations).step_s)
    found = split_backward(items, durations, [Limit(samples=9, kept_share=1.0)] * 2)
    assert found.step_s == pytest.approx(best)
