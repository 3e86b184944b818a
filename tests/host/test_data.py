"""Samples follow the plan, and any step can be read again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_elas.host.data import SeekableLoader, sample_ids
from megatron_elas.spec.items import Item, micro_batch


class Cell:
    """What is run here; changes with the plan."""

    def __init__(self, *numbers: int) -> None:
        self.run(*numbers)

    def run(self, *numbers: int) -> None:
        """From now on these micro-batches of two samples."""
        self.items = tuple(micro_batch(number, 2) for number in numbers)


def make_loader(cell: Cell, *, workers: int = 0, size: int = 64, consumed: int = 0) -> tuple[SeekableLoader, list[int]]:
    """A loader over the numbers 0 to ``size`` - 1 in micro-batches of 2 and batches of 8; what it handed out."""
    seen: list[int] = []

    def make(batch_sampler: Any) -> Any:
        return torch.utils.data.DataLoader(range(size), batch_sampler=batch_sampler, num_workers=workers)  # type: ignore[arg-type]

    loader = SeekableLoader(
        dataset=range(size),
        batch_size=8,
        consumed=consumed,
        items=lambda: cell.items,
        make_loader=make,
        observe=lambda samples, _: seen.extend(samples),
    )
    return loader, seen


def take(loader: SeekableLoader, count: int) -> list[int]:
    return [int(sample) for _ in range(count) for sample in next(loader)]


def test_ids_are_those_of_megatrons_sampler() -> None:
    # Row d of D = 2, micro-step m: consumed + (m * D + d) * b.
    assert [sample_ids(16, micro_batch(m * 2 + 1, 3)) for m in range(2)] == [(19, 20, 21), (25, 26, 27)]


def test_an_item_may_be_any_samples_of_the_batch() -> None:
    cell = Cell()
    cell.items = (Item(0, ((1, 4),)), Item(1, ((6, 7),)))
    loader, seen = make_loader(cell)
    assert [batch.tolist() for batch in (next(loader) for _ in range(4))] == [[1, 2, 3], [6], [9, 10, 11], [14]]
    assert seen == [1, 2, 3, 6, 9, 10, 11, 14]


def test_tokens_are_counted_in_the_samples_themselves() -> None:
    dataset = [{"loss_mask": torch.tensor([1.0] * sample + [0.0] * (9 - sample))} for sample in range(8)]
    loader = SeekableLoader(
        dataset=dataset, batch_size=4, consumed=0, items=lambda: (), make_loader=lambda sampler: iter(())
    )
    assert loader.count_tokens(4, micro_batch(1, 2)) == 6 + 7
    tokens = SeekableLoader(
        dataset=[{"tokens": torch.zeros(5)}] * 4, batch_size=4, consumed=0, items=lambda: (), make_loader=iter
    )
    assert tokens.count_tokens(0, micro_batch(1, 2)) == 10


def test_a_cell_reads_its_micro_batches_of_every_step_in_turn() -> None:
    loader, seen = make_loader(Cell(1, 3))
    assert take(loader, 4) == seen == [2, 3, 6, 7, 10, 11, 14, 15]


def test_a_step_can_be_read_again_from_its_start() -> None:
    loader, _ = make_loader(Cell(0, 2))
    take(loader, 3)
    loader.seek(8)
    assert take(loader, 2) == [8, 9, 12, 13]


@pytest.mark.parametrize("workers", [0, 2])
def test_after_a_change_of_plan_a_seek_reads_for_the_new_plan_also_past_what_was_prefetched(workers: int) -> None:
    cell = Cell(0, 2)
    loader, _ = make_loader(cell, workers=workers)
    take(loader, 3)
    cell.run(0, 1, 3)
    loader.seek(8)
    assert take(loader, 6) == [8, 9, 10, 11, 14, 15, 16, 17, 18, 19, 22, 23]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_is_not_whole_is_not_begun(workers: int) -> None:
    loader, _ = make_loader(Cell(0, 2), workers=workers, size=21)
    assert take(loader, 4) == [0, 1, 4, 5, 8, 9, 12, 13]
    with pytest.raises(StopIteration):
        next(loader)
