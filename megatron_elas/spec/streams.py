"""What goes to new owners while training runs under the old plan: whole pieces, as they are cut at their old owners.

An element-wise update may round elements differently near the end of a tensor, so a copy follows its owner bit for bit
only if it is cut as the owner's shard is. So a piece of which a new owner needs a part is sent whole. Pure: all workers
come to the same list.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_elas.spec.catalogue import Catalogue
from megatron_elas.spec.moves import Move
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.shards import SLOTS, Piece, ShardLayout

SLOW_LINK = 1e9
"""Bytes per second that the links of a worker bring at least, it is assumed."""
BYTES = 4 * len(SLOTS)
"""Of an element of a shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Pieces of one old owner that one new owner lacks; they are sent in one step."""

    owner: int
    target: int
    portion: int
    """How many of this pair come before it: one in each step."""
    layout: ShardLayout
    """As a shard of its own."""
    offsets: tuple[int, ...]
    """Of every piece inside a slot of the owner's old shard."""


def plan_streams(catalogue: Catalogue, base: ElasticPlan, moves: Sequence[Move]) -> tuple[Stream, ...]:
    """All that goes from old owners to new ones, by owner, target and portion.

    A portion is what moves of one unit (a layer, the embedding, the head) between two workers, or of as many as a slow
    link brings in half a step: a replica's share of a layer takes far less than that, and steps are not to wait.

    Args:
        catalogue: Of the model.
        base: The plan in force; all its owners live.
        moves: All that lead to the plan to come, see ``plan_remap``.
    """
    unit_of = {parameter.name: number for number, unit in enumerate(catalogue.units) for parameter in unit}
    layouts = {worker: catalogue.layout(base, worker) for worker in base.placement.workers}
    offsets = {worker: layout.offsets() for worker, layout in layouts.items()}
    needed: dict[tuple[int, int], set[int]] = defaultdict(set)
    """By owner and target: numbers of the owner's pieces."""
    for move in moves:
        if move.owner != move.target:
            starts = offsets[move.owner]
            first = bisect_right(starts, move.old_offset) - 1
            last = bisect_right(starts, move.old_offset + move.numel - 1) - 1
            needed[move.owner, move.target].update(range(first, last + 1))
    links = Counter(worker for pair in needed for worker in pair)
    room = 0 if base.predicted_s is None or not links else base.predicted_s / 2 * SLOW_LINK / max(links.values())
    streams = []
    for (owner, target), numbers in sorted(needed.items()):
        units: dict[int, list[int]] = defaultdict(list)
        for number in sorted(numbers):
            units[unit_of[layouts[owner].pieces[number].name]].append(number)
        for portion, chosen in enumerate(_share(units, layouts[owner], room)):
            pieces: tuple[Piece, ...] = tuple(layouts[owner].pieces[number] for number in chosen)
            streams.append(
                Stream(
                    owner=owner,
                    target=target,
                    portion=portion,
                    layout=ShardLayout(pieces=pieces),
                    offsets=tuple(offsets[owner][number] for number in chosen),
                )
            )
    return tuple(streams)


def _share(units: Mapping[int, Sequence[int]], layout: ShardLayout, room: float) -> list[list[int]]:
    """Numbers of pieces of every portion: whole units in order, at least one, and more as long as their bytes fit."""
    portions: list[list[int]] = []
    left = 0.0
    for unit in sorted(units):
        taken = BYTES * sum(layout.pieces[number].numel for number in units[unit])
        if not portions or taken > left:
            portions.append([])
            left = room
        portions[-1] += units[unit]
        left -= taken
    return portions
