"""How a stage's samples are dealt to its cells, and what that means for the busiest of them.

* ``reroute``: whole micro-batches move to other cells; their size stays.
* ``reshape``: every cell has an item in every micro-step; sizes change, the number of items stays.
* ``mix``: as many whole micro-batches for every cell as there are for all, and what remains cut into equal parts.

A stage with all its cells keeps the stock deal whatever is chosen.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Literal, NamedTuple

from megatron_elas.schedule.items import cut, deal_round, reroute, reshape
from megatron_elas.spec.items import Item, StageItems
from megatron_elas.spec.job import JobSpec

Deal = Literal["reroute", "reshape", "mix"]
DEALS: tuple[Deal, ...] = ("reroute", "reshape", "mix")


class Share(NamedTuple):
    """What the busiest cell of a stage has in a step."""

    samples: int
    items: int
    largest_item: int
    """In samples."""


def deal_items(
    job: JobSpec, rows: Sequence[int], deal: Deal, made: MutableMapping[int, Item] | None = None
) -> StageItems:
    """Items of a stage.

    Args:
        job: Its batch and its rows.
        rows: Of the stage's cells, all different; those that the job did not begin with have no micro-batches of their
            own.
        deal: How.
        made: See ``whole_micro_batches``.

    Raises:
        NoFeasiblePlan: Fewer samples or micro-batches than cells.
    """
    count, size, all_rows = job.num_microbatches, job.micro_batch_size, job.data_parallel
    if is_stock(job, rows):
        return deal_round(count, size, all_rows, made)
    if deal == "reshape":
        return reshape(count, size, len(rows), all_rows)
    if deal == "mix":
        return cut(count * size, _mixed_sizes(job, len(rows)))
    if len(rows) < all_rows:
        return reroute(count, size, rows, all_rows, made)
    return deal_round(count, size, len(rows), made)


class Dealt:
    """What stages of a job were dealt, to be shared by others."""

    def __init__(self) -> None:
        self.items: dict[tuple[object, ...], StageItems] = {}
        """By all that they follow from."""
        self.micro_batches: dict[int, dict[int, Item]] = {}
        """By samples of each, and number."""


def deal_stages(
    job: JobSpec, rows: Sequence[Sequence[int]], deals: Sequence[Deal], known: Dealt | None = None
) -> tuple[StageItems, ...]:
    """``deal_items`` of every stage. Stages that are dealt alike share one object, whatever the size of the job.

    Args:
        job: See ``deal_items``.
        rows: Of every stage.
        deals: Of every stage.
        known: What was dealt before, and is added to.
    """
    known = known or Dealt()
    made = known.micro_batches.setdefault(job.micro_batch_size, {})
    batch = job.num_microbatches, job.micro_batch_size, job.data_parallel
    items = []
    for own, deal in zip(rows, deals, strict=True):
        of_rows = deal == "reroute" and len(own) < job.data_parallel
        what = None if is_stock(job, own) else (deal, len(own), tuple(own) if of_rows else ())
        if (batch, what) not in known.items:
            known.items[batch, what] = deal_items(job, own, deal, made)
        items.append(known.items[batch, what])
    return tuple(items)


def is_stock(job: JobSpec, rows: Sequence[int]) -> bool:
    """Whether a stage has as many cells as at the job's begin."""
    return len(rows) == job.data_parallel


def is_possible(job: JobSpec, cells: int, deal: Deal) -> bool:
    """Whether there is something for every cell."""
    if deal == "reshape":
        return cells <= job.data_parallel * job.micro_batch_size
    return cells <= job.num_microbatches


def busiest_share(job: JobSpec, cells: int, deal: Deal) -> Share:
    """What the busiest cell has: as in ``deal_items``, without making items."""
    count, size, rows = job.num_microbatches, job.micro_batch_size, job.data_parallel
    if cells == rows or deal == "reroute":
        items = -(-count // cells)
        return Share(items * size, items, size)
    if deal == "reshape":
        steps = count // rows
        small, larger = divmod(rows * size, cells)
        return Share(steps * small + -(-steps * larger // cells), steps, small + (larger > 0))
    sizes = _mixed_sizes(job, cells)
    most = max(sizes, key=sum)
    return Share(sum(most), len(most), max(most))


def _mixed_sizes(job: JobSpec, cells: int) -> list[list[int]]:
    whole, left = divmod(job.num_microbatches, cells)
    size = job.micro_batch_size
    small, larger = divmod(left * size, cells)
    sizes = []
    for cell in range(cells):
        part = small + (cell < larger)
        sizes.append([size] * whole + ([part] if part else []))
    return sizes
