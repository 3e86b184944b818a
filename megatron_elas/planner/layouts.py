"""Where cells may sit after a loss: as they are, moved to a poorer stage, or in a shallower pipeline."""

from __future__ import annotations

from typing import NamedTuple

from megatron_elas.planner.situation import Rows, Situation


class Layout(NamedTuple):
    """Cells of every stage to be, each named by the stage that it is on now and its row."""

    rows: Rows
    origins: Rows
    """``origins[stage][cell]``: the stage that the cell is on now."""

    @property
    def homes(self) -> tuple[int, ...]:
        """Of every stage to be: the stage that most of its cells are on now."""
        return tuple(max(sorted(set(own)), key=own.count) for own in self.origins)


def list_layouts(situation: Situation) -> tuple[Layout, ...]:
    """As it is; one cell moved from a stage with at least two more cells to the poorest; a stage less."""
    now = [[(stage, row) for row in rows] for stage, rows in enumerate(situation.rows)]
    layouts = [_layout(now)]
    widths = list(map(len, now))
    poorest = widths.index(min(widths))
    richer = [stage for stage, width in enumerate(widths) if width >= widths[poorest] + 2]
    for giver in sorted(richer, key=lambda stage: (-widths[stage], abs(stage - poorest)))[:2]:
        moved = [list(cells) for cells in now]
        moved[poorest].append(moved[giver].pop())
        layouts.append(_layout(moved))
    if len(now) > 1:
        layouts.append(_layout(_without_stage(now, poorest)))
    return tuple(layouts)


def _without_stage(now: list[list[tuple[int, int]]], dissolved: int) -> list[list[tuple[int, int]]]:
    """The stage's cells go to those that have fewest, the nearest first."""
    left = [list(cells) for stage, cells in enumerate(now) if stage != dissolved]
    for cell in now[dissolved]:
        receiver = min(range(len(left)), key=lambda stage: (len(left[stage]), abs(stage + 0.5 - dissolved), stage))
        left[receiver].append(cell)
    return left


def _layout(cells: list[list[tuple[int, int]]]) -> Layout:
    ordered = [sorted(own, key=lambda cell: (cell[1], cell[0])) for own in cells]
    return Layout(
        rows=tuple(tuple(row for _, row in own) for own in ordered),
        origins=tuple(tuple(stage for stage, _ in own) for own in ordered),
    )
