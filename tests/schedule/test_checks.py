"""Each kind of mistake in a schedule is found, at its place."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from megatron_elas.schedule.actions import Action, Schedule, parse_order
from megatron_elas.schedule.checks import (
    check_schedule,
    find_faults,
    out_of_order,
    peak_samples,
    receives_ahead,
)
from megatron_elas.schedule.greedy import Limit, Taste, greedy
from megatron_elas.schedule.items import deal_round
from megatron_elas.schedule.one_f_one_b import one_f_one_b
from megatron_elas.schedule.routes import Flow
from megatron_elas.schedule.timing import Deadlock
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.items import StageItems
from tests.schedule.cases import all_items, unit_durations

AHEAD = Taste(forward_first=True)
ITEMS = deal_round(2, 3, 1)


def alone(order: str) -> Schedule:
    return Schedule(items=(ITEMS,), orders=((parse_order(order),),))


@pytest.mark.parametrize(
    ("order", "position", "text"),
    [
        ("0F0 0F1 0B0", 3, "0B1 is never run: list it"),
        ("0F0 0B0 0B1", 2, "0B1 comes before 0F1: list the forward pass first"),
        ("0F0 0F1 0B0 0B0 0B1", 3, "0B0 is listed twice: its gradient would be counted twice"),
        ("0F0 0F1 0W0 0B0 0B1", 2, "0W0 comes before 0B0: list the input's gradient first"),
        ("0F0 0F1 0B0 0B1 0W1 0W1", 5, "0W1 is listed twice: its gradient would be counted twice"),
        ("0F0 0F1 0F7 0B0 0B1", 2, "0F7 is of an item that the cell does not have: list it where the item is"),
        ("0F0 0F1 1F1 0B0 0B1", 2, "1F1 is of an item that the cell does not have: list it where the item is"),
    ],
)
def test_a_mistake_is_found_at_its_place(order: str, position: int, text: str) -> None:
    faults = find_faults(alone(order))
    assert (faults[0].position, faults[0].text) == (position, text)
    with pytest.raises(BadUsage, match=f"^stage 0, cell 0, position {position}: "):
        check_schedule(alone(order))


def test_a_cell_that_holds_too_much_is_found_where_it_does() -> None:
    order = "0F0 0F1 0B0 0B1"
    assert find_faults(alone(order), [Limit(samples=6)]) == ()
    (fault,) = find_faults(alone(order), [Limit(samples=5)])
    assert fault.position == 1
    assert fault.text == "0F1 makes the cell hold 6 samples, and 5 fit: run a B or W before it"


def test_what_waits_for_its_weight_gradient_counts_its_share() -> None:
    schedule = alone("0F0 0B0 0F1 0B1 0W0 0W1")
    assert peak_samples(schedule, 0, 0) == 3
    assert peak_samples(schedule, 0, 0, kept_share=0.5) == 4.5
    assert peak_samples(schedule, 0, 0, kept_share=2.0) == 12
    assert peak_samples(alone("0F0 0B0 0F1 0B1"), 0, 0, kept_share=2.0) == 3, "not split: nothing waits"


def test_stages_with_different_samples_and_orders_in_a_circle_are_refused() -> None:
    items = (deal_round(2, 1, 1), deal_round(3, 1, 1))
    good = one_f_one_b([items[0], items[0]])
    with pytest.raises(BadUsage, match="one stage holds 2 samples and the other 3"):
        check_schedule(Schedule(items=items, orders=good.orders))
    circle = ((parse_order("0F0 0B0 0F1 0B1"),), (parse_order("1F0 1F1 1B0 1B1"),))
    with pytest.raises(Deadlock, match="the orders wait for each other"):
        check_schedule(Schedule(items=good.items, orders=circle))


def test_the_stock_schedule_needs_no_receives_ahead_of_time() -> None:
    for stages in (1, 2, 4):
        assert receives_ahead(one_f_one_b([deal_round(16, 1, 2)] * stages)) == 0


def test_running_ahead_needs_receives_to_be_posted_ahead() -> None:
    items = [deal_round(6, 1, 1)] * 2
    schedule, _ = greedy(Flow(items), unit_durations(items), [Limit(samples=9)] * 2, [AHEAD, Taste()])
    assert schedule.forwards_first(0, 0) == 6
    assert receives_ahead(schedule) == 2
    with pytest.raises(Deadlock):
        receives_ahead(Schedule(items=schedule.items, orders=((parse_order("0B0 0F0"),), (parse_order("1F0 1B0"),))))


@settings(max_examples=30)
@given(all_items())
def test_receives_posted_as_far_ahead_as_an_order_is_long_never_block(items: tuple[StageItems, ...]) -> None:
    schedule = one_f_one_b(items)
    longest = max(len(order) for cells in schedule.orders for order in cells)
    assert 0 <= receives_ahead(schedule) < max(1, longest)


def test_results_that_are_taken_in_another_order_than_they_are_sent_are_found() -> None:
    items = (deal_round(3, 1, 1), deal_round(3, 1, 1))
    straight = one_f_one_b(items)
    assert out_of_order(straight) == ()
    orders = ((parse_order("0F0 0F1 0F2 0B1 0B0 0B2"),), straight.orders[1])
    turned = Schedule(items=items, orders=orders)
    check_schedule(turned)
    assert out_of_order(turned) == ((Action(1, "B", 0), Action(1, "B", 1)),)


@settings(max_examples=30)
@given(all_items())
def test_1f1b_takes_everything_in_the_order_of_sending(items: tuple[StageItems, ...]) -> None:
    assert out_of_order(one_f_one_b(items)) == ()
