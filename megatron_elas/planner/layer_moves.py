"""Which slice of which layer's state goes from which cell to which, when stages or their cells change.

Every layer is spread over all cells of its stage in equal slices, in cell order (the interleaved layout of the
optimizer), lane by lane. Cutting the new slices out of the old ones reads every element once, from one holder, so
transfers between different pairs of cells are disjoint; what stays on its cell is not listed. Weights need no transfer
of their own: they are gathered within the new stage from the slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron_elas.planner.prediction import Candidate
from megatron_elas.planner.situation import Rows, Situation
from megatron_elas.spec.cost import JobCost
from megatron_elas.spec.errors import StateInvalid

Cell = tuple[int, int]
"""(Stage that it is on before the change, row)."""

EMBEDDING = -1
"""In place of a layer's number; the head has the number of layers."""


class SliceMove(NamedTuple):
    """Elements ``[start, stop)`` of a unit's parameters of a lane, with their optimizer state."""

    unit: int
    """A layer, EMBEDDING, or the number of layers for the head."""
    start: int
    stop: int
    owner: Cell
    """Whose slice it was."""
    source: Cell
    """Who sends it: the owner, or its backup."""
    target: Cell

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start


def list_moves(
    situation: Situation, candidate: Candidate, before: Rows, backups: Mapping[Cell, Cell]
) -> Iterator[SliceMove]:
    """All transfers, unit by unit, by target and place. Lazy: large clusters have many.

    Args:
        situation: After the loss.
        candidate: To be.
        before: Of every stage: rows of the cells that share its optimizer state, lost ones included.
        backups: Who holds the copy of a lost cell's slices.

    Raises:
        StateInvalid: A lost cell has no backup that is left.
    """
    alive = {(stage, row) for stage, rows in enumerate(situation.rows) for row in rows}
    for unit, count in units(situation.cost):
        old = [(stage, row) for stage in [stage_of(situation.cuts, unit)] for row in before[stage]]
        stage = stage_of(candidate.cuts, unit)
        new = list(zip(candidate.origins[stage], candidate.rows[stage], strict=True))
        for start, end, owner, target in cut(count, old, new):
            source = owner if owner in alive else backups.get(owner)
            if source is None or source not in alive:
                raise StateInvalid(
                    f"no live cell holds elements {start} to {end} of unit {unit}: their owner, row {owner[1]} of "
                    f"stage {owner[0]}, and its backup are lost. Restart from the newest checkpoint with --load"
                )
            if source != target:
                yield SliceMove(unit, start, end, owner, source, target)


def cut(count: int, old: Sequence[Cell], new: Sequence[Cell]) -> Iterator[tuple[int, int, Cell, Cell]]:
    """(start, stop, owner, target) of the pieces that the slices of new owners have of those of old ones."""
    at = 0
    for place, target in enumerate(new):
        start, stop = count * place // len(new), count * (place + 1) // len(new)
        while start < stop:
            while count * (at + 1) // len(old) <= start:
                at += 1
            end = min(stop, count * (at + 1) // len(old))
            yield start, end, old[at], target
            start = end


def ring_backups(before: Rows, alive: Rows) -> dict[Cell, Cell]:
    """For every lost cell the next one of its stage that is left, as when all sit in failure domains of their own.

    Of a lost stage: cells of the nearest stage that is left, one after the other.
    """
    backups = {}
    left = [stage for stage, rows in enumerate(alive) if rows]
    for stage, rows in enumerate(before):
        if not alive[stage] and left:
            near = min(left, key=lambda other: (abs(other - stage), other))
            for place, row in enumerate(rows):
                backups[stage, row] = (near, alive[near][place % len(alive[near])])
            continue
        kept = set(alive[stage])
        for place, row in enumerate(rows):
            if row not in kept:
                following = [*rows[place + 1 :], *rows[:place]]
                heir = next((other for other in following if other in kept), None)
                if heir is not None:
                    backups[stage, row] = (stage, heir)
    return backups


def units(cost: JobCost) -> Iterator[tuple[int, int]]:
    """Every unit and its parameters, of a lane."""
    yield EMBEDDING, cost.embedding.parameters
    for layer, unit in enumerate(cost.layers):
        yield layer, unit.parameters
    yield cost.num_layers, cost.head.parameters + cost.loss.parameters


def stage_of(cuts: tuple[int, ...], unit: int) -> int:
    """Where a unit is."""
    last = len(cuts) - 2
    return next((stage for stage in range(last) if unit < cuts[stage + 1]), last)
