"""A schedule can be read as text."""

from __future__ import annotations

from megatron_elas.schedule.actions import Schedule, parse_order
from megatron_elas.schedule.checks import find_faults
from megatron_elas.schedule.grid import draw_text, print_orders
from megatron_elas.schedule.items import deal_round
from megatron_elas.schedule.one_f_one_b import one_f_one_b
from megatron_elas.schedule.timing import time_schedule
from tests.schedule.cases import unit_durations


def test_orders_are_printed_cell_by_cell() -> None:
    schedule = one_f_one_b([deal_round(3, 1, 1), deal_round(3, 1, 2)])
    assert print_orders(schedule) == (
        "0.0: 0F0 0F1 0F2 0B0 0B1 0B2\n"
        "1.0: 1F0 1B0 1F2 1B2\n"
        "1.1: 1F1 1B1"
    )  # fmt: skip


def test_a_fault_points_at_its_action() -> None:
    schedule = Schedule(items=(deal_round(2, 1, 1),), orders=((parse_order("0F0 0B0 0B1 0F1"),),))
    lines = print_orders(schedule, find_faults(schedule)).splitlines()
    assert lines[0] == "0.0: 0F0 0B0 0B1 0F1"
    assert lines[1] == "             ^ 0B1 comes before 0F1: list the forward pass first"


def test_cells_are_drawn_over_time() -> None:
    items = [deal_round(2, 1, 1), deal_round(2, 1, 1)]
    text = draw_text(time_schedule(one_f_one_b(items), unit_durations(items)), width=27)
    assert text.splitlines() == [
        "0.0  |F0-F1-......B0----...B1----|  33%",
        "1.0  |...F0-B0----F1-B1----......|  33%",
        "step 9 s",
    ]
