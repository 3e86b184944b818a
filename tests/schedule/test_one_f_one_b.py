"""1F1B is the stock one on equal cells, the running job's on unequal ones, and never deadlocks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from megatron_elas.schedule.actions import format_order
from megatron_elas.schedule.checks import check_schedule, peak_samples
from megatron_elas.schedule.items import deal_round
from megatron_elas.schedule.one_f_one_b import one_f_one_b, stock_warmup
from megatron_elas.schedule.timing import Deadlock
from megatron_elas.spec.items import StageItems
from tests.schedule.cases import all_items


def test_the_stock_order_of_three_stages() -> None:
    schedule = one_f_one_b([deal_round(4, 1, 1)] * 3)
    assert [format_order(stage[0]) for stage in schedule.orders] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_stage_s_of_s_holds_as_many_micro_batches_as_stages_follow_it_and_itself() -> None:
    schedule = one_f_one_b([deal_round(24, 2, 3)] * 4)
    assert [peak_samples(schedule, stage, 1) for stage in range(4)] == [8, 6, 4, 2]


def test_a_stage_that_feeds_a_wider_one_runs_ahead_of_it() -> None:
    assert [stock_warmup(stage, [2, 1, 2]) for stage in range(3)] == [2, 2, 0]
    schedule = one_f_one_b([deal_round(6, 1, 2), deal_round(6, 1, 1), deal_round(6, 1, 2)])
    assert [schedule.forwards_first(*place) for place in schedule.cells()] == [3, 3, 3, 1, 1]


@settings(max_examples=60)
@given(all_items())
def test_any_items_can_be_run(items: tuple[StageItems, ...]) -> None:
    check_schedule(one_f_one_b(items))


def test_warm_ups_that_cannot_be_carried_out_are_refused() -> None:
    items = [deal_round(4, 1, 1), deal_round(4, 1, 2)]
    assert one_f_one_b(items, [3, 0]).forwards_first(0, 0) == 4
    one_f_one_b(items, [0, 0])
    with pytest.raises(Deadlock):
        one_f_one_b([deal_round(4, 1, 1), deal_round(4, 1, 1)], [0, 1])


def test_items_in_opposite_orders_need_all_forward_passes_first() -> None:
    first = deal_round(3, 1, 1)
    turned = (tuple(reversed(first[0])),)
    assert one_f_one_b([first, turned]).forwards_first(0, 0) == 3
