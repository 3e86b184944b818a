"""All workers know a step's losses, and how many of them vote as they do."""

from __future__ import annotations

import functools
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from megatron_elas.host import updates
from megatron_elas.host.one_thread import one_thread
from megatron_elas.host.updates import POLLS, OptimizerMirror, Settings, tell_losses
from megatron_elas.spec.buckets import CUT
from megatron_elas.spec.shards import SLOTS, Piece, ShardLayout
from megatron_elas.spec.transaction import Update

Bits = dict[str, torch.Tensor]
Kind = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
Updating = Callable[[], AbstractContextManager[None]]
Told = tuple[dict[str, torch.Tensor], tuple[int, int]]


def tell_all(monkeypatch: pytest.MonkeyPatch, ballots: Sequence[tuple[int, int]]) -> list[Told]:
    """One worker for each ballot; the last one has the losses."""
    together, boards = threading.Barrier(len(ballots), timeout=60), []

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


# ------------------------------------------------------------ updates of shards that are cut in different ways


class Unlike(torch.optim.AdamW):
    """Its update has a function that torch's vectorised kernels round differently for elements left over at an end."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                param.copy_(torch.atan2(param, param.grad))


KINDS: dict[str, Kind] = {
    "adam": torch.optim.AdamW,
    "fused": functools.partial(torch.optim.AdamW, fused=True),
    "unlike": Unlike,
}
SIZES = {"a": 70_003, "b": 65_536, "c": 190, "d": 1}
"""Elements of every parameter; with several threads torch divides tensors above 32768."""


def values(seed: int, name: str) -> torch.Tensor:
    return torch.randn(SIZES[name], generator=torch.Generator().manual_seed(seed * 100 + ord(name)))


def update(pieces: Sequence[Piece], kind: Kind, updating: Updating = one_thread) -> Bits:
    """Masters and moments by slot and parameter, after some updates of mirrors that have these pieces."""
    layout = ShardLayout(pieces=tuple(pieces))
    flat = torch.zeros(layout.flat_numel)
    slots = flat[:-1].view(len(SLOTS), -1)
    for piece, offset in zip(layout.pieces, layout.offsets(), strict=True):
        for number in range(len(SLOTS)):
            held = values(number + 1, piece.name)[piece.start : piece.stop]
            slots[number, offset : offset + piece.numel] = held.square() if number == 2 else held
    flat[-1] = 4.0
    settings = Settings(groups=[{"lr": 1e-3, "weight_decay": 0.1}, {"lr": 3e-3, "weight_decay": 0.0}])
    mirror = OptimizerMirror(layout, flat, lambda name: int(name > "b"), kind, settings, 0.0, updating)
    for step in range(3):
        gradients = torch.cat([values(10 + step, piece.name)[piece.start : piece.stop] for piece in layout.pieces])
        mirror.apply(gradients, Update.of(step, None), settings)
    result = {name: torch.zeros((len(SLOTS), numel)) for name, numel in SIZES.items()}
    for piece, offset in zip(layout.pieces, layout.offsets(), strict=True):
        result[piece.name][:, piece.start : piece.stop] = slots[:, offset : offset + piece.numel]
    return result


def together(parts: Sequence[Bits]) -> Bits:
    """Every element is in one of the parts."""
    return {name: sum((part[name] for part in parts[1:]), parts[0][name]) for name in SIZES}


def cut(edges: Sequence[int]) -> list[list[Piece]]:
    """Pieces of every owner, whose ranges of every parameter begin and end at these elements."""
    owners = []
    for low, high in itertools.pairwise([0, *sorted(edges), 1 << 30]):
        spans = ((name, min(low, numel), min(high, numel)) for name, numel in SIZES.items())
        owners.append([Piece(name=name, start=start, stop=stop) for name, start, stop in spans if start < stop])
    return [pieces for pieces in owners if pieces]


@pytest.fixture(params=[1, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


WHOLE = [Piece(name=name, start=0, stop=numel) for name, numel in SIZES.items()]


def same(some: Bits, others: Bits) -> bool:
    return all(torch.equal(some[name], others[name]) for name in SIZES)


@pytest.mark.parametrize("name", list(KINDS))
def test_updates_of_shards_cut_anywhere_are_the_same_bits(name: str, threads: int) -> None:
    kind = KINDS[name]
    want = update(WHOLE, kind)
    draw = random.Random(3)
    for owners in (2, 3, 4, 5, 7, 11):
        edges = draw.sample(range(CUT, max(SIZES.values()), CUT), owners - 1)
        assert same(together([update(pieces, kind) for pieces in cut(edges)]), want), (owners, edges)


def test_a_cut_elsewhere_or_several_threads_can_give_other_bits(threads: int) -> None:
    """So the test above would see what it is for."""
    want = update(WHOLE, Unlike)
    assert not same(together([update(pieces, Unlike) for pieces in cut(range(77, 70_000, 7_000))]), want)
    assert same(update(WHOLE, Unlike, nullcontext), want) == (threads == 1)
