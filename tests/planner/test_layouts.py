"""Cells stay, move to the poorest stage, or make a shallower pipeline; none is ever lost on the way."""

from __future__ import annotations

from hypothesis import given

from megatron_elas.planner.layouts import list_layouts
from megatron_elas.planner.situation import Situation
from tests.planner.situations import situation, situations


@given(now=situations())
def test_every_layout_has_every_cell_once(now: Situation) -> None:
    cells = sorted((stage, row) for stage, rows in enumerate(now.rows) for row in rows)
    for layout in list_layouts(now):
        named = [
            name
            for origins, rows in zip(layout.origins, layout.rows, strict=True)
            for name in zip(origins, rows, strict=True)
        ]
        assert sorted(named) == cells and all(layout.rows)
    assert list_layouts(now)[0].rows == now.rows


def test_a_stage_that_lost_two_gets_one_from_a_full_one() -> None:
    widths = [tuple(map(len, layout.rows)) for layout in list_layouts(situation(3, 4, lost=((1, 0), (1, 1))))]
    assert widths == [(4, 2, 4), (3, 3, 4), (4, 3, 3), (5, 5)]


def test_the_poorest_stage_is_the_one_that_is_given_up() -> None:
    *_, shallower = list_layouts(situation(4, 2, lost=((1, 0),)))
    assert tuple(map(len, shallower.rows)) == (3, 2, 2)
    assert shallower.homes == (0, 2, 3)
