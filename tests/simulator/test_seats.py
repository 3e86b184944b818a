"""Cells and seats."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elas.simulator.seats import Seats


def test_cells_begin_stage_by_stage_and_those_beyond_the_grid_are_idle() -> None:
    seats = Seats(2, 3, 8)
    assert seats.seat_of(4) == (1, 1) and seats.seat_of(6) is None
    assert seats.idle == {6, 7} and seats.seated == 6
    assert seats.lose(4) == (1, 1) and seats.lose(6) is None
    assert seats.missing == {(1, 1)} and seats.cell_at((1, 1)) is None
    assert seats.fill(by_row=False) == [(7, (1, 1))]
    assert seats.cell_at((1, 1)) == 7 and not seats.missing and not seats.missing_of_row


def test_the_stage_that_misses_most_is_filled_first() -> None:
    seats = Seats(3, 3, 10)
    for cell in (1, 4, 5):
        seats.lose(cell)
    assert seats.fill(by_row=False) == [(9, (1, 1))]
    assert seats.missing_of_stage == [1, 1, 0]


def test_rows_are_filled_only_where_that_makes_them_whole() -> None:
    seats = Seats(2, 3, 7)
    for cell in (0, 3):
        seats.lose(cell)
    assert seats.fill(by_row=True) == []
    seats.lose(2)
    assert seats.fill(by_row=True) == [(6, (0, 2))]
    assert seats.missing_of_row == {0: 2}


def test_barred_cells_stay_idle() -> None:
    seats = Seats(1, 2, 3)
    seats.lose(0)
    assert seats.fill(by_row=False, barred=frozenset({2})) == []


def test_rows_are_packed() -> None:
    seats = Seats(2, 4, 8)
    for cell in (0, 1, 6):
        seats.lose(cell)
    seats.pack_rows()
    assert seats.missing_of_row == {2: 1, 3: 2}
    assert not any(seat[1] < 2 for seat in seats.missing)


def test_cells_are_spread_over_stages() -> None:
    seats = Seats(3, 3, 9)
    for cell in (0, 1, 2):
        seats.lose(cell)
    seats.spread()
    assert seats.missing_of_stage == [1, 1, 1]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 4), st.randoms(use_true_random=False))
def test_whatever_happens_each_cell_has_one_seat_or_none(stages: int, rows: int, spare: int, random) -> None:
    seats = Seats(stages, rows, stages * rows + spare)
    here = set(range(stages * rows + spare))
    for _ in range(12):
        what = random.choice(["lose", "add", "fill", "fill by row", "pack", "spread", "stand up"])
        if what in {"lose", "stand up"} and here:
            cell = random.choice(sorted(here))
            if what == "lose":
                seats.lose(cell)
                here.remove(cell)
            elif seats.seat_of(cell) is not None:
                seats.stand_up(cell)
        elif what == "add":
            gone = sorted(set(range(stages * rows + spare)) - here)
            if gone:
                seats.add(gone[0])
                here.add(gone[0])
        elif what.startswith("fill"):
            seats.fill(by_row=what == "fill by row")
        elif what == "pack":
            seats.pack_rows()
        elif what == "spread":
            seats.spread()
        taken = {seat: seats.cell_at(seat) for seat in ((s, r) for s in range(stages) for r in range(rows))}
        assert {seat for seat, cell in taken.items() if cell is None} == seats.missing
        cells = [cell for cell in taken.values() if cell is not None]
        assert len(set(cells)) == len(cells) == seats.seated
        assert all(seats.seat_of(cell) == seat for seat, cell in taken.items() if cell is not None)
        assert set(cells) | seats.idle == here and not set(cells) & seats.idle
        assert Counter(row for _, row in seats.missing) == seats.missing_of_row
        assert [sum(stage == own for own, _ in seats.missing) for stage in range(stages)] == seats.missing_of_stage
