"""How much the busiest link carries when a job goes from one plan to another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import pairwise
from typing import NamedTuple

from megatron_elas.planner.layer_moves import cut, ring_backups, stage_of, units
from megatron_elas.planner.prediction import Candidate
from megatron_elas.simulator.seats import Seat
from megatron_elas.spec.cost import JobCost


class Held(NamedTuple):
    """Which cells have which layers. A cell is known by the seat that it had when the job began, as in candidates
    that are planned from there.
    """

    cuts: tuple[int, ...]
    cells: tuple[tuple[Seat, ...], ...] | None
    """Of every stage; None: as many situations are alike, nobody knows."""

    @staticmethod
    def of(candidate: Candidate, *, known: bool) -> Held:
        """Once a candidate is carried out."""
        cells = tuple(
            tuple(zip(origins, rows, strict=True))
            for origins, rows in zip(candidate.origins, candidate.rows, strict=True)
        )
        return Held(candidate.cuts, cells if known else None)


def busiest_bytes(cost: JobCost, before: Held, after: Held, lost: Collection[Seat], rows: int) -> float:
    """That the busiest cell's lane sends or receives: optimizer state by slices, and weights of layers new to it.

    Args:
        cost: Of the job.
        before: What is held.
        after: What is to be.
        lost: Seats whose cells of ``before`` are gone; who has their backup sends what they had.
        rows: Of the job, for a bound where cells are not known: all slices of a cell change hands, the lost ones' in
            addition, and stages get the layers whose stage has another number.
    """
    if before.cells is None or after.cells is None:
        return _bound(cost, before.cuts, after.cuts, rows)
    gone = frozenset(lost)
    stages = {cell: stage for stage, cells in enumerate(before.cells) for cell in cells if cell not in gone}
    places = tuple(tuple(range(len(cells))) for cells in before.cells)
    alive = tuple(tuple(place for place in range(len(cells)) if cells[place] not in gone) for cells in before.cells)
    heirs = {
        before.cells[stage][place]: before.cells[other][heir]
        for (stage, place), (other, heir) in ring_backups(places, alive).items()
    }
    sent: Counter[Seat] = Counter()
    received: Counter[Seat] = Counter()
    for unit, count in units(cost):
        home, stage = stage_of(before.cuts, unit), stage_of(after.cuts, unit)
        for start, stop, owner, target in cut(count, before.cells[home], after.cells[stage]):
            source = heirs.get(owner, owner)
            if source != target or target in gone:
                sent[source] += (stop - start) * cost.optimizer_bytes
                received[target] += (stop - start) * cost.optimizer_bytes
        for cell in after.cells[stage]:
            if stages.get(cell) != home:
                received[cell] += count * cost.weight_bytes
    return max((*sent.values(), *received.values()), default=0)


def _bound(cost: JobCost, before: tuple[int, ...], after: tuple[int, ...], rows: int) -> float:
    owners = rows if cost.optimizer_sharded else 1
    shard = max(cost.parameters(first, last) for first, last in pairwise(before)) * cost.optimizer_bytes / owners
    new: Counter[int] = Counter()
    for unit, count in units(cost):
        stage = stage_of(after, unit)
        if stage != stage_of(before, unit):
            new[stage] += count
    return 2 * shard + max(new.values(), default=0) * (cost.weight_bytes + cost.optimizer_bytes / owners)
