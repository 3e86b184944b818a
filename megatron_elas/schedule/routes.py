"""Which cell sends which samples to which cell of the next stage, and which action waits for which.

Routing follows from the items alone: a sample goes from the item that holds it on one stage to the item that holds it
on the next one, whichever cells these are on. Its gradient goes the same way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.items import Item, StageItems


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


Range = tuple[int, int, int]
"""Start, stop, and which of a stage's items it belongs to."""


def route(senders: StageItems, receivers: StageItems) -> tuple[Slice, ...]:
    """What crosses the boundary between two stages, ascending by sample.

    Raises:
        BadUsage: A sample is on one of the stages only, or twice on one.
    """
    (sent_ranges, sent), (received_ranges, received) = _spread(senders), _spread(receivers)
    return tuple(
        Slice(start, stop, *sent[i], *received[j]) for start, stop, i, j in sweep(sent_ranges, received_ranges)
    )


def route_all(items: Sequence[StageItems]) -> tuple[tuple[Slice, ...], ...]:
    """``route`` for every boundary; the first is that between stages 0 and 1. Raises BadUsage."""
    boundaries = []
    for stage, (senders, receivers) in enumerate(pairwise(items)):
        try:
            boundaries.append(route(senders, receivers))
        except BadUsage as error:
            raise BadUsage(f"between stages {stage} and {stage + 1}: {error}") from error
    return tuple(boundaries)


def _spread(items: StageItems) -> tuple[list[Range], list[tuple[int, int]]]:
    """A stage's ranges, and the (cell, number) of its items."""
    places = [(cell, item.number) for cell, own in enumerate(items) for item in own]
    return ranges_of([item for own in items for item in own]), places


def ranges_of(items: Sequence[Item]) -> list[Range]:
    """All ranges of a stage's items, ascending. Raises BadUsage unless they are the batch, once."""
    ranges = sorted((start, stop, i) for i, item in enumerate(items) for start, stop in item.ranges)
    at = 0
    for start, stop, i in ranges:
        if start != at or stop <= start:
            what = "twice" if start < at else "on no item"
            raise BadUsage(f"sample {min(start, at)} is {what} (next: item {items[i].number} with {start} to {stop})")
        at = stop
    if not ranges:
        raise BadUsage("a stage holds no samples")
    return ranges


def sweep(sent: list[Range], received: list[Range]) -> list[tuple[int, int, int, int]]:
    """(start, stop, sender's item, receiver's item) of all that crosses. Raises BadUsage."""
    if sent[-1][1] != received[-1][1]:
        raise BadUsage(f"one stage holds {sent[-1][1]} samples and the other {received[-1][1]}: both hold the batch")
    crossing = []
    j = at = 0
    _, other_stop, other = received[0]
    for _, stop, item in sent:
        while at < stop:
            end = stop if stop < other_stop else other_stop
            crossing.append((at, end, item, other))
            at = end
            if at == other_stop and j + 1 < len(received):
                j += 1
                _, other_stop, other = received[j]
    return crossing


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
        self.kinds: list[tuple[int, int]] = []
        """(cell, samples): items of one kind take as long as each other."""
        self.kind_of: list[int] = []
        """Of every item."""
        self.ways: list[tuple[int, int]] = []
        """(boundary, samples): transfers over one way take as long as each other."""
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
        """Of every item: (item of the earlier stage, way) that it receives activations from."""
        self.after: list[list[tuple[int, int]]] = [[] for _ in self.items]
        """Of every item: (item of the later stage, way) that it receives gradients from."""
        starts = [self.own[first].start for first in self.first_cell]
        kinds: dict[tuple[int, int], int] = {}
        self.kind_of = [kinds.setdefault(key, len(kinds)) for key in zip(self.cell_of, self.samples, strict=True)]
        self.kinds = list(kinds)
        ways: dict[tuple[int, int], int] = {}
        ranges: list[list[Range]] = []
        for stage, (start, stop) in enumerate(pairwise([*starts, len(self.items)])):
            try:
                if stage and items[stage] is items[stage - 1]:  # as nearly all stages are
                    ranges.append(ranges[-1])
                    crossing = [(begin, end, i, i) for begin, end, i in ranges[-1]]
                else:
                    ranges.append(ranges_of(self.items[start:stop]))
                    crossing = sweep(*ranges[-2:]) if stage else []
            except BadUsage as error:
                raise BadUsage(f"stage {stage}: {error}") from error
            for begin, end, i, j in crossing:
                i, j = starts[stage - 1] + i, start + j
                way = ways.setdefault((stage - 1, end - begin), len(ways))
                self.before[j].append((i, way))
                self.after[i].append((j, way))
        self.ways = list(ways)

    @property
    def num_cells(self) -> int:
        """Of all stages."""
        return len(self.stage_of_cell)

    def find(self, cell: int) -> tuple[int, int]:
        """(stage, cell of the stage)."""
        stage = self.stage_of_cell[cell]
        return stage, cell - self.first_cell[stage]
