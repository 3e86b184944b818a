"""Bodies for ``conformance``: sends and receives."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_elas.runtime.transport.base import ProtocolError
from tests.runtime.communicator.conformance import Suite, adder, numbers

POINT_TO_POINT: Suite = {}
case = adder(POINT_TO_POINT)


@case()
def send_and_receive_around_the_ring(group: Any, rank: int, size: int) -> Any:
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        for length in (0, 3, 300_000):
            got = torch.empty(length, dtype=dtype)
            work = dist.isend(numbers(rank, length, dtype), (rank + 1) % size, group=group)
            dist.recv(got, (rank - 1) % size, group=group)
            work.wait()
            results.append(got)
    return results


@case()
def messages_of_a_tag_come_in_the_order_they_were_sent(group: Any, rank: int, size: int) -> Any:
    got = [torch.empty(4) for _ in range(3)]
    works = [dist.isend(numbers(rank, 4, shift=at), (rank + 1) % size, group=group, tag=5) for at in range(3)]
    for tensor in got:
        dist.recv(tensor, (rank - 1) % size, group=group, tag=5)
    for work in works:
        work.wait()
    return got


@case()
def tags_are_received_in_another_order_than_they_were_sent(group: Any, rank: int, size: int) -> Any:
    following, preceding = (rank + 1) % size, (rank - 1) % size
    tags = [7, 0, 1 << 20, 7, 3]
    lengths = [4, 300_000, 5, 6, 0]
    works = [
        dist.isend(numbers(rank, length, shift=at), following, group=group, tag=tag)
        for at, (tag, length) in enumerate(zip(tags, lengths, strict=True))
    ]
    got = [torch.empty(length) for length in lengths]
    for at in (4, 2, 0, 1, 3):  # the two with tag 7 in order
        dist.recv(got[at], preceding, group=group, tag=tags[at])
    for work in works:
        work.wait()
    return got


@case()
def receives_are_waited_for_in_another_order(group: Any, rank: int, size: int) -> Any:
    following, preceding = (rank + 1) % size, (rank - 1) % size
    got = [torch.empty(at + 1) for at in range(4)]
    receives = [dist.irecv(tensor, preceding, group=group, tag=at) for at, tensor in enumerate(got)]
    sends = [dist.isend(numbers(rank, at + 1), following, group=group, tag=at) for at in reversed(range(4))]
    for work in (*reversed(receives), *sends):
        work.wait()
    return got


@case()
def receive_from_any_source(group: Any, rank: int, size: int) -> Any:
    seen = []
    if rank == 0:
        for _ in range(size - 1):
            got = torch.empty(3)
            source = dist.recv(got, group=group, tag=2)
            assert torch.equal(got, numbers(source, 3))
            seen.append(source)
    else:
        dist.send(numbers(rank, 3), 0, group=group, tag=2)
    dist.barrier(group=group)
    return sorted(seen)


@case()
def batch_isend_irecv(group: Any, rank: int, size: int) -> Any:
    following, preceding = (rank + 1) % size, (rank - 1) % size
    forward, backward = torch.empty(200_000), torch.empty(5)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, forward, preceding, group, tag=1),
            dist.P2POp(dist.isend, numbers(rank, 5, shift=1), preceding, group, tag=2),
            dist.P2POp(dist.irecv, backward, following, group, tag=2),
            dist.P2POp(dist.isend, numbers(rank, 200_000), following, group, tag=1),
        ]
    )
    for work in works:
        work.wait()
    return [forward, backward]


@case(ours_only=True)
def a_receive_proceeds_while_nobody_waits_for_it(group: Any, rank: int, size: int) -> Any:
    """Gloo's reports completion only in ``wait``."""
    following, preceding = (rank + 1) % size, (rank - 1) % size
    for length in (3, 1_000_000):
        got = torch.empty(length)
        work = dist.irecv(got, preceding, group=group)
        future_got = torch.empty(2)
        future = dist.irecv(future_got, preceding, group=group, tag=1).get_future()
        dist.isend(numbers(rank, length), following, group=group)
        dist.isend(numbers(rank, 2), following, group=group, tag=1)
        deadline = time.monotonic() + 20
        while not work.is_completed():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert torch.equal(got, numbers(preceding, length))
        assert torch.equal(future.wait()[0], numbers(preceding, 2))
    return []


@case(ours_only=True)
def a_message_to_oneself(group: Any, rank: int, size: int) -> Any:
    got = [torch.empty(3) for _ in range(2)]
    early = dist.irecv(got[0], rank, group=group, tag=1)
    dist.isend(numbers(rank, 3), rank, group=group, tag=1)
    dist.isend(numbers(rank, 3, shift=1), rank, group=group, tag=2)
    dist.irecv(got[1], rank, group=group, tag=2).wait()
    early.wait()
    assert torch.equal(got[0], numbers(rank, 3))
    assert torch.equal(got[1], numbers(rank, 3, shift=1))
    return []


@case(ours_only=True)
def a_receive_may_be_waited_for_with_a_limit(group: Any, rank: int, size: int) -> Any:
    got = torch.empty(3)
    work = dist.irecv(got, (rank - 1) % size, group=group, tag=9)
    with pytest.raises(TimeoutError, match=f"tag 9 came from rank {(rank - 1) % size} within 0.01 s"):
        work.wait(timedelta(seconds=0.01))
    dist.barrier(group=group)
    dist.isend(numbers(rank, 3), (rank + 1) % size, group=group, tag=9)
    work.wait(timedelta(seconds=20))
    assert torch.equal(got, numbers((rank - 1) % size, 3))
    return []


@case(ours_only=True)
def a_message_of_another_length_is_refused_and_the_next_one_arrives(group: Any, rank: int, size: int) -> Any:
    following, preceding = (rank + 1) % size, (rank - 1) % size
    dist.isend(numbers(rank, 5), following, group=group)
    dist.isend(numbers(rank, 3), following, group=group)
    with pytest.raises(ProtocolError, match=rf"rank {preceding} sent 20 bytes with tag 0, rank {rank} expected 12"):
        dist.recv(torch.empty(3), preceding, group=group)
    got = torch.empty(3)
    dist.recv(got, preceding, group=group)
    assert torch.equal(got, numbers(preceding, 3))
    return []


@case(ours_only=True)
def collectives_and_messages_do_not_mix(group: Any, rank: int, size: int) -> Any:
    following, preceding = (rank + 1) % size, (rank - 1) % size
    summed = [numbers(rank, 1000 * at + 1) for at in range(5)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in summed]
    got = [torch.empty(100_000) for _ in range(5)]
    receives = [dist.irecv(tensor, preceding, group=group, tag=at) for at, tensor in enumerate(got)]
    for at in range(5):
        dist.isend(numbers(rank, 100_000, shift=at), following, group=group, tag=at)
    for work in (*receives, *works):
        work.wait()
    for at in range(5):
        assert torch.equal(got[at], numbers(preceding, 100_000, shift=at))
        assert torch.equal(summed[at], sum(numbers(peer, 1000 * at + 1) for peer in range(size)))
    return []
