"""All workers know a step's losses, and how many of them vote as they do."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_elas.host import updates
from megatron_elas.host.updates import POLLS, tell_losses

Told = tuple[dict[str, torch.Tensor], tuple[int, int]]


def tell_all(monkeypatch: pytest.MonkeyPatch, ballots: Sequence[tuple[int, int]]) -> list[Told]:
    """One worker for each ballot; the last one has the losses."""
    together, boards = threading.Barrier(len(ballots), timeout=20), []

    def all_reduce(board: torch.Tensor) -> None:
        boards.append(board.clone())
        together.wait()
        board.copy_(sum(boards))
        together.wait()

    monkeypatch.setattr(updates.dist, "all_reduce", all_reduce)
    losses = {"lm loss": torch.tensor(2.5)}
    with ThreadPoolExecutor(len(ballots)) as pool:
        last = len(ballots) - 1
        told = [pool.submit(tell_losses, losses, worker == last, ballot) for worker, ballot in enumerate(ballots)]
        return [each.result() for each in told]


def test_who_votes_for_one_epoch_hears_how_many_do(monkeypatch: pytest.MonkeyPatch) -> None:
    told = tell_all(monkeypatch, [(7, 7), (7, 0), (7, 7)])
    assert [votes[0] for _, votes in told] == [3, 3, 3]
    assert [votes[1] for _, votes in told] == [2, 0, 2]
    assert [losses for losses, _ in told] == [{"lm loss": torch.tensor(2.5)}] * 3


@pytest.mark.parametrize("ballots", [(1, 2, 0), (2, 1, 3), (POLLS - 1, POLLS, POLLS + 1), (POLLS, 0, POLLS)])
def test_votes_for_different_epochs_never_look_like_all_votes(
    monkeypatch: pytest.MonkeyPatch, ballots: tuple[int, int, int]
) -> None:
    told = tell_all(monkeypatch, [(epoch, epoch) for epoch in ballots])
    expected = [ballots.count(epoch) for epoch in ballots]
    for (_, votes), epoch, count in zip(told, ballots, expected, strict=True):
        assert votes == (count, count) if epoch else max(votes) < len(ballots)
