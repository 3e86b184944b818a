"""A data loader that follows the plan and can go back to the start of any step.

Sample ids are logical: micro-batch ``g`` of the step that begins after ``consumed`` samples is samples
``consumed + g * b`` to ``consumed + (g + 1) * b - 1``, as in Megatron's own sampler, whoever reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def sample_ids(consumed: int, item: int, micro_batch_size: int) -> tuple[int, ...]:
    """Samples of one micro-batch of a step.

    Args:
        consumed: Samples of all earlier steps.
        item: Logical micro-batch number.
        micro_batch_size: Samples per micro-batch.

    Example: 16 consumed, item 3, size 2 gives (22, 23).
    """
    first = consumed + item * micro_batch_size
    return tuple(range(first, first + micro_batch_size))


class _PlanSampler(torch.utils.data.Sampler[list[int]]):
    """Lists of sample ids for this cell, from one position on, as long as there are whole batches."""

    def __init__(
        self, items: Callable[[], tuple[int, ...]], consumed: int, batch_size: int, size: int, num_samples: int
    ) -> None:
        self._items = items
        self._consumed = consumed
        self._batch_size = batch_size
        self._micro_batch_size = size
        self._num_samples = num_samples

    def __iter__(self) -> Iterator[list[int]]:
        consumed = self._consumed
        while consumed + self._batch_size <= self._num_samples:
            for item in self._items():
                yield list(sample_ids(consumed, item, self._micro_batch_size))
            consumed += self._batch_size


class SeekableLoader:
    """Iterator over this cell's micro-batches; stands where Megatron expects an iterable data loader.

    Args:
        dataset: Map-style dataset.
        micro_batch_size: Samples per micro-batch.
        batch_size: Samples per global batch.
        consumed: Samples of all steps before the first.
        items: Gives this cell's micro-batches of a step of this loader, in order.
        make_loader: Makes a torch data loader from a batch sampler (workers, pinning and collation as Megatron set).
        observe: Called for every micro-batch handed out, when given.
    """

    def __init__(
        self,
        *,
        dataset: Any,
        micro_batch_size: int,
        batch_size: int,
        consumed: int,
        items: Callable[[], tuple[int, ...]],
        make_loader: Callable[[Any], Any],
        observe: Callable[[tuple[int, ...]], None] | None = None,
    ) -> None:
        self._num_samples = len(dataset)
        self._micro_batch_size = micro_batch_size
        self._items = items
        self._batch_size = batch_size
        self._make_loader = make_loader
        self._observe = observe
        self.mark = consumed
        """Where the next evaluation begins; moved on by whoever completes one."""
        self.seek(consumed)

    def seek(self, consumed: int) -> None:
        """Hand out next the first micro-batch of the step that begins after ``consumed`` samples.

        Anything fetched ahead is dropped, as is the place of the plan that it was fetched for.
        """
        self._consumed = consumed
        self._position = 0
        self._stream: Iterator[Any] | None = None

    def __iter__(self) -> SeekableLoader:
        return self

    def __next__(self) -> Any:
        items = self._items()
        if self._position == len(items):
            self._consumed += self._batch_size
            self._position = 0
        ids = sample_ids(self._consumed, items[self._position], self._micro_batch_size)
        if self._stream is None:
            sampler = _PlanSampler(
                self._items, self._consumed, self._batch_size, self._micro_batch_size, self._num_samples
            )
            self._stream = iter(self._make_loader(sampler))
            for _ in range(self._position):
                next(self._stream)
        batch = next(self._stream)
        self._position += 1
        if self._observe is not None:
            self._observe(ids)
        return batch
