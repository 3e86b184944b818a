"""Which workers make up the cells of a plan."""

from __future__ import annotations

from dataclasses import replace

from megatron_elas.planner.layouts import Layout
from megatron_elas.planner.prediction import Candidate
from megatron_elas.planner.situation import SPARE
from megatron_elas.spec.layout import Cell, Placement


def seat_workers(candidate: Candidate, left: Placement, tensor_parallel: int, before: Placement) -> Placement:
    """The placement that a candidate describes.

    Whole cells stay together. Spare workers make the others: who was in the lane comes first, of these who was in the
    stage that most of the new cell's neighbours come from, then the lowest number; lanes that nobody is left for are
    given to the others.

    Args:
        candidate: Cells of ``left``, by stage and row, and spare ones.
        left: Without the lost workers.
        tensor_parallel: Lanes of a cell.
        before: With the lost workers, whose cell mates had seats in it.
    """
    cells = {(stage, cell.row): cell for stage, own in enumerate(left.stages) for cell in own}
    layout = Layout(candidate.rows, candidate.origins)
    homes, names_of = layout.homes, layout.names
    spares = _Spares(left, before)
    stages: list[list[Cell]] = []
    for origins, rows, names in zip(candidate.origins, candidate.rows, names_of, strict=True):
        stages.append(
            [
                _in_row(cells.pop((origin, row)), name)
                for origin, row, name in zip(origins, rows, names, strict=True)
                if origin != SPARE
            ]
        )
    for stage, (origins, names) in enumerate(zip(candidate.origins, names_of, strict=True)):
        for origin, name in zip(origins, names, strict=True):
            if origin == SPARE:
                stages[stage].append(Cell(row=name, workers=spares.take(homes[stage], tensor_parallel)))
    unseated = [worker for cell in cells.values() for worker in cell.workers]
    return Placement(
        stages=tuple(tuple(sorted(own, key=lambda cell: cell.row)) for own in stages),
        spares=tuple(sorted([*spares.workers, *unseated])),
    )


def _in_row(cell: Cell, row: int) -> Cell:
    return cell if cell.row == row else replace(cell, row=row)


class _Spares:
    """Workers without a seat, ascending."""

    def __init__(self, left: Placement, before: Placement) -> None:
        self.workers = sorted(left.spares)
        self._seats = {worker: before.find_seat(worker) for worker in self.workers}

    def take(self, stage: int, lanes: int) -> tuple[int, ...]:
        """Workers of a cell by lane, who are no longer spare."""
        chosen: dict[int, int] = {}
        for lane in range(lanes):
            choices = [
                (seat.stage != stage, worker)
                for worker in self.workers
                if (seat := self._seats[worker]) is not None and seat.lane == lane
            ]
            if choices:
                chosen[lane] = min(choices)[1]
                self.workers.remove(chosen[lane])
        for lane in range(lanes):
            if lane not in chosen:
                chosen[lane] = self.workers.pop(0)
        return tuple(chosen[lane] for lane in range(lanes))
