"""The algorithms alone: members are threads, exchange goes through queues."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron_elas.runtime.communicator import collectives
from megatron_elas.runtime.communicator.collectives import Team
from megatron_elas.runtime.communicator.reduction import Reduction
from megatron_elas.runtime.transport.base import Part

COUNTS = [2, 3, 4, 5, 8, 9, 11]
"""On both sides of ``DIRECT_MEMBERS``."""
LENGTHS = [0, 1, 7, 1000, 70_000]
"""fp32 elements; the last one is beyond ``SMALL_BYTES``."""


def run(count: int, member: Callable[[Team], object]) -> list[object]:
    """Run ``member`` for every position of a group whose worker ids are not their positions."""
    workers = tuple(100 - 3 * at for at in range(count))
    pipes: dict[tuple[int, int], queue.SimpleQueue[bytes]] = defaultdict(queue.SimpleQueue)
    for source in workers:
        for target in workers:
            pipes[source, target] = queue.SimpleQueue()
    results: list[object] = [None] * count

    def work(at: int) -> None:
        def exchange(sends: list[Part], receives: list[Part]) -> None:
            for peer, buffer in sends:
                assert peer != workers[at]
                pipes[workers[at], peer].put(bytes(buffer))
            for peer, buffer in receives:
                data = pipes[peer, workers[at]].get(timeout=10)
                assert len(data) == len(buffer)
                if data:  # an empty buffer may be a constant
                    buffer[:] = data

        try:
            results[at] = member(Team(workers, at, exchange))
        except BaseException as error:
            results[at] = error

    threads = [threading.Thread(target=work, args=(at,), daemon=True) for at in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    assert all(pipe.empty() for pipe in pipes.values()), "something was sent that nobody received"
    return results


def values(at: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(at + 1)).to(dtype)


def in_order(count: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The sum in member order, which is what the module promises up to ``DIRECT_MEMBERS``."""
    total = values(0, length, dtype).float()
    for at in range(1, count):
        total += values(at, length, dtype).float()
    return total.to(dtype)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_reduce_gives_everybody_the_same_bits(count: int, length: int, dtype: torch.dtype) -> None:
    def member(team: Team) -> Tensor:
        tensor = values(team.me, length, dtype)
        collectives.all_reduce(team, tensor, Reduction(ReduceOp.SUM, dtype))
        return tensor

    results = run(count, member)
    assert all(torch.equal(result, results[0]) for result in results)
    expected = in_order(count, length, dtype)
    if count <= collectives.DIRECT_MEMBERS:
        assert torch.equal(results[0], expected)
    else:
        torch.testing.assert_close(results[0], expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.25)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("length", [0, 5, 50_000, 1_000_000])
def test_reduce_scatter_keeps_its_inputs_and_may_write_to_its_own(count: int, length: int) -> None:
    if length == 1_000_000 and count > 4:
        pytest.skip("several slices of scratch are covered by the smaller groups")
    inputs = [values(at, length * count) for at in range(count)]
    expected = sum(inputs[1:], inputs[0]).view(count, length)

    def member(team: Team) -> bool:
        shares = list(inputs[team.me].clone().view(count, length).unbind(0))
        output = shares[team.me]
        collectives.reduce_scatter(team, output, shares, Reduction(ReduceOp.SUM, torch.float32))
        others = [at for at in range(count) if at != team.me]
        assert all(torch.equal(shares[at], inputs[team.me].view(count, length)[at]) for at in others)
        torch.testing.assert_close(output, expected[team.me], rtol=0, atol=1e-5)
        return count > collectives.DIRECT_MEMBERS or torch.equal(output, expected[team.me])

    assert all(run(count, member))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("length", LENGTHS)
def test_all_gather_may_be_in_place(count: int, length: int) -> None:
    expected = torch.cat([values(at, length) for at in range(count)])

    def member(team: Team) -> bool:
        whole = torch.zeros(count * length)
        slots = list(whole.view(count, length).unbind(0))
        slots[team.me].copy_(values(team.me, length))
        collectives.all_gather(team, slots, slots[team.me])
        return torch.equal(whole, expected)

    assert all(run(count, member))


def test_all_gather_takes_different_lengths() -> None:
    def member(team: Team) -> bool:
        slots = [torch.zeros(3 + at) for at in range(4)]
        collectives.all_gather(team, slots, values(team.me, 3 + team.me))
        return all(torch.equal(slot, values(at, 3 + at)) for at, slot in enumerate(slots))

    assert all(run(4, member))


@pytest.mark.parametrize("count", COUNTS)
def test_every_member_can_be_the_root(count: int) -> None:
    length = 1000

    def member(team: Team) -> bool:
        for root in range(count):
            mine = values(team.me, length)
            copied = mine.clone()
            collectives.broadcast(team, copied, root)
            assert torch.equal(copied, values(root, length))

            reduced = mine.clone()
            collectives.reduce(team, reduced, root, Reduction(ReduceOp.SUM, mine.dtype))
            assert torch.equal(reduced, in_order(count, length) if team.me == root else mine)

            slots = [torch.zeros(length) for _ in range(count)] if team.me == root else []
            collectives.gather(team, slots, mine, root)
            assert all(torch.equal(slot, values(at, length)) for at, slot in enumerate(slots))

            share = torch.zeros(length)
            collectives.scatter(team, share, [values(at, length) for at in range(count)], root)
            assert torch.equal(share, mine)
        return True

    assert all(run(count, member))


@pytest.mark.parametrize("count", COUNTS)
def test_all_to_all_takes_uneven_and_empty_pieces(count: int) -> None:
    def length(source: int, target: int) -> int:
        return (source * 3 + target) % 4

    def member(team: Team) -> bool:
        outputs = [torch.zeros(length(at, team.me)) for at in range(count)]
        collectives.all_to_all(team, outputs, [values(team.me, length(team.me, at)) for at in range(count)])
        return all(torch.equal(output, values(at, length(at, team.me))) for at, output in enumerate(outputs))

    assert all(run(count, member))


@pytest.mark.parametrize("count", COUNTS)
def test_nobody_leaves_a_barrier_before_everybody_has_entered(count: int) -> None:
    entered = [False] * count

    def member(team: Team) -> bool:
        entered[team.me] = True
        collectives.barrier(team)
        return all(entered)

    assert all(run(count, member))


def test_sixteen_bit_floats_are_rounded_once() -> None:
    """256 + 1 is 256 in bfloat16, so that summing in bfloat16 would lose all ones."""

    def member(team: Team) -> float:
        tensor = torch.tensor([256.0 if team.me == 0 else 1.0], dtype=torch.bfloat16)
        collectives.all_reduce(team, tensor, Reduction(ReduceOp.SUM, tensor.dtype))
        return tensor.item()

    assert run(5, member) == [260.0] * 5


@pytest.mark.parametrize(
    ("op", "dtype", "error"),
    [
        (ReduceOp.AVG, torch.int32, TypeError),
        (ReduceOp.BAND, torch.float32, TypeError),
        (ReduceOp.PREMUL_SUM, torch.float32, NotImplementedError),
    ],
)
def test_a_reduction_that_makes_no_sense_is_refused(
    op: ReduceOp.RedOpType, dtype: torch.dtype, error: type[Exception]
) -> None:
    with pytest.raises(error):
        Reduction(op, dtype)
