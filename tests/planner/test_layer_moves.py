"""Which slices are sent when layers change their stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_elas.planner.layer_moves import EMBEDDING, SliceMove, list_moves
from megatron_elas.planner.search import stay
from megatron_elas.spec.errors import StateInvalid
from tests.planner.situations import situation


def test_a_layer_that_changes_its_stage_goes_from_every_old_cell_to_every_new_one() -> None:
    now = situation(2, 2, layers=4)
    candidate = replace(stay(now), cuts=(0, 3, 4))
    moves = list(list_moves(now, candidate, now.rows, {}))
    # 120 parameters of layer 2, halves on rows 0 and 1 of stage 1, become halves on those of stage 0.
    assert moves == [
        SliceMove(2, 0, 60, (1, 0), (1, 0), (0, 0)),
        SliceMove(2, 60, 120, (1, 1), (1, 1), (0, 1)),
    ]


def test_a_lost_cells_slices_come_from_its_backup() -> None:
    now = situation(2, 3, layers=2, lost=((0, 1),))
    assert now.held is not None
    moves = list(list_moves(now, stay(now), now.held, {(0, 1): (0, 2)}))
    assert {move.unit for move in moves} == {EMBEDDING, 0}
    # Of 120: 40 + 40 + 40 becomes 60 + 60. Row 2 has the lost 40 to 80, so that only 40 to 60 are sent.
    assert [move for move in moves if move.unit == 0] == [SliceMove(0, 40, 60, (0, 1), (0, 2), (0, 0))]


def test_a_slice_without_a_holder_is_said() -> None:
    now = situation(2, 3, layers=2, lost=((0, 1),))
    assert now.held is not None
    with pytest.raises(StateInvalid, match=r"no live cell holds elements 20 to 30 of unit -1: their owner, row 1"):
        list(list_moves(now, stay(now), now.held, {}))
