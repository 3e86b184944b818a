"""Which range of whose flat shard goes to which new owner.

Every element of a new shard is read once, from the one worker that holds the old owner's copy, so
moves between different pairs of workers are disjoint.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter

from megatron_elas.spec.errors import StateInvalid
from megatron_elas.spec.shards import ShardLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """``numel`` elements of every slot, from a copy of ``owner``'s old shard to ``target``'s new one."""

    owner: int
    """Whose old shard the elements are from."""
    source: int
    """The worker that holds the copy: the owner, or its backup when the owner is lost."""
    target: int
    old_offset: int
    """Inside a slot of the old shard."""
    new_offset: int
    """Inside a slot of the new shard."""
    numel: int


def plan_moves(
    old: Mapping[int, ShardLayout],
    new: Mapping[int, ShardLayout],
    holders: Mapping[int, int],
    twins: Mapping[str, str] | None = None,
) -> tuple[Move, ...]:
    """Cut the new shards out of the old ones.

    Args:
        old: Shard of every old owner of one lane.
        new: Shard of every new owner that does not have it yet.
        holders: For each old owner, who holds its copy now; owners that nobody holds a copy of are left out.
        twins: Of a parameter that there are two equal copies of, the other one, from which what is missing is taken.

    Returns:
        Moves by target and new offset; neighbouring ranges of one owner are joined.

    Raises:
        StateInvalid: A range of a new shard is in no old shard.
    """
    sources = _Sources(old, holders, twins or {})
    moves: list[Move] = []
    for target, layout in new.items():
        for piece, new_offset in zip(layout.pieces, layout.offsets(), strict=True):
            position = piece.start
            while position < piece.stop:
                start, stop, owner, offset = sources.find(piece.name, position)
                end = min(stop, piece.stop)
                _append(
                    moves,
                    Move(
                        owner=owner,
                        source=holders[owner],
                        target=target,
                        old_offset=offset + position - start,
                        new_offset=new_offset + position - piece.start,
                        numel=end - position,
                    ),
                )
                position = end
    return tuple(moves)


_Range = tuple[int, int, int, int]
"""Start and stop inside a parameter; owner; offset of the start inside a slot of the owner's shard."""


class _Sources:
    """Where every element is, by the parameter's name."""

    def __init__(self, old: Mapping[int, ShardLayout], holders: Mapping[int, int], twins: Mapping[str, str]) -> None:
        self._twins = twins
        self._owners, self._held = sorted(old), sorted(holders)
        self._ranges: dict[str, list[_Range]] = defaultdict(list)
        for owner, layout in old.items():
            if owner in holders:
                for piece, offset in zip(layout.pieces, layout.offsets(), strict=True):
                    self._ranges[piece.name].append((piece.start, piece.stop, owner, offset))
        for ranges in self._ranges.values():
            ranges.sort()

    def find(self, name: str, position: int) -> _Range:
        """The range that has the element. Raises StateInvalid."""
        names = [name, self._twins[name]] if name in self._twins else [name]
        for candidate in names:
            ranges = self._ranges.get(candidate, [])
            at = bisect_right(ranges, position, key=itemgetter(0)) - 1
            if at >= 0 and position < ranges[at][1]:
                return ranges[at]
        raise StateInvalid(
            f"element {position} of {name} has no holder (owners were workers {self._owners}; copies are there of "
            f"{self._held}): the optimizer state is not whole. Restart from the newest checkpoint with --load"
        )


def _append(moves: list[Move], move: Move) -> None:
    """Add the move, joined to the one before when both ranges continue it."""
    if moves:
        last = moves[-1]
        if (
            (last.owner, last.target) == (move.owner, move.target)
            and last.old_offset + last.numel == move.old_offset
            and last.new_offset + last.numel == move.new_offset
        ):
            moves[-1] = Move(
                owner=last.owner,
                source=last.source,
                target=last.target,
                old_offset=last.old_offset,
                new_offset=last.new_offset,
                numel=last.numel + move.numel,
            )
            return
    moves.append(move)
