"""Cells to stages anew: when a stage has no cell left, and when spares can make one.

Times are counted in layers of one micro-batch: a stage of ``l`` layers and ``d`` cells, the busiest of which runs
``n = ceil(N / d)`` micro-batches, takes ``n l``. A step of the 1F1B schedule takes about

    max over stages of (n_s - 1) l_s  +  sum over stages of l_s

The sum is what filling and emptying the pipeline cost, and is the number of layers of the model however they are cut;
so what a plan can change is the **load** of its busiest stage, ``(n_s - 1) l_s``.

Memory is not known here. A stage gets at most as many layers as the fullest one had at launch, or, when there are too
few cells for that, as few as can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron_elas.planner.partition import StageLoad, partition
from megatron_elas.spec.cost import JobCost, UnitCost, Work
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.layout import Cell, Placement

CANDIDATES = 4
"""Numbers of stages that are worked out when several have the least load, largest first: with fewer stages every cell
holds more layers, and gets more."""

Layers = tuple[int, int]
"""Of a stage: ``[start, stop)``."""


def seat_spares(job: JobSpec, survivors: Placement, layers: Sequence[Layers], before: Placement) -> Placement:
    """Make cells of spares as long as the busiest stage has less to do with one more.

    Args:
        job: What the job is.
        survivors: Every stage has a cell.
        layers: Of every stage.
        before: Where the survivors were, in which lane above all.
    """
    stages = [list(cells) for cells in survivors.stages]
    spares = list(survivors.spares)
    while len(spares) >= job.tensor_parallel:
        loads = [_load(job.num_microbatches, len(cells), own) for cells, own in zip(stages, layers, strict=True)]
        busiest = loads.index(max(loads))
        cells = len(stages[busiest]) + 1
        if cells > job.num_microbatches or _load(job.num_microbatches, cells, layers[busiest]) == loads[busiest]:
            break
        workers = _take_workers(spares, busiest, job.tensor_parallel, before)
        stages[busiest].append(Cell(row=_free_row(stages[busiest], 0), workers=workers))
    return Placement(stages=tuple(map(_in_rows, stages)), spares=tuple(spares))


def regroup(
    job: JobSpec, survivors: Placement, layers: Sequence[Layers], before: Placement
) -> tuple[Placement, tuple[Layers, ...]]:
    """The placement and the layers of every stage with the least load, then the fewest layers moved, then most stages.

    Cells are shared evenly among the stages; whole cells stay together, and any workers left over make further ones.

    Args:
        job: What the job is.
        survivors: Some stages have no cell; at least one cell can be made of all workers.
        layers: Of every stage, before.
        before: Where the survivors were, in which lane above all.
    """
    found = _find_cells(survivors, layers, job.tensor_parallel)
    deepest = min(job.pipeline_parallel, job.num_layers, found.count)
    fullest = max(*(stop - start for start, stop in job.launch_layers), -(-job.num_layers // deepest))
    counts = {depth: _share_cells(job, found.count, depth) for depth in range(1, deepest + 1)}
    loads = {
        depth: _least_load(job, cells, fullest) for depth, cells in counts.items() if depth * fullest >= job.num_layers
    }
    least = min(loads.values())
    depths = [depth for depth in sorted(loads, reverse=True) if loads[depth] == least]
    plans = [_arrange(job, found, counts[depth], fullest, before) for depth in depths[:CANDIDATES]]
    best = min(plans, key=lambda plan: plan.moved)  # of several, the first: most stages
    return best.placement, best.layers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cells:
    """What there is to make stages of."""

    whole: tuple[tuple[Cell, Layers], ...]
    """Cells that nobody of was lost, and the layers they hold, by stage and row."""
    others: tuple[int, ...]
    """Workers in no whole cell, ascending."""
    count: int
    """Of cells, whole and to be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrangement:
    placement: Placement
    layers: tuple[Layers, ...]
    moved: int
    """Layers that a cell gets and did not hold, over all cells."""


def _find_cells(survivors: Placement, layers: Sequence[Layers], tensor_parallel: int) -> _Cells:
    whole = tuple((cell, own) for cells, own in zip(survivors.stages, layers, strict=True) for cell in cells)
    return _Cells(whole=whole, others=survivors.spares, count=len(whole) + len(survivors.spares) // tensor_parallel)


def _load(num_microbatches: int, cells: int, layers: Layers) -> int:
    """Of one stage; see above."""
    return (-(-num_microbatches // cells) - 1) * (layers[1] - layers[0])


def _share_cells(job: JobSpec, cells: int, stages: int) -> tuple[int, ...]:
    """Cells of each of the stages, most first: even, and never more than there are micro-batches."""
    small, larger = divmod(cells, stages)
    return tuple(min(small + (stage < larger), job.num_microbatches) for stage in range(stages))


def _least_load(job: JobSpec, cells: Sequence[int], fullest: int) -> int:
    """The least load that layers can be cut for: how many layers a stage can take within a load is a quotient."""
    rounds = [-(-job.num_microbatches // count) - 1 for count in cells]
    low, high = 0, max(rounds) * fullest
    while low < high:
        limit = (low + high) // 2
        room = [min(fullest, limit // own) if own else fullest for own in rounds]
        if min(room) >= 1 and sum(room) >= job.num_layers:
            high = limit
        else:
            low = limit + 1
    return low


def _arrange(job: JobSpec, found: _Cells, sizes: Sequence[int], fullest: int, before: Placement) -> _Arrangement:
    """Cells and layers of stages of these sizes, most workers and layers staying where they are."""
    depth, total = len(sizes), job.num_layers
    natural: list[list[tuple[Cell, Layers]]] = [[] for _ in sizes]
    for cell, held in found.whole:  # where the middle of its layers comes to lie when all stages are equally long
        natural[min((held[0] + held[1]) * depth // (2 * total), depth - 1)].append((cell, held))
    counts = [0] * depth
    by_supply = sorted(range(depth), key=lambda stage: (-len(natural[stage]), stage))
    for stage, size in zip(by_supply, sorted(sizes, reverse=True), strict=True):
        counts[stage] = size
    homes = [-1] * total
    for stage, near in enumerate(natural):
        for _, held in near:
            homes[held[0] : held[1]] = [stage] * (held[1] - held[0])
    loads = [StageLoad(-(-job.num_microbatches // count) - 1, 0, count, 0, 0) for count in counts]
    layers = tuple(pairwise(partition(_unit_cost(total), loads, fullest, homes).cuts))
    stages, idle, moved = _assign(found.whole, counts, layers)
    spares = sorted([*found.others, *(worker for cell in idle for worker in cell.workers)])
    for stage, cells in enumerate(stages):
        while len(cells) < counts[stage]:
            workers = _take_workers(spares, stage, job.tensor_parallel, before)
            cells.append(Cell(row=_free_row(cells, 0), workers=workers))
            moved += layers[stage][1] - layers[stage][0]
    return _Arrangement(
        placement=Placement(stages=tuple(map(_in_rows, stages)), spares=tuple(spares)), layers=layers, moved=moved
    )


def _assign(
    whole: Sequence[tuple[Cell, Layers]], counts: Sequence[int], layers: Sequence[Layers]
) -> tuple[list[list[Cell]], list[Cell], int]:
    """Whole cells to stages: pairs with most layers in common first.

    Returns:
        Cells of every stage, at most as many as counted; cells for which there is no stage; layers moved.
    """
    stages: list[list[Cell]] = [[] for _ in counts]
    left = list(whole)
    moved = 0
    ranges = sorted({held for _, held in whole})
    pairs = sorted(
        ((-_common(held, own), stage, held) for held in ranges for stage, own in enumerate(layers)),
    )
    for common, stage, held in pairs:
        for cell, its in [entry for entry in left if entry[1] == held]:
            if len(stages[stage]) < counts[stage]:
                stages[stage].append(replace(cell, row=_free_row(stages[stage], cell.row)))
                left.remove((cell, its))
                moved += layers[stage][1] - layers[stage][0] + common
    return stages, [cell for cell, _ in left], moved


def _common(a: Layers, b: Layers) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


def _free_row(cells: Sequence[Cell], wanted: int) -> int:
    """The wanted row, or the first one that no cell has."""
    taken = {cell.row for cell in cells}
    return wanted if wanted not in taken else next(row for row in range(len(taken) + 1) if row not in taken)


def _in_rows(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    return tuple(sorted(cells, key=lambda cell: cell.row))


def _take_workers(spares: list[int], stage: int, tensor_parallel: int, before: Placement) -> tuple[int, ...]:
    """Workers of a new cell by lane, taken out of ``spares``: who was in the stage and lane first, then in the lane."""
    seats = {worker: before.find_seat(worker) for worker in spares}

    def choices(lane: int) -> Iterator[tuple[bool, int]]:
        for worker, seat in seats.items():
            if worker in spares and seat is not None and seat.lane == lane:
                yield seat.stage != stage, worker

    chosen: dict[int, int] = {}
    for lane in range(tensor_parallel):
        if best := min(choices(lane), default=None):
            chosen[lane] = best[1]
            spares.remove(best[1])
    for lane in range(tensor_parallel):
        if lane not in chosen:
            chosen[lane] = spares.pop(0)
    return tuple(chosen[lane] for lane in range(tensor_parallel))


def _unit_cost(num_layers: int) -> JobCost:
    """Layers that all take one unit of time and of memory, between ends that take none."""
    none, one = Work(), Work(compute_s=1.0)
    layer = UnitCost(forward=one, input_gradient=none, weight_gradient=none, parameters=1, activation_bytes=0)
    end = replace(layer, forward=none, parameters=0)
    return JobCost(
        embedding=end, layers=(layer,) * num_layers, head=end, loss=end, boundary_bytes=0,
        weight_bytes=1, gradient_bytes=0, optimizer_bytes=0,
    )  # fmt: skip
