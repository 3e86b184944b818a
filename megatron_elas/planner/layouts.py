"""Where cells may sit after a loss.

While every stage has a cell: as they are; with spare cells where these relieve the busiest stage; one moved to a poorer
stage; in a pipeline with a stage less.

When stages are lost: with spare cells in their places; in a pipeline without them; and for every number of stages dealt
out anew, evenly and in whatever unequal shares waste least. Each cell goes to where its layers may come to lie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, count, pairwise, permutations
from typing import NamedTuple

from megatron_elas.planner.dataflow import busiest_share
from megatron_elas.planner.situation import SPARE, Rows, Situation
from megatron_elas.spec.cost import CostSums

Name = tuple[int, int]
"""Stage that a cell is on now, or SPARE; and its row."""
Cells = list[list[Name]]
"""Of every stage."""

FEW_CELLS = 16
"""Among more cells even shares waste little, and unequal ones are not looked for."""
FEW_STAGES = 4
"""For more, larger stages are put where most cells are, and nowhere else."""
_GAIN = 1.01
"""By which unequal shares have to be better than even ones."""


class Layout(NamedTuple):
    """Cells of every stage to be, each named by the stage that it is on now and its row; ascending by ``names``."""

    rows: Rows
    origins: Rows
    """``origins[stage][cell]``: the stage that the cell is on now, or SPARE."""

    @property
    def homes(self) -> tuple[int, ...]:
        """Of every stage to be: the stage that most of its cells are on now; SPARE where all are new.

        Of several, the one whose cells mostly go there.
        """
        goals = _goals(self.origins)
        homes = []
        for stage, own in enumerate(self.origins):
            counts = Counter(origin for origin in own if origin != SPARE)
            claims = {origin: (cells, goals[origin] == stage) for origin, cells in sorted(counts.items())}
            homes.append(max(claims, key=claims.__getitem__, default=SPARE))
        return tuple(homes)

    @property
    def names(self) -> Rows:
        """Of every stage to be: rows of its cells once they are there, all different."""
        return tuple(map(_row_names, self.rows, self.origins, self.homes))


def list_layouts(situation: Situation, *, cells: bool = True) -> tuple[Layout, ...]:
    """All that are worth a look, each once. The first one is as it is, unless a stage is lost.

    Args:
        situation: Who is left.
        cells: Whether cells may move between stages. Where not, spare ones at most get a seat; if they are too few for
            all lost stages there is no layout.
    """
    now = [[(stage, row) for row in rows] for stage, rows in enumerate(situation.rows)]
    seated = _with_spares(situation, now)
    layouts = [_layout(own) for own in (now, seated) if all(own)]
    if cells and situation.lost_stages:
        layouts.append(_layout(_without_lost(situation, now)))
        layouts += [seat_cells(situation, widths) for widths in _shares(situation)]
    elif cells:
        layouts += [_layout(own) for own in _changed(seated)]
    return tuple(dict.fromkeys(layouts))


def seat_cells(situation: Situation, widths: Sequence[int]) -> Layout:
    """All cells dealt out anew to stages of these widths, as many as these take.

    Each goes to where most of its layers may come to lie: layers are thought of as dealt in proportion to widths, and
    pairs of a stage now and one to be that have most in common go first.
    """
    layers, total = situation.cost.num_layers, sum(widths)
    held = list(pairwise(situation.cuts))
    bounds = list(pairwise(accumulate((layers * width / total for width in widths), initial=0.0)))

    def apart(pair: tuple[int, int]) -> tuple[float, float, int, int]:
        origin, stage = pair
        (first, last), (start, stop) = held[origin], bounds[stage]
        common = max(0.0, min(last, stop) - max(first, start))
        return -round(common, 9), round(abs(first + last - start - stop), 9), stage, origin

    left = [[(stage, row) for row in rows] for stage, rows in enumerate(situation.rows)]
    seated: Cells = [[] for _ in widths]
    for origin, stage in sorted(((o, s) for o, own in enumerate(left) if own for s in range(len(widths))), key=apart):
        while left[origin] and len(seated[stage]) < widths[stage]:
            seated[stage].append(left[origin].pop(0))
    spares = _spare_cells(situation)
    for own, width in zip(seated, widths, strict=True):
        while len(own) < width:
            own.append(spares.pop(0))
    return _layout(seated)


def homes_of(situation: Situation, origins: Rows) -> tuple[int, ...]:
    """Of every layer: the stage to be to which most of the cells go that have it now, -1 for none.

    Args:
        situation: Before.
        origins: As in ``Layout``.
    """
    goals = _goals(origins)
    homes: list[int] = []
    for stage, (first, last) in enumerate(pairwise(situation.cuts)):
        homes += [goals.get(stage, -1)] * (last - first)
    return tuple(homes)


def _goals(origins: Rows) -> dict[int, int]:
    """Of every stage that cells come from: the stage to be to which most of them go."""
    cells: dict[int, Counter[int]] = {}
    for stage, own in enumerate(origins):
        for origin, number in Counter(own).items():
            cells.setdefault(origin, Counter())[stage] += number
    return {origin: max(own, key=own.__getitem__) for origin, own in cells.items() if origin != SPARE}


def _row_names(rows: Sequence[int], origins: Sequence[int], home: int) -> tuple[int, ...]:
    """Of a stage's cells, in any order.

    Of several with one row, that of the home stage keeps it, else that of the earliest one. The others, and spare
    cells, get free rows, the lowest first.
    """
    by_claim = sorted(range(len(rows)), key=lambda cell: (origins[cell] != home, origins[cell], rows[cell]))
    keepers: dict[int, int] = {}
    for cell in by_claim:
        if origins[cell] != SPARE:
            keepers.setdefault(rows[cell], cell)
    names = {cell: row for row, cell in keepers.items()}
    free = (row for row in count() if row not in keepers)
    for cell in by_claim:
        if cell not in names:
            names[cell] = next(free)
    return tuple(names[cell] for cell in range(len(rows)))


def _layout(cells: Cells) -> Layout:
    named = _listed(cells).names
    return _listed([[cell for _, cell in sorted(zip(*own, strict=True))] for own in zip(named, cells, strict=True)])


def _listed(cells: Cells) -> Layout:
    return Layout(
        rows=tuple(tuple(row for _, row in own) for own in cells),
        origins=tuple(tuple(stage for stage, _ in own) for own in cells),
    )


def _spare_cells(situation: Situation) -> list[Name]:
    return [(SPARE, number) for number in range(situation.spares)]


def _with_spares(situation: Situation, now: Cells) -> Cells:
    """One in every lost stage, then one at a time in the busiest stage, as long as that has less to do then."""
    spares, lost = _spare_cells(situation), situation.lost_stages
    if len(spares) < max(1, len(lost)):
        return now
    cells = [list(own) for own in now]
    for stage in lost:
        cells[stage].append(spares.pop(0))
    job, sums = situation.job, CostSums(situation.cost)

    def seconds(stage: int, width: int) -> float:
        share = busiest_share(job, width, "reroute")
        return sums.step_s(situation.cuts[stage], situation.cuts[stage + 1], share.samples, share.items)

    busy = [seconds(stage, len(own)) for stage, own in enumerate(cells)]
    while spares:
        busiest = busy.index(max(busy))
        relieved = seconds(busiest, len(cells[busiest]) + 1)
        if len(cells[busiest]) >= job.num_microbatches or relieved >= busy[busiest]:
            break
        cells[busiest].append(spares.pop(0))
        busy[busiest] = relieved
    return cells


def _changed(now: Cells) -> Iterator[Cells]:
    """A cell moved from a stage with at least two more cells to the poorest; a stage less."""
    widths = list(map(len, now))
    poorest = widths.index(min(widths))
    richer = [stage for stage, width in enumerate(widths) if width >= widths[poorest] + 2]
    for giver in sorted(richer, key=lambda stage: (-widths[stage], abs(stage - poorest)))[:2]:
        moved = [list(cells) for cells in now]
        moved[poorest].append(moved[giver].pop())
        yield moved
    if len(now) > 1:
        yield _without_stage(now, poorest)


def _without_stage(now: Cells, dissolved: int) -> Cells:
    """The stage's cells go to those that have fewest, the nearest first."""
    left = [list(cells) for stage, cells in enumerate(now) if stage != dissolved]
    for cell in now[dissolved]:
        receiver = min(range(len(left)), key=lambda stage: (len(left[stage]), abs(stage + 0.5 - dissolved), stage))
        left[receiver].append(cell)
    return left


def _without_lost(situation: Situation, now: Cells) -> Cells:
    """The other stages as they are; spare cells go to those with fewest."""
    left = [list(cells) for cells in now if cells] or [[]]
    for cell in _spare_cells(situation):
        poorest = min(left, key=len)
        if len(poorest) < situation.job.num_microbatches:
            poorest.append(cell)
    return left


def _shares(situation: Situation) -> Iterator[tuple[int, ...]]:
    """Cells of every stage, for pipelines of every depth, the deepest first."""
    job, total = situation.job, situation.num_cells
    deepest = min(job.pipeline_parallel, situation.cost.num_layers, total)
    unequal = _unequal_shares(job.num_microbatches, total, deepest) if total <= FEW_CELLS else {}
    for depth in range(deepest, 0, -1):
        small, larger = divmod(total, depth)
        even = tuple(min(small + (stage < larger), job.num_microbatches) for stage in range(depth))
        yield _largest_where_most_are(situation, even)
        if total <= FEW_CELLS and depth <= FEW_STAGES:
            yield from sorted(set(permutations(even)))
        if depth in unequal and _rate(job.num_microbatches, unequal[depth]) > _rate(job.num_microbatches, even) * _GAIN:
            yield _largest_where_most_are(situation, unequal[depth])


def _rate(num_microbatches: int, widths: Sequence[int]) -> float:
    """Layers that stages of these widths run in a unit of time, layers being cut as fine as need be."""
    return sum(1 / -(-num_microbatches // width) for width in widths)


def _unequal_shares(num_microbatches: int, cells: int, deepest: int) -> dict[int, tuple[int, ...]]:
    """Of every depth: the widths of the greatest rate, by the best way to use so many cells with a stage less."""
    rates = [0.0] + [1 / -(-num_microbatches // width) for width in range(1, min(cells, num_microbatches) + 1)]
    best: list[tuple[float, tuple[int, ...]]] = [(rate, (width,)) for width, rate in enumerate(rates)]
    best += [best[-1]] * (cells + 1 - len(best))
    found = {1: best[cells][1]}
    for depth in range(2, deepest + 1):
        longer: list[tuple[float, tuple[int, ...]]] = [(0.0, ())] * depth
        for total in range(depth, cells + 1):
            width = max(
                range(1, min(len(rates) - 1, total - depth + 1) + 1),
                key=lambda own: rates[own] + best[total - own][0],
            )
            longer.append((rates[width] + best[total - width][0], (*best[total - width][1], width)))
        best = longer
        found[depth] = best[cells][1]
    return found


def _largest_where_most_are(situation: Situation, widths: Sequence[int]) -> tuple[int, ...]:
    """The widths in the order that suits where cells come to lie when all stages are equally long."""
    layers, depth = situation.cost.num_layers, len(widths)
    supply = [0] * depth
    for (first, last), rows in zip(pairwise(situation.cuts), situation.rows, strict=True):
        supply[min((first + last) * depth // (2 * layers), depth - 1)] += len(rows)
    by_supply = sorted(range(depth), key=lambda stage: (-supply[stage], stage))
    ordered = dict(zip(by_supply, sorted(widths, reverse=True), strict=True))
    return tuple(ordered[stage] for stage in range(depth))
