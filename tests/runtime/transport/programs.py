"""Programs of an all-reduce, as the communicator might build them; for tests and measurements of the transport."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch.distributed import ReduceOp

from megatron_elas.runtime.communicator.reduction import Reduction
from megatron_elas.runtime.transport.program import (
    SCRATCH,
    Copy,
    Program,
    Reduce,
    Reducer,
    Region,
    Round,
    Transfer,
    native_codes,
)


class TorchReducer:
    """A reduction of torch's, with or without the C core's help."""

    def __init__(self, operation: str, dtype: torch.dtype, *, in_core: bool = True) -> None:
        self._reduction = Reduction(getattr(ReduceOp, operation), dtype)
        self.native = native_codes(operation, str(dtype).removeprefix("torch.")) if in_core else None
        self.calls = 0

    def reduce(self, sources: Sequence[memoryview], target: memoryview) -> None:
        self.calls += 1
        if target.nbytes:
            self._reduction.reduce(sources, target)


def segments(size: int, count: int, item: int) -> list[Region]:
    """Buffer 0 in ``count`` parts of whole items."""
    bounds = [size // item * at // count * item for at in range(count + 1)]
    return [Region(0, first, last - first) for first, last in itertools.pairwise(bounds)]


def whole(me: int, count: int, size: int, reducer: Reducer) -> Program:
    """Everybody sends everything to everybody."""
    mine = Region(0, 0, size)
    others = [(me + step) % count for step in range(1, count)]
    rooms = {peer: Region(SCRATCH, at * size, size) for at, peer in enumerate(others)}
    return Program(
        (
            Round(
                tuple(Transfer(peer, mine) for peer in others),
                tuple(Transfer(peer, rooms[peer]) for peer in others),
                (Reduce(tuple(rooms.get(at, mine) for at in range(count)), mine),),
            ),
        ),
        (count - 1) * size,
        reducer,
    )


def bruck(me: int, count: int, size: int, reducer: Reducer) -> Program:
    """Everybody gets everything in log2(count) rounds, with one message each."""
    rounds = []
    have = 1  # row j holds the tensor of the member j places behind, for j < have
    while have < count:
        more = min(have, count - have)
        rounds.append(
            Round(
                (Transfer((me - have) % count, Region(SCRATCH, 0, more * size)),),
                (Transfer((me + have) % count, Region(SCRATCH, have * size, more * size)),),
            )
        )
        have += more
    rows = tuple(Region(SCRATCH, (at - me) % count * size, size) for at in range(count))
    first = Round(then=(Copy(Region(0, 0, size), Region(SCRATCH, 0, size)),))
    last = Round(then=(Reduce(rows, Region(0, 0, size)),))
    return Program((first, *rounds, last), count * size, reducer)


def direct(me: int, count: int, size: int, item: int, reducer: Reducer, slice_bytes: int) -> Program:
    """Reduce-scatter and all-gather, each straight to its member; slice after slice, the gathering one round behind."""
    parts = segments(size, count, item)
    longest = max(part.size for part in parts)
    slice_bytes = max(item, min(slice_bytes // item * item, longest))
    others = [(me + step) % count for step in range(1, count)]
    rounds = []

    def cut(part: Region, start: int) -> Region:
        first = min(start, part.size)
        return Region(part.buffer, part.start + first, min(slice_bytes, part.size - first))

    starts = list(range(0, longest, slice_bytes)) or [0]
    for turn in range(len(starts) + 1):
        sends, receives, then = [], [], []
        if turn:
            behind = starts[turn - 1]
            sends += [Transfer(peer, cut(parts[me], behind)) for peer in others]
            receives += [Transfer(peer, cut(parts[peer], behind)) for peer in others]
        if turn < len(starts):
            now = starts[turn]
            mine = cut(parts[me], now)
            rooms = {peer: Region(SCRATCH, at * slice_bytes, mine.size) for at, peer in enumerate(others)}
            sends += [Transfer(peer, cut(parts[peer], now)) for peer in others]
            receives += [Transfer(peer, rooms[peer]) for peer in others]
            then = [Reduce(tuple(rooms.get(at, mine) for at in range(count)), mine)]
        rounds.append(Round(tuple(sends), tuple(receives), tuple(then)))
    return Program(tuple(rounds), (count - 1) * slice_bytes, reducer)


def ring(me: int, count: int, size: int, item: int, reducer: Reducer) -> Program:
    """Partial results travel round."""
    parts = segments(size, count, item)
    after, before = (me + 1) % count, (me - 1) % count
    longest = max(part.size for part in parts)
    rounds = []
    for step in range(count - 1):
        outgoing, mine = parts[(me - step) % count], parts[(me - step - 1) % count]
        room = Region(SCRATCH, 0, mine.size)
        rounds.append(Round((Transfer(after, outgoing),), (Transfer(before, room),), (Reduce((room, mine), mine),)))
    for step in range(count - 1):
        outgoing, incoming = parts[(me + 1 - step) % count], parts[(me - step) % count]
        rounds.append(Round((Transfer(after, outgoing),), (Transfer(before, incoming),)))
    return Program(tuple(rounds), longest, reducer)
