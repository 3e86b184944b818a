"""Samples follow the plan, and any step can be read again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_elas.host.data import SeekableLoader, sample_ids


class Cell:
    """Which micro-batches are run here; changes with the plan."""

    def __init__(self, *items: int) -> None:
        self.items = items


def make_loader(cell: Cell, *, workers: int = 0, size: int = 64, consumed: int = 0) -> tuple[SeekableLoader, list[int]]:
    """A loader over the numbers 0 to ``size`` - 1 in micro-batches of 2 and batches of 8; what it handed out."""
    seen: list[int] = []

    def make(batch_sampler: Any) -> Any:
        return torch.utils.data.DataLoader(range(size), batch_sampler=batch_sampler, num_workers=workers)  # type: ignore[arg-type]

    loader = SeekableLoader(
        dataset=range(size),
        micro_batch_size=2,
        batch_size=8,
        consumed=consumed,
        items=lambda: cell.items,
        make_loader=make,
        observe=seen.extend,
    )
    return loader, seen


def take(loader: SeekableLoader, count: int) -> list[int]:
    return [int(sample) for _ in range(count) for sample in next(loader)]


def test_ids_are_those_of_megatrons_sampler() -> None:
    # Row d of D = 2, micro-step m: consumed + (m * D + d) * b.
    assert [sample_ids(16, m * 2 + 1, 3) for m in range(2)] == [(19, 20, 21), (25, 26, 27)]


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
    cell.items = (0, 1, 3)
    loader.seek(8)
    assert take(loader, 6) == [8, 9, 10, 11, 14, 15, 16, 17, 18, 19, 22, 23]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_is_not_whole_is_not_begun(workers: int) -> None:
    loader, _ = make_loader(Cell(0, 2), workers=workers, size=21)
    assert take(loader, 4) == [0, 1, 4, 5, 8, 9, 12, 13]
    with pytest.raises(StopIteration):
        next(loader)
