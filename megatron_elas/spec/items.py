"""What a cell runs in one pass: the unit of the dataflow axis, in plans and in schedules."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import NamedTuple


class Item(NamedTuple):
    """What a cell runs in one pass: one or more (parts of) micro-batches."""

    number: int
    """Unique within the stage. Of a whole micro-batch: its logical number ``g = m * D + d``."""
    ranges: tuple[tuple[int, int], ...]
    """Samples of the global batch, as ascending ranges ``[start, stop)`` that do not touch."""

    @property
    def samples(self) -> int:
        """How many."""
        if len(self.ranges) == 1:  # Nearly always, and asked for often.
            start, stop = self.ranges[0]
            return stop - start
        return sum(stop - start for start, stop in self.ranges)

    def parts(self, size: int) -> tuple[tuple[int, int, int], ...]:
        """(micro-batch, start, stop) of what the item has of every logical micro-batch of ``size`` samples, ascending.

        Start and stop count the item's own samples, so they follow one another from 0 to ``samples``.
        """
        found: list[tuple[int, int, int]] = []
        done = 0
        for start, stop in self.ranges:
            while start < stop:
                number = start // size
                end = min(stop, (number + 1) * size)
                if found and found[-1][0] == number:
                    found[-1] = (number, found[-1][1], done + end - start)
                else:
                    found.append((number, done, done + end - start))
                done += end - start
                start = end
        return tuple(found)

    def is_whole(self, size: int) -> bool:
        """Whether the item is one whole logical micro-batch."""
        (start, stop), *more = self.ranges
        return not more and stop - start == size and start % size == 0


CellItems = tuple[Item, ...]
StageItems = tuple[CellItems, ...]


def are_whole(stages: Sequence[StageItems], size: int) -> bool:
    """Whether all items are whole logical micro-batches. Stages that share one object are looked at once."""
    distinct = {id(cells): cells for cells in stages}.values()
    return all(item.is_whole(size) for cells in distinct for own in cells for item in own)


def micro_batch(number: int, size: int) -> Item:
    """A whole micro-batch as an item."""
    return Item(number, ((number * size, (number + 1) * size),))


def whole_micro_batches(
    items: Sequence[Sequence[int]], size: int, made: MutableMapping[int, Item] | None = None
) -> StageItems:
    """Items of a stage from micro-batch numbers per cell.

    Args:
        items: Numbers of every cell.
        size: Samples of a micro-batch.
        made: Micro-batches of this size that there are already, by number; others are added.
    """
    made = {} if made is None else made
    for numbers in items:
        for number in numbers:
            if number not in made:
                made[number] = micro_batch(number, size)
    return tuple([tuple([made[number] for number in numbers]) for numbers in items])
