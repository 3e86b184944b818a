"""Orders that a plan gives are read as they are written, and refused where the runtime could not carry them out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elas.schedule.greedy import NO_MATTER, Limit, greedy
from megatron_elas.schedule.items import deal_round
from megatron_elas.schedule.one_f_one_b import one_f_one_b
from megatron_elas.schedule.orders import check_orders, read_orders, split_items, write_orders
from megatron_elas.schedule.routes import Flow
from megatron_elas.schedule.timing import Deadlock, Program
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.items import StageItems
from tests.schedule.cases import all_items, durations_of
from tests.schedule.test_greedy import tastes

PAIR = (deal_round(2, 1, 1),) * 2
"""Two stages of one cell, two items."""
GOOD = (("F0 F1 B0 W0 B1 W1",), ("F0 B0 F1 B1",))


@settings(max_examples=60)
@given(st.data())
def test_what_greedy_finds_is_written_read_and_accepted(data: st.DataObject) -> None:
    items = data.draw(all_items())
    limits = [Limit(samples=1e9)] * len(items)
    schedule, _ = greedy(
        Flow(items),
        data.draw(durations_of(items)),
        limits,
        [replace(data.draw(tastes), ahead=NO_MATTER) for _ in items],
    )
    orders = write_orders(schedule)
    assert read_orders(items, orders) == schedule
    try:
        Program(schedule).check_joined()
    except Deadlock:
        with pytest.raises(Deadlock):
            check_orders(items, orders)
    else:
        check_orders(items, orders, limits)


def test_an_item_with_a_weight_gradient_of_its_own_is_split() -> None:
    check_orders(PAIR, GOOD)
    assert split_items(GOOD[0][0]) == {0, 1}
    assert split_items("F0 F1 B0 B1 W1") == {1}
    assert split_items(GOOD[1][0]) == frozenset()


@pytest.mark.parametrize(
    ("orders", "text"),
    [
        ((GOOD[0], ("F0 B0 F1 D1",)), "stage 1: 'D1' is no pass of a plan: write F, B or W, and an item"),
        ((GOOD[0], ("F0 B0 0F1 B1",)), "stage 1: '0F1' is no pass of a plan"),
        ((GOOD[0],), r"orders are given for \[1\] cells of the stages, which have \[1, 1\]"),
        ((GOOD[0], ("F1 F0 B0 B1",)), r"forward passes are of items \[1, 0\] where the cell has \[0, 1\]"),
        ((GOOD[0], ("F0 B0 B1",)), r"forward passes are of items \[\] where the cell has \[1\]"),
        ((GOOD[0], ("F0 B0 F1",)), "1B1 is never run: list it"),
        ((GOOD[0], ("F0 W0 B0 F1 B1",)), "1W0 comes before 1B0"),
        ((("F0 B0 F1 B1",), ("F0 F1 B0 B1",)), "the orders wait for each other"),
    ],
)
def test_what_cannot_be_run_is_refused(orders: tuple[tuple[str, ...], ...], text: str) -> None:
    with pytest.raises(BadUsage, match=text):
        check_orders(PAIR, orders)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(BadUsage, match="0F1 makes the cell hold 2 samples, and 1 fit"):
        check_orders(PAIR, GOOD, [Limit(samples=1)] * 2)


def test_cells_that_begin_together_need_their_first_inputs_at_once() -> None:
    items = (deal_round(2, 1, 1), deal_round(2, 1, 2))
    schedule = read_orders(items, (("F0 B0 F1 B1",), ("F0 B0", "F1 B1")))
    Program(schedule)  # with nobody to wait for it runs
    with pytest.raises(Deadlock, match="where all cells of a stage begin together, the orders wait for each other"):
        check_orders(items, write_orders(schedule))


@settings(max_examples=30)
@given(all_items())
def test_1f1b_with_the_warm_ups_of_plans_is_an_order(items: tuple[StageItems, ...]) -> None:
    schedule = one_f_one_b(items)
    assert read_orders(items, write_orders(schedule)) == schedule
