"""Moves cut every new shard out of the old ones, each element once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_elas.spec.errors import StateInvalid
from megatron_elas.spec.moves import plan_moves
from megatron_elas.spec.shards import Piece, ShardLayout


def cut(sizes: Sequence[int], owners: Sequence[int], align: int) -> dict[int, ShardLayout]:
    """Share parameters p0, p1, ... laid end to end: equal ranges rounded up to ``align``, the last may be short."""
    total = sum(sizes)
    share = -(-total // (len(owners) * align)) * align
    layouts = {}
    for index, owner in enumerate(owners):
        pieces = []
        position = 0
        for number, size in enumerate(sizes):
            first = max(position, index * share)
            last = min(position + size, (index + 1) * share)
            if first < last:
                pieces.append(Piece(name=f"p{number}", start=first - position, stop=last - position))
            position += size
        layouts[owner] = ShardLayout(pieces=tuple(pieces))
    return layouts


def label(layout: ShardLayout) -> list[tuple[str, int]]:
    """What each element of a slot is."""
    return [(piece.name, element) for piece in layout.pieces for element in range(piece.start, piece.stop)]


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    align=st.integers(1, 7),
)
def test_every_new_element_comes_from_the_same_element_of_an_old_shard(
    sizes: list[int], before: int, after: int, align: int
) -> None:
    old = cut(sizes, range(before), align)
    new = cut(sizes, range(10, 10 + after), align)
    moves = plan_moves(old, new, {owner: owner for owner in old})
    filled: dict[int, list[tuple[str, int] | None]] = {target: [None] * layout.numel for target, layout in new.items()}
    for move in moves:
        source = label(old[move.owner])[move.old_offset : move.old_offset + move.numel]
        for offset, element in enumerate(source):
            assert filled[move.target][move.new_offset + offset] is None, "an element was moved twice"
            filled[move.target][move.new_offset + offset] = element
    assert filled == {target: label(layout) for target, layout in new.items()}


def test_the_shard_of_a_lost_worker_is_read_from_its_backup() -> None:
    old = cut([12], [0, 1, 2], 1)
    new = cut([12], [0, 2], 1)
    moves = plan_moves(old, new, {0: 0, 1: 2, 2: 2})
    assert [(m.owner, m.source, m.target, m.numel) for m in moves] == [
        (0, 0, 0, 4),
        (1, 2, 0, 2),
        (1, 2, 2, 2),
        (2, 2, 2, 4),
    ]


def test_neighbouring_ranges_are_joined_across_parameters() -> None:
    old = cut([3, 4, 5], [0, 1], 1)
    new = cut([3, 4, 5], [0], 1)
    moves = plan_moves(old, new, {0: 0, 1: 1})
    assert [(m.owner, m.old_offset, m.new_offset, m.numel) for m in moves] == [(0, 0, 0, 6), (1, 0, 6, 6)]


def test_a_range_without_an_old_owner_is_refused_by_name() -> None:
    old = {0: ShardLayout(pieces=(Piece(name="weight", start=0, stop=4),))}
    new = {0: ShardLayout(pieces=(Piece(name="weight", start=0, stop=6),))}
    with pytest.raises(StateInvalid, match="element 4 of weight has no holder"):
        plan_moves(old, new, {0: 0})
