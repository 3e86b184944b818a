"""Cells stay, move to the poorest stage, or make a shallower pipeline; none is ever lost on the way."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megatron_elas.planner.layouts import homes_of, list_layouts
from megatron_elas.planner.situation import SPARE, Situation
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


@given(now=situations(), data=st.data())
def test_whoever_is_lost_no_cell_sits_twice_and_no_stage_is_empty(now: Situation, data: st.DataObject) -> None:
    cells = [(stage, row) for stage, rows in enumerate(now.rows) for row in rows]
    lost = data.draw(st.sets(st.sampled_from(cells), max_size=len(cells) - 1))
    now = replace(now.without(lost), spares=data.draw(st.integers(0, 2)))
    layouts = list_layouts(now)
    assert layouts and len(set(layouts)) == len(layouts)
    for layout in layouts:
        named = [
            name
            for origins, rows in zip(layout.origins, layout.rows, strict=True)
            for name in zip(origins, rows, strict=True)
        ]
        spare = [row for origin, row in named if origin == SPARE]
        assert sorted(spare) == list(range(len(spare))) and len(spare) <= now.spares
        assert len(set(named)) == len(named)
        assert {name for name in named if name[0] != SPARE} <= set(cells) - lost
        assert all(layout.rows)
        for names in layout.names:
            assert list(names) == sorted(set(names)), "cells are listed by the rows that they get"
    if now.lost_stages:
        assert all(any(len(own.rows) == 1 for own in layouts) for _ in now.lost_stages), "down to one stage"
    else:
        assert layouts[0].rows == now.rows


def test_spare_cells_take_the_places_of_lost_stages_then_relieve_the_busiest() -> None:
    now = replace(situation(3, 2, lost=((1, 0), (1, 1), (2, 0))), spares=2)
    filled = list_layouts(now, cells=False)
    assert [tuple(map(len, layout.rows)) for layout in filled] == [(2, 1, 2)], "the last stage has the head"
    assert filled[0].origins[1] == (SPARE,)
    assert list_layouts(replace(now, spares=0), cells=False) == ()
    plenty = replace(situation(3, 2, lost=((1, 0),)), spares=3)
    assert [tuple(map(len, own.rows)) for own in list_layouts(plenty, cells=False)] == [(2, 1, 2), (3, 2, 3)]


def test_a_lost_stage_is_left_out_filled_from_others_or_all_is_dealt_anew() -> None:
    layouts = list_layouts(situation(4, 2, lost=((1, 0), (1, 1))))
    widths = {tuple(map(len, layout.rows)) for layout in layouts}
    assert {(2, 2, 2), (1, 1, 2, 2), (3, 3), (6,)} <= widths
    kept = next(layout for layout in layouts if tuple(map(len, layout.rows)) == (2, 2, 2))
    assert kept.homes == (0, 2, 3)


def test_homes_are_where_most_cells_of_a_stage_go() -> None:
    now = situation(3, 3, layers=6, lost=((1, 0), (1, 1)))
    assert homes_of(now, ((0, 0), (0, 1), (2, 2, 2))) == (0, 0, 1, 1, 2, 2)
    layout = next(own for own in list_layouts(now) if tuple(map(len, own.rows)) == (2, 2, 3))
    assert layout.homes == (0, 1, 2), "in a tie not the home of another"
    assert layout.names[1] == (0, 2) and layout.origins[1] == (0, 1), "who stays keeps the row"
