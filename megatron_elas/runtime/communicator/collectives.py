"""Collective algorithms over directed transfers.

Pure over a ``Team``: who the members are, which one this is, and a function that exchanges bytes. Tensors are flat and
contiguous (P elements). Nothing here knows processes, epochs or torch's groups.

Up to ``DIRECT_MEMBERS`` members exchange with each other directly: one round, sums in member order, so every member
gets the same bits whichever algorithm the size selects. Beyond, large reductions go round a ring; each segment is
reduced once, in a fixed rotated order, so members still agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_elas.runtime.communicator.buffers import as_bytes, scratch
from megatron_elas.runtime.communicator.reduction import Reduction
from megatron_elas.runtime.transport.base import Part

DIRECT_MEMBERS = 8
"""Largest group in which everybody talks to everybody: (n - 1) links per member and channel."""

SMALL_BYTES = 64 << 10
"""Up to this size, and for two members up to ``PAIR_BYTES``, everybody gets everything and reduces it: fewer messages
for more bytes."""

PAIR_BYTES = 512 << 10

SCRATCH_BYTES = 2 << 20
"""Received and not yet reduced bytes at one time."""


class Team(NamedTuple):
    """Whom to talk to and how."""

    members: tuple[int, ...]
    """Worker ids, in group order."""
    me: int
    """Own position in ``members``."""
    exchange: Callable[[list[Part], list[Part]], None]
    """Sends and receives, all at once; returns when done."""

    @property
    def others(self) -> list[int]:
        """Positions of the other members, starting behind the own one so that not everybody sends to the first."""
        count = len(self.members)
        return [(self.me + step) % count for step in range(1, count)]


# ---------------------------------------------------------------------------------------------- reductions


def all_reduce(team: Team, tensor_P: Tensor, reduction: Reduction) -> None:
    """Reduce over all members, in place."""
    count = len(team.members)
    size = tensor_P.nbytes
    if size <= SMALL_BYTES or (count == 2 and size <= PAIR_BYTES):
        _all_reduce_whole(team, tensor_P, reduction)
        return
    segments = _segments(tensor_P, count)
    reduce_scatter(team, segments[team.me], segments, reduction)
    all_gather(team, segments, segments[team.me])


def _all_reduce_whole(team: Team, tensor_P: Tensor, reduction: Reduction) -> None:
    own = team.me
    if len(team.members) == 2:
        theirs = torch.empty_like(tensor_P)
        peer = team.members[1 - own]
        team.exchange([Part(peer, as_bytes(tensor_P))], [Part(peer, as_bytes(theirs))])
        reduction.reduce((tensor_P, theirs) if own == 0 else (theirs, tensor_P), tensor_P, own)
        return
    shards = _gather_small(team, tensor_P)
    reduction.reduce(shards, tensor_P, own)


def reduce_scatter(team: Team, output_P: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> None:
    """Reduce ``inputs[i]`` over all members to member i's ``output_P``.

    Inputs may differ in length by member, as long as all members agree; ``output_P`` may be ``inputs[me]``. The other
    inputs are left as they are.
    """
    if len(team.members) <= DIRECT_MEMBERS:
        _reduce_scatter_direct(team, output_P, inputs, reduction)
    else:
        _reduce_scatter_ring(team, output_P, inputs, reduction)


def _reduce_scatter_direct(team: Team, output_P: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> None:
    members, own = team.members, team.me
    item = output_P.element_size()
    slice_length = max(1, SCRATCH_BYTES // (item * (len(members) - 1)))
    received = scratch((len(members) - 1) * min(slice_length, output_P.numel()), output_P.dtype)
    views = [as_bytes(tensor) for tensor in inputs]
    room = as_bytes(received)
    others = team.others
    for start in range(0, max(tensor.numel() for tensor in inputs), slice_length):
        first, last = start * item, (start + slice_length) * item
        mine = inputs[own][start : start + slice_length]
        length = mine.numel()
        width = length * item
        team.exchange(
            [Part(members[peer], views[peer][first:last]) for peer in others],
            [Part(members[peer], room[at * width : (at + 1) * width]) for at, peer in enumerate(others)],
        )
        if not length:
            continue
        shards = [mine] * len(members)
        for at, peer in enumerate(others):
            shards[peer] = received[at * length : (at + 1) * length]
        reduction.reduce(shards, output_P[start : start + slice_length], own)


def _reduce_scatter_ring(team: Team, output_P: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> None:
    members, own = team.members, team.me
    count = len(members)
    following, preceding = members[(own + 1) % count], members[own - 1]
    outgoing = inputs[own - 1]
    for step in range(count - 1):
        mine = inputs[(own - step - 2) % count]
        incoming = torch.empty_like(mine)
        team.exchange([Part(following, as_bytes(outgoing))], [Part(preceding, as_bytes(incoming))])
        reduction.accumulate(incoming, mine)
        outgoing = incoming
    reduction.finish(outgoing, count)
    output_P.copy_(outgoing)


def reduce(team: Team, tensor_P: Tensor, root: int, reduction: Reduction) -> None:
    """Reduce to the root's ``tensor_P``; the others' is left as it is."""
    members, own = team.members, team.me
    item = tensor_P.element_size()
    slice_length = max(1, SCRATCH_BYTES // (item * (len(members) - 1)))
    view = as_bytes(tensor_P)
    received = (
        scratch((len(members) - 1) * min(slice_length, tensor_P.numel()), tensor_P.dtype) if own == root else None
    )
    for start in range(0, tensor_P.numel(), slice_length):
        mine = tensor_P[start : start + slice_length]
        if received is None:
            team.exchange([Part(members[root], view[start * item : (start + slice_length) * item])], [])
            continue
        rows = list(received[: mine.numel() * (len(members) - 1)].view(-1, mine.numel()).unbind(0))
        shards = [*rows[:own], mine, *rows[own:]]
        team.exchange([], [Part(members[peer], as_bytes(shards[peer])) for peer in team.others])
        reduction.reduce(shards, mine, own)


# ---------------------------------------------------------------------------------------------- moving


def all_gather(team: Team, outputs: Sequence[Tensor], tensor_P: Tensor) -> None:
    """Bring member i's tensor to everybody's ``outputs[i]``. Own output may be, or overlap, ``tensor_P``."""
    members, own = team.members, team.me
    count = len(members)
    size = tensor_P.nbytes
    if count > 2 and size <= SMALL_BYTES and all(output.nbytes == size for output in outputs):
        for output, shard in zip(outputs, _gather_small(team, tensor_P), strict=True):
            output.copy_(shard)
        return
    _copy(outputs[own], tensor_P)
    if count <= DIRECT_MEMBERS:
        view = as_bytes(tensor_P)
        others = team.others
        team.exchange(
            [Part(members[peer], view) for peer in others],
            [Part(members[peer], as_bytes(outputs[peer])) for peer in others],
        )
        return
    following, preceding = members[(own + 1) % count], members[own - 1]
    for step in range(count - 1):
        team.exchange(
            [Part(following, as_bytes(outputs[(own - step) % count]))],
            [Part(preceding, as_bytes(outputs[(own - step - 1) % count]))],
        )


def _gather_small(team: Team, tensor_P: Tensor) -> list[Tensor]:
    """All members' tensors, in member order, in scratch memory. Bruck's algorithm: log2(n) rounds, one message each."""
    members, own = team.members, team.me
    count = len(members)
    rows = scratch(count * tensor_P.numel(), tensor_P.dtype).view(count, tensor_P.numel())
    rows[0].copy_(tensor_P)
    view, size = as_bytes(rows), tensor_P.nbytes
    have = 1  # rows[j] holds the tensor of the member j places behind, for j < have
    while have < count:
        more = min(have, count - have)
        team.exchange(
            [Part(members[own - have], view[: more * size])],
            [Part(members[(own + have) % count], view[have * size : (have + more) * size])],
        )
        have += more
    return [rows[(at - own) % count] for at in range(count)]


def broadcast(team: Team, tensor_P: Tensor, root: int) -> None:
    """Copy the root's tensor to everybody, down a binomial tree."""
    members = team.members
    count = len(members)
    place = (team.me - root) % count  # place in the tree: 0 is the root
    view = as_bytes(tensor_P)
    low = place & -place  # the lowest set bit leads to the parent; all lower ones to children
    if place:
        team.exchange([], [Part(members[(place - low + root) % count], view)])
    else:
        low = 1 << (count - 1).bit_length()
    children = []
    while (low := low >> 1) > 0:
        if place + low < count:
            children.append(Part(members[(place + low + root) % count], view))
    if children:
        team.exchange(children, [])


def gather(team: Team, outputs: Sequence[Tensor], tensor_P: Tensor, root: int) -> None:
    """Bring member i's tensor to the root's ``outputs[i]``; elsewhere ``outputs`` is not looked at."""
    members = team.members
    if team.me != root:
        team.exchange([Part(members[root], as_bytes(tensor_P))], [])
        return
    team.exchange([], [Part(members[peer], as_bytes(outputs[peer])) for peer in team.others])
    _copy(outputs[root], tensor_P)


def scatter(team: Team, output_P: Tensor, inputs: Sequence[Tensor], root: int) -> None:
    """Bring the root's ``inputs[i]`` to member i; elsewhere ``inputs`` is not looked at."""
    members = team.members
    if team.me != root:
        team.exchange([], [Part(members[root], as_bytes(output_P))])
        return
    team.exchange([Part(members[peer], as_bytes(inputs[peer])) for peer in team.others], [])
    _copy(output_P, inputs[root])


def all_to_all(team: Team, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Bring ``inputs[i]`` to member i's ``outputs[me]``. Lengths may differ; both sides must agree on each."""
    members, own = team.members, team.me
    others = team.others
    team.exchange(
        [Part(members[peer], as_bytes(inputs[peer])) for peer in others],
        [Part(members[peer], as_bytes(outputs[peer])) for peer in others],
    )
    _copy(outputs[own], inputs[own])


def barrier(team: Team) -> None:
    """Return when everybody has called it. Dissemination: log2(n) rounds."""
    members, own = team.members, team.me
    count = len(members)
    nothing = memoryview(b"")
    step = 1
    while step < count:
        team.exchange([Part(members[(own + step) % count], nothing)], [Part(members[own - step], nothing)])
        step *= 2


# ---------------------------------------------------------------------------------------------- parts


def _segments(tensor_P: Tensor, count: int) -> list[Tensor]:
    """Cut into ``count`` views whose lengths differ by at most one."""
    base, more = divmod(tensor_P.numel(), count)
    return list(tensor_P.split([base + (at < more) for at in range(count)]))


def _copy(target: Tensor, source: Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
