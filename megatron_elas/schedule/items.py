"""How a step's samples are dealt to the cells of a stage: the dataflow axis.

Samples are numbered within the global batch; micro-batch ``g = m * D + d`` (micro-step ``m``, row ``d``) of ``b``
samples is the range ``[g b, (g + 1) b)``. Every builder gives each sample to exactly one cell of the stage, and each
cell its items in ascending order of their first samples.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

from megatron_elas.spec.errors import BadUsage, NoFeasiblePlan
from megatron_elas.spec.items import CellItems, Item, StageItems, whole_micro_batches


def deal_round(
    num_microbatches: int, size: int, cells: int, made: MutableMapping[int, Item] | None = None
) -> StageItems:
    """Whole micro-batches dealt round: ``g`` goes to cell ``g mod cells``.

    With the original number of cells this is Megatron's own order. ``made``: see ``whole_micro_batches``.

    Raises:
        NoFeasiblePlan: Fewer micro-batches than cells.
    """
    _check_fed(num_microbatches, cells)
    return whole_micro_batches([range(cell, num_microbatches, cells) for cell in range(cells)], size, made)


def reroute(
    num_microbatches: int,
    size: int,
    rows: Sequence[int],
    all_rows: int,
    made: MutableMapping[int, Item] | None = None,
) -> StageItems:
    """Cells keep their rows' micro-batches; those of lost rows move whole to other cells, one after the other.

    The cell that is given a micro-batch is the one with fewest so far; ties go round, so that no cell is always first.

    Args:
        num_microbatches: Of the global batch.
        size: Samples of each.
        rows: Row of every cell, fewer than the job's, all different. One that is no row of the job has nothing to keep.
        all_rows: Rows of the job.
        made: See ``whole_micro_batches``.

    Raises:
        NoFeasiblePlan: Fewer micro-batches than cells.
    """
    _check_fed(num_microbatches, len(rows))
    cell_of = {row: cell for cell, row in enumerate(rows)}
    dealt: list[list[int]] = [[] for _ in rows]
    turn = 0
    for start in range(0, num_microbatches, all_rows):
        numbers = range(start, min(start + all_rows, num_microbatches))
        homeless = []
        for number in numbers:
            if (cell := cell_of.get(number - start)) is None:
                homeless.append(number)
            else:
                dealt[cell].append(number)
        for number in homeless:
            counts = list(map(len, dealt))
            fewest = min(counts)
            cell = counts.index(fewest, turn) if fewest in counts[turn:] else counts.index(fewest)
            dealt[cell].append(number)
            turn = cell + 1
    return whole_micro_batches([sorted(numbers) for numbers in dealt], size, made)


def reshape(num_microbatches: int, size: int, cells: int, rows: int) -> StageItems:
    """Every cell has an item in every micro-step: larger micro-batches, as many as before.

    The ``rows * size`` samples of a micro-step are cut into ``cells`` consecutive ranges. Sizes differ by at most one
    sample; which cells have the larger ones rotates with the micro-step, so that no cell is always the slow one.

    Items are numbered ``m * cells + cell``.

    Raises:
        NoFeasiblePlan: A micro-step has fewer samples than cells.
    """
    if num_microbatches % rows:
        raise BadUsage(f"{num_microbatches} micro-batches do not divide by {rows} rows")
    width = rows * size
    if width < cells:
        raise NoFeasiblePlan(f"{width} samples of a micro-step cannot feed {cells} cells")
    small, larger = divmod(width, cells)
    dealt: list[list[Item]] = [[] for _ in range(cells)]
    for step in range(num_microbatches // rows):
        start = step * width
        # The larger ones begin where those of the step before ended.
        first = step * larger
        for cell in range(cells):
            stop = start + small + (1 if (cell - first) % cells < larger else 0)
            dealt[cell].append(Item(step * cells + cell, ((start, stop),)))
            start = stop
    return tuple(map(tuple, dealt))


def cut(num_samples: int, sizes: Sequence[Sequence[int]]) -> StageItems:
    """Items of any sizes, dealt round: the first of every cell, then the second of every cell, and so on.

    Args:
        num_samples: Of the global batch.
        sizes: Per cell, of its items in order; cells may have different numbers of items.

    Raises:
        BadUsage: The sizes do not sum to the batch, or one is below 1.
    """
    total = sum(sum(cell) for cell in sizes)
    if total != num_samples or any(size < 1 for cell in sizes for size in cell):
        raise BadUsage(f"items of {[list(cell) for cell in sizes]} samples do not make up a batch of {num_samples}")
    dealt: list[list[Item]] = [[] for _ in sizes]
    start = number = 0
    for turn in range(max(map(len, sizes), default=0)):
        for cell, own in enumerate(sizes):
            if turn < len(own):
                dealt[cell].append(Item(number, ((start, start + own[turn]),)))
                start += own[turn]
                number += 1
    return tuple(map(tuple, dealt))


def count_samples(items: CellItems) -> int:
    """Of one cell in a step."""
    return sum(item.samples for item in items)


def _check_fed(num_microbatches: int, cells: int) -> None:
    if num_microbatches < cells:
        raise NoFeasiblePlan(f"{num_microbatches} micro-batches cannot feed {cells} cells")
