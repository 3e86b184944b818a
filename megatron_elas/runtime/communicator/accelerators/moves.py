"""Single sends and receives, as inner groups take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import Work


class Move(NamedTuple):
    """One tensor to or from a peer."""

    direction: str
    """``"send"`` or ``"recv"``."""
    tensors: list[Tensor]
    rank: int
    """The peer's in the inner group."""
    tag: int


def transfer_as_one(inner: Any, moves: Sequence[Move]) -> Work | None:
    """Start moves as one with ``c10d.Backend``'s coalescing."""
    if len(moves) == 1:
        return _start(inner, moves[0])
    inner._start_coalescing()
    for move in moves:
        _start(inner, move)
    work: Work | None = inner._end_coalescing()
    return work


def _start(inner: Any, move: Move) -> Work | None:
    work: Work | None = getattr(inner, move.direction)(move.tensors, move.rank, move.tag)
    return work
