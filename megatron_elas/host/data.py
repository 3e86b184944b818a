"""A data loader that follows the plan and can go back to the start of any step.

Sample ids are logical: sample ``i`` of the batch of a step that begins after ``consumed`` samples is ``consumed + i``,
and micro-batch ``g`` begins at sample ``g * b``, as in Megatron's own sampler, whoever reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_elas.spec.items import CellItems, Item


def sample_ids(consumed: int, item: Item) -> tuple[int, ...]:
    """Samples of one item of a step.

    Args:
        consumed: Samples of all earlier steps.
        item: Of the step's batch.

    Example: 16 consumed, an item of samples [6, 8) gives (22, 23).
    """
    return tuple(consumed + sample for start, stop in item.ranges for sample in range(start, stop))


class _PlanSampler(torch.utils.data.Sampler[list[int]]):
    """Lists of sample ids for this cell, from one position on, as long as there are whole batches."""

    def __init__(self, items: Callable[[], CellItems], consumed: int, batch_size: int, num_samples: int) -> None:
        self._items = items
        self._consumed = consumed
        self._batch_size = batch_size
        self._num_samples = num_samples

    def __iter__(self) -> Iterator[list[int]]:
        consumed = self._consumed
        while consumed + self._batch_size <= self._num_samples:
            for item in self._items():
                yield list(sample_ids(consumed, item))
            consumed += self._batch_size


class SeekableLoader:
    """Iterator over this cell's items; stands where Megatron expects an iterable data loader.

    Args:
        dataset: Map-style dataset.
        batch_size: Samples per global batch.
        consumed: Samples of all steps before the first.
        items: Gives this cell's items of a step of this loader, in order.
        make_loader: Makes a torch data loader from a batch sampler (workers, pinning and collation as Megatron set).
        observe: Called with the samples of every item handed out, and what was read, when given.
    """

    def __init__(
        self,
        *,
        dataset: Any,
        batch_size: int,
        consumed: int,
        items: Callable[[], CellItems],
        make_loader: Callable[[Any], Any],
        observe: Callable[[tuple[int, ...], Any], None] | None = None,
    ) -> None:
        self._dataset = dataset
        self._num_samples = len(dataset)
        self._items = items
        self._batch_size = batch_size
        self._make_loader = make_loader
        self._observe = observe
        self.mark = consumed
        """Where the next evaluation begins; moved on by whoever completes one."""
        self.seek(consumed)

    def seek(self, consumed: int) -> None:
        """Hand out next the first item of the step that begins after ``consumed`` samples.

        Anything fetched ahead is dropped, as is the place of the plan that it was fetched for.
        """
        self._consumed = consumed
        self._position = 0
        self._stream: Iterator[Any] | None = None

    def count_tokens(self, consumed: int, item: Item) -> int:
        """Tokens that count in the loss of an item of the step after ``consumed`` samples, whoever runs it.

        Of a data set that keeps no loss masks every token counts.
        """
        total = 0
        for sample in sample_ids(consumed, item):
            content = self._dataset[sample]
            mask = content.get("loss_mask")
            total += int(mask.sum()) if mask is not None else content["tokens"].numel()
        return total

    def __iter__(self) -> SeekableLoader:
        return self

    def __next__(self) -> Any:
        items = self._items()
        if self._position == len(items):
            self._consumed += self._batch_size
            self._position = 0
        ids = sample_ids(self._consumed, items[self._position])
        if self._stream is None:
            sampler = _PlanSampler(self._items, self._consumed, self._batch_size, self._num_samples)
            self._stream = iter(self._make_loader(sampler))
            for _ in range(self._position):
                next(self._stream)
        batch = next(self._stream)
        self._position += 1
        if self._observe is not None:
            self._observe(ids, batch)
        return batch
