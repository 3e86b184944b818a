"""Which cell sends which samples to which cell of the next stage, and which action waits for which.

Routing follows from the items alone: a sample goes from the item that holds it on one stage to the item that holds it
on the next one, whichever cells these are on. Its gradient goes the same way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from megatron_elas.schedule.actions import Item, StageItems
from megatron_elas.spec.errors import BadUsage


class Slice(NamedTuple):
    """A range of samples that one item passes on to one item of the next stage."""

    start: int
    stop: int
    sender: int
    """Cell of the earlier stage."""
    sent_item: int
    """Number of its item."""
    receiver: int
    """Cell of the later stage."""
    received_item: int

    @property
    def samples(self) -> int:
        """How many."""
        return self.stop - self.start


def route(senders: StageItems, receivers: StageItems) -> tuple[Slice, ...]:
    """What crosses the boundary between two stages, ascending by sample.

    Raises:
        BadUsage: A sample is on one of the stages only, or twice on one.
    """
    sent, received = _spread(senders), _spread(receivers)
    if sent[-1][1] != received[-1][1]:
        raise BadUsage(f"one stage holds {sent[-1][1]} samples and the other {received[-1][1]}: both hold the batch")
    slices = []
    i = j = at = 0
    while i < len(sent):
        _, stop, cell, number = sent[i]
        _, other_stop, other_cell, other_number = received[j]
        end = min(stop, other_stop)
        slices.append(Slice(at, end, cell, number, other_cell, other_number))
        at = end
        i += end == stop
        j += end == other_stop
    return tuple(slices)


def route_all(items: Sequence[StageItems]) -> tuple[tuple[Slice, ...], ...]:
    """``route`` for every boundary; the first is that between stages 0 and 1. Raises BadUsage."""
    boundaries = []
    for stage, (senders, receivers) in enumerate(pairwise(items)):
        try:
            boundaries.append(route(senders, receivers))
        except BadUsage as error:
            raise BadUsage(f"between stages {stage} and {stage + 1}: {error}") from error
    return tuple(boundaries)


def _spread(items: StageItems) -> list[tuple[int, int, int, int]]:
    """(start, stop, cell, number) of every range of a stage, ascending by sample. Raises BadUsage."""
    ranges = sorted(
        (start, stop, cell, item.number)
        for cell, own in enumerate(items)
        for item in own
        for start, stop in item.ranges
    )
    at = 0
    for start, stop, _, number in ranges:
        if start != at or stop <= start:
            what = "twice" if start < at else "on no item"
            raise BadUsage(f"sample {min(start, at)} is {what} (next: item {number} with {start} to {stop})")
        at = stop
    if not ranges:
        raise BadUsage("a stage holds no samples")
    return ranges


class Flow:
    """The items of all cells as numbers ``0, 1, ...``, with what each waits for: made once, used by many timings.

    Cells are numbered stage by stage, items cell by cell; lists are indexed by these numbers.
    """

    def __init__(self, items: Sequence[StageItems]) -> None:
        self.stages: tuple[StageItems, ...] = tuple(items)
        self.stage_of_cell: list[int] = []
        self.first_cell: list[int] = []
        """Of every stage."""
        self.items: list[Item] = []
        self.cell_of: list[int] = []
        self.samples: list[int] = []
        self.own: list[range] = []
        """Of every cell: its items."""
        self.index: list[dict[int, int]] = []
        """Of every stage: item's number -> index."""
        for stage, cells in enumerate(items):
            self.first_cell.append(len(self.stage_of_cell))
            index: dict[int, int] = {}
            for own in cells:
                begin = len(self.items)
                for item in own:
                    if item.number in index:
                        raise BadUsage(f"stage {stage} has two items of number {item.number}")
                    index[item.number] = len(self.items)
                    self.cell_of.append(len(self.stage_of_cell))
                    self.items.append(item)
                    self.samples.append(item.samples)
                self.own.append(range(begin, len(self.items)))
                self.stage_of_cell.append(stage)
            self.index.append(index)
        self.before: list[list[tuple[int, int]]] = [[] for _ in self.items]
        """Of every item: (item of the earlier stage, samples) that it receives activations from."""
        self.after: list[list[tuple[int, int]]] = [[] for _ in self.items]
        """Of every item: (item of the later stage, samples) that it receives gradients from."""
        for stage, slices in enumerate(route_all(items)):
            upper, lower = self.index[stage], self.index[stage + 1]
            for start, stop, _, sent, _, received in slices:
                i, j = upper[sent], lower[received]
                self.before[j].append((i, stop - start))
                self.after[i].append((j, stop - start))

    @property
    def num_cells(self) -> int:
        """Of all stages."""
        return len(self.stage_of_cell)

    def find(self, cell: int) -> tuple[int, int]:
        """(stage, cell of the stage)."""
        stage = self.stage_of_cell[cell]
        return stage, cell - self.first_cell[stage]
