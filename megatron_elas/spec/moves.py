"""Which range of whose flat shard goes to which new owner.

Every element of a new shard is read once, from the one worker that holds the old owner's copy, so
moves between different pairs of workers are disjoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

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
    old: Mapping[int, ShardLayout], new: Mapping[int, ShardLayout], holders: Mapping[int, int]
) -> tuple[Move, ...]:
    """Cut the new shards out of the old ones.

    Args:
        old: Shard of every old owner of one stage and lane.
        new: Shard of every new owner, over the same parameters.
        holders: For each old owner, who holds its copy now.

    Returns:
        Moves by target and new offset; neighbouring ranges of one owner are joined.

    Raises:
        StateInvalid: A range of a new shard is in no old shard.
    """
    sources: dict[str, list[tuple[int, int, int, int]]] = defaultdict(list)
    for owner, layout in old.items():
        for piece, offset in zip(layout.pieces, layout.offsets(), strict=True):
            sources[piece.name].append((piece.start, piece.stop, owner, offset))
    for ranges in sources.values():
        ranges.sort()
    moves: list[Move] = []
    for target, layout in new.items():
        for piece, new_offset in zip(layout.pieces, layout.offsets(), strict=True):
            position = piece.start
            for start, stop, owner, offset in sources.get(piece.name, ()):
                if stop <= position or start >= piece.stop:
                    continue
                if start > position:
                    break
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
            if position < piece.stop:
                raise StateInvalid(
                    f"elements {position} to {piece.stop} of {piece.name} have no owner among workers {sorted(old)}: "
                    f"the optimizer state is not whole. Restart from the newest checkpoint with --load"
                )
    return tuple(moves)


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
