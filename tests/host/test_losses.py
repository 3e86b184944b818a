"""Losses are put together by micro-batch, so that whoever runs which, their sum is the same to the last bit."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_elas.host import losses as module
from megatron_elas.host.losses import Losses, gather_losses, sum_losses, told_once
from megatron_elas.spec.items import micro_batch

MICRO_BATCHES = 11


def made() -> Losses:
    """Of every micro-batch: sums of very different sizes, so that another order would round differently."""
    draw = torch.Generator().manual_seed(5)
    sums = torch.randn(MICRO_BATCHES, generator=draw) * torch.exp(4 * torch.randn(MICRO_BATCHES, generator=draw))
    return [
        {"lm loss": torch.stack([value, torch.tensor(7.0)]), "mean": value.view(1) / 3, "scalar": value / 7}
        for value in sums
    ]


def gather(monkeypatch: pytest.MonkeyPatch, dealt: Sequence[Sequence[int]]) -> list[Losses]:
    """What every cell has, when they run these micro-batches."""
    together, boards = threading.Barrier(len(dealt), timeout=60), []
    everything = made()

    def all_reduce(board: torch.Tensor, group: object) -> None:
        assert group == "cells"
        boards.append(board.clone())
        together.wait()
        board.copy_(sum(boards))
        together.wait()

    monkeypatch.setattr(module.dist, "all_reduce", all_reduce)

    def run(numbers: Sequence[int]) -> Losses:
        items = tuple(micro_batch(number, 2) for number in numbers)
        return gather_losses([everything[number] for number in numbers], items, MICRO_BATCHES, "cells")

    with ThreadPoolExecutor(len(dealt)) as pool:
        return list(pool.map(run, dealt))


DEALS = [
    [list(range(MICRO_BATCHES))],
    [list(reversed(range(MICRO_BATCHES)))],
    [list(range(cell, MICRO_BATCHES, 4)) for cell in range(4)],
    [[10], [0, 3, 1, 2, 9, 8, 7], [4, 5, 6]],
]


@pytest.mark.parametrize("dealt", DEALS)
def test_all_cells_have_all_losses_to_the_bit_in_order(dealt: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    for cell in gather(monkeypatch, dealt):
        for got, want in zip(cell, made(), strict=True):
            assert list(got) == list(want)
            for key, value in want.items():
                assert torch.equal(got[key].view(-1), value.view(-1)) and got[key].dtype == value.dtype


@pytest.mark.parametrize("dealt", DEALS)
def test_sums_and_what_megatron_adds_up_are_the_same_bits(
    dealt: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    want = sum_losses(made())
    cells = gather(monkeypatch, dealt)
    told = [told_once(cell, rank) for rank, cell in enumerate(cells)]
    total = torch.zeros(2)
    for cell in reversed(told):  # as its train_step and evaluate do, with an all-reduce
        total += torch.vstack([entry["lm loss"] for entry in cell]).sum(dim=0)
    assert torch.equal(total[0] / total[1], want["lm loss"])
    for cell, own in zip(cells, told, strict=True):
        assert sum_losses(cell) == want
        assert torch.equal(torch.cat([entry["mean"] for entry in own]).mean(), want["mean"])


def test_other_orders_round_differently() -> None:
    """So the tests above would see what they are for."""
    assert any(
        sum_losses([made()[number] for number in torch.randperm(MICRO_BATCHES).tolist()])["lm loss"]
        != sum_losses(made())["lm loss"]
        for _ in range(50)
    )


def test_no_losses_make_no_sum() -> None:
    assert sum_losses([]) == {}
