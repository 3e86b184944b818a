"""Bodies for ``conformance``: collectives, their lists, coalesced and functional forms, objects, groups."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed import ReduceOp, _make_nccl_premul_sum

from tests.runtime.communicator.conformance import Case, Suite, adder, is_gloo, numbers

COLLECTIVES: Suite = {}
CROSS_PRODUCT: Suite = {}
case = adder(COLLECTIVES)

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INTEGERS = [torch.int32, torch.int64, torch.int8, torch.uint8]
DTYPES = [*FLOATS, *INTEGERS, torch.bool]
MOVED = [*DTYPES, torch.complex64, torch.complex128]
OPS = {
    "SUM": (ReduceOp.SUM, DTYPES),
    "MAX": (ReduceOp.MAX, DTYPES),
    "MIN": (ReduceOp.MIN, DTYPES),
    "PRODUCT": (ReduceOp.PRODUCT, DTYPES),
    "AVG": (ReduceOp.AVG, FLOATS),
    "BAND": (ReduceOp.BAND, INTEGERS),
    "BOR": (ReduceOp.BOR, INTEGERS),
    "BXOR": (ReduceOp.BXOR, INTEGERS),
}
COMBINE = {
    "SUM": torch.add,
    "AVG": torch.add,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "PRODUCT": torch.mul,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def expected_reduction(op: str, dtype: torch.dtype, length: int, size: int) -> Tensor:
    total = numbers(0, length, dtype)
    for rank in range(1, size):
        total = COMBINE[op](total, numbers(rank, length, dtype))
    return total / size if op == "AVG" else total


def add_reductions(suite: Suite, op: str, dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    """all_reduce, reduce and reduce_scatter with one operation and dtype, synchronous and not."""

    def run(group: Any, rank: int, size: int) -> Any:
        results = []
        for turn, length in enumerate(lengths):
            tensor, expected = numbers(rank, length, dtype), expected_reduction(op, dtype, length, size)
            work = dist.all_reduce(tensor, OPS[op][0], group=group, async_op=turn % 2 == 1)
            if work is not None:
                work.wait()
            assert torch.equal(tensor, expected), f"all_reduce of {length} is not what it should be"
            results.append(tensor)
            root = turn % size
            tensor = numbers(rank, length, dtype)
            dist.reduce(tensor, root, OPS[op][0], group=group)
            if rank == root:
                assert torch.equal(tensor, expected), f"reduce of {length} is not what it should be"
            if length % size == 0:
                share = torch.empty(length // size, dtype=dtype)
                work = dist.reduce_scatter_tensor(
                    share, numbers(rank, length, dtype), OPS[op][0], group=group, async_op=turn % 2 == 0
                )
                if work is not None:
                    work.wait()
                part = slice(rank * share.numel(), (rank + 1) * share.numel())
                assert torch.equal(share, expected[part]), f"reduce_scatter of {length} is not what it should be"
                results.append(share)
        return results

    suite[f"reductions with {op} of {dtype}"] = Case(run, ours_only=op == "AVG")


for _op, (_, _dtypes) in OPS.items():
    for _dtype in _dtypes:
        if _dtype in (torch.float32, torch.bfloat16, torch.int64) or _op == "SUM":
            add_reductions(COLLECTIVES, _op, _dtype, (1, 60))
        add_reductions(CROSS_PRODUCT, _op, _dtype, (0, 1, 5, 60, 5040, 41_580, 498_960))


@case()
def all_reduce_asynchronous_ones_in_order(group: Any, rank: int, size: int) -> Any:
    tensors = [numbers(rank, 1 + 1000 * at, shift=at) for at in range(8)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    last = numbers(rank, 3)
    dist.all_reduce(last, group=group)  # synchronous, behind them
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
    return [*tensors, last]


@case()
def all_reduce_of_every_size_class(group: Any, rank: int, size: int) -> Any:
    results = []
    for length in (0, 7, 20_000, 140_000, 600_000):
        tensor = numbers(rank, length)
        dist.all_reduce(tensor, group=group)
        results.append(tensor)
    return results


@case()
def futures(group: Any, rank: int, size: int) -> Any:
    work = dist.all_reduce(numbers(rank, 9), group=group, async_op=True)
    seen = work.get_future().then(lambda future: future.value()[0].sum().item()).wait()
    whole = torch.empty(3 * size)
    work = dist.all_gather_into_tensor(whole, numbers(rank, 3), group=group, async_op=True)
    work.get_future().wait()
    assert work.wait(timedelta(seconds=10)) is not False
    assert work.is_completed()
    return [seen, whole]


@case()
def all_reduce_of_scalars_and_parameters(group: Any, rank: int, size: int) -> Any:
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar, group=group)
    parameter = torch.nn.Parameter(numbers(rank, 6))
    with torch.no_grad():
        dist.all_reduce(parameter, group=group)
    whole = torch.tensor(rank, dtype=torch.complex64) * 1j + 1
    dist.all_reduce(whole, group=group)
    return [scalar, parameter.detach(), whole]


@case()
def sparse_tensors(group: Any, rank: int, size: int) -> Any:
    entries = torch.tensor([[rank, 0, size], [1, 0, rank % 2]])
    tensor = torch.sparse_coo_tensor(
        entries[:, : 1 + rank % 3], numbers(rank, 2 * (1 + rank % 3)).view(-1, 2), (size + 1, 3, 2)
    )
    for _ in range(2):
        dist.all_reduce(tensor, group=group)
    return tensor.to_dense()


@case(ours_only=True)
def tensors_with_holes(group: Any, rank: int, size: int) -> Any:
    """Gloo wants contiguous tensors."""
    every_other = numbers(rank, 40)[::2]
    dist.all_reduce(every_other, group=group)
    assert torch.equal(every_other, sum(numbers(at, 40)[::2] for at in range(size)))
    turned = numbers(rank, 40).view(5, 8).t()
    dist.broadcast(turned, 1, group=group)
    assert torch.equal(turned, numbers(1, 40).view(5, 8).t())
    slots = [torch.zeros(8, 5).t() for _ in range(size)]
    dist.all_gather(slots, numbers(rank, 40).view(5, 8), group=group)
    assert all(torch.equal(slot, numbers(at, 40).view(5, 8)) for at, slot in enumerate(slots))
    output = torch.zeros(10)[::2]
    dist.reduce_scatter(output, [numbers(rank, 10, shift=at)[::2] for at in range(size)], group=group)
    assert torch.equal(output, sum(numbers(at, 10, shift=rank)[::2] for at in range(size)))
    at_root = [torch.zeros(8, 5).t() for _ in range(size)] if rank == 0 else None
    dist.gather(numbers(rank, 40).view(8, 5).t(), at_root, 0, group=group)
    for at, slot in enumerate(at_root or ()):
        assert torch.equal(slot, numbers(at, 40).view(8, 5).t())
    share = torch.zeros(8, 5).t()
    dist.scatter(share, [numbers(at, 40).view(8, 5).t() for at in range(size)] if rank == 1 else None, 1, group=group)
    assert torch.equal(share, numbers(rank, 40).view(8, 5).t())
    exchanged = torch.zeros(3, 2 * size).t()
    dist.all_to_all_single(exchanged, numbers(rank, 6 * size).view(3, 2 * size).t(), group=group)
    rows = [numbers(at, 6 * size).view(3, 2 * size).t()[2 * rank : 2 * rank + 2] for at in range(size)]
    assert torch.equal(exchanged, torch.cat(rows))
    return []


@case(ours_only=True)
def premultiplied_sums(group: Any, rank: int, size: int) -> Any:
    """Of NCCL; gloo has none."""
    for factor in (3.0, torch.tensor(3.0)):
        tensor = numbers(rank, 6 * size)
        dist.all_reduce(tensor, _make_nccl_premul_sum(factor), group=group)
        expected = sum(numbers(at, 6 * size) for at in range(size)) * 3
        assert torch.equal(tensor, expected)
        share, own = torch.empty(6), numbers(rank, 6 * size)
        dist.reduce_scatter_tensor(share, own, _make_nccl_premul_sum(factor), group=group)
        assert torch.equal(share, expected[6 * rank : 6 * rank + 6])
        assert torch.equal(own, numbers(rank, 6 * size))
        tensor = numbers(rank, 6 * size)
        dist.reduce(tensor, 1, _make_nccl_premul_sum(factor), group=group)
        assert torch.equal(tensor, expected if rank == 1 else numbers(rank, 6 * size))
    return []


@case()
def reduce(group: Any, rank: int, size: int) -> Any:
    results = []
    for root in range(size):
        tensor = numbers(rank, 50_000 if root == 1 else 5)
        work = dist.reduce(tensor, root, op=ReduceOp.SUM, group=group, async_op=root == 0)
        if work is not None:
            work.wait()
        if rank == root:
            results.append(tensor)
    return results


@case()
def reduce_scatter_list(group: Any, rank: int, size: int) -> Any:
    output = torch.empty(7)
    dist.reduce_scatter(output, list(numbers(rank, 7 * size).split(7)), group=group)
    return output


@case()
def reduce_scatter_tensor_also_in_place(group: Any, rank: int, size: int) -> Any:
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        output = torch.empty(30_000, dtype=dtype)
        dist.reduce_scatter_tensor(output, numbers(rank, 30_000 * size, dtype), group=group)
        results.append(output)
        whole = numbers(rank, 50 * size, dtype)
        own = whole[50 * rank : 50 * rank + 50]
        dist.reduce_scatter_tensor(own, whole, group=group)
        results.append(own.clone())
    return results


@case()
def all_gather_list(group: Any, rank: int, size: int) -> Any:
    results = []
    for dtype in MOVED:
        slots = [torch.empty(3, 4, dtype=dtype) for _ in range(size)]
        dist.all_gather(slots, numbers(rank, 12, dtype).view(3, 4), group=group)
        results += slots
    return results


@case()
def all_gather_into_tensor_also_in_place(group: Any, rank: int, size: int) -> Any:
    output = torch.empty(size * 20_000)
    dist.all_gather_into_tensor(output, numbers(rank, 20_000), group=group)
    whole = torch.zeros(size * 5)
    own = whole[rank * 5 : rank * 5 + 5]
    own.copy_(numbers(rank, 5))
    dist.all_gather_into_tensor(whole, own, group=group)
    return [output, whole]


@case(ours_only=True)
def all_gather_into_a_stack(group: Any, rank: int, size: int) -> Any:
    stacked = torch.empty(size, 2, 3)
    dist.all_gather_into_tensor(stacked, numbers(rank, 6).view(2, 3), group=group)
    assert all(torch.equal(stacked[at], numbers(at, 6).view(2, 3)) for at in range(size))
    return []


@case(ours_only=True)
def all_gather_of_different_lengths(group: Any, rank: int, size: int) -> Any:
    slots = [torch.empty(at + 1) for at in range(size)]
    dist.all_gather(slots, numbers(rank, rank + 1), group=group)
    assert all(torch.equal(slot, numbers(at, at + 1)) for at, slot in enumerate(slots))
    return []


@case()
def broadcast(group: Any, rank: int, size: int) -> Any:
    results = []
    for root in range(size):
        for dtype in MOVED:
            tensor = numbers(rank, 11, dtype)
            dist.broadcast(tensor, root, group=group)
            results.append(tensor)
    large = numbers(rank, 500_000)
    dist.broadcast(large, size - 1, group=group)
    return [*results, large]


@case(ours_only=True)
def eight_bit_floats_are_moved(group: Any, rank: int, size: int) -> Any:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = numbers(rank, 11).to(dtype)
        dist.broadcast(tensor, 1, group=group)
        assert torch.equal(tensor.float(), numbers(1, 11))
        whole = torch.empty(11 * size, dtype=dtype)
        dist.all_gather_into_tensor(whole, numbers(rank, 11).to(dtype), group=group)
        assert torch.equal(whole.float(), torch.cat([numbers(at, 11) for at in range(size)]))
    return []


@case()
def gather_and_scatter(group: Any, rank: int, size: int) -> Any:
    results = []
    for root in range(size):
        slots = [torch.empty(5) for _ in range(size)] if rank == root else None
        work = dist.gather(numbers(rank, 5), slots, root, group=group, async_op=root % 2 == 1)
        if work is not None:
            work.wait()
        results += slots or []
        output = torch.empty(5)
        shares = [numbers(at, 5, shift=root) for at in range(size)] if rank == root else None
        dist.scatter(output, shares, root, group=group)
        results.append(output)
    return results


@case()
def all_to_all_single(group: Any, rank: int, size: int) -> Any:
    even = torch.empty(2 * size, 3)
    dist.all_to_all_single(even, numbers(rank, 6 * size).view(2 * size, 3), group=group)
    sends = [(rank + at) % 3 for at in range(size)]
    receives = [(at + rank) % 3 for at in range(size)]
    uneven = torch.empty(sum(receives), 2)
    work = dist.all_to_all_single(
        uneven, numbers(rank, 2 * sum(sends)).view(-1, 2), receives, sends, group=group, async_op=True
    )
    work.wait()
    return [even, uneven]


@case(ours_only=True)
def all_to_all_list(group: Any, rank: int, size: int) -> Any:
    outputs = [torch.empty(at + rank) for at in range(size)]
    dist.all_to_all(outputs, [numbers(rank, rank + at, shift=at) for at in range(size)], group=group)
    assert all(torch.equal(output, numbers(at, rank + at, shift=rank)) for at, output in enumerate(outputs))
    return []


@case()
def barrier(group: Any, rank: int, size: int) -> Any:
    dist.barrier(group=group)
    work = dist.barrier(group=group, async_op=True)
    work.wait()
    if is_gloo(group):
        dist.monitored_barrier(group, timedelta(seconds=10))
    else:
        group.monitored_barrier(timedelta(seconds=10))  # torch's function asks for gloo by name
    return []


@case()
def objects(group: Any, rank: int, size: int) -> Any:
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank * 1000}, group=group)
    sent = [f"from {rank}", rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(sent, 1, group=group)
    at_root: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object((rank,), at_root, 0, group=group)
    share: list[Any] = [None]
    dist.scatter_object_list(share, [f"to {at}" for at in range(size)] if rank == 0 else None, 0, group=group)
    passed: list[Any] = [rank, "text", {rank: [1]}] if rank == 0 else [None] * 3
    if rank == 0:
        dist.send_object_list(passed, 1, group=group)
    elif rank == 1:
        dist.recv_object_list(passed, 0, group=group)
    return [gathered, sent, at_root, share, passed]


@case()
def coalesced(group: Any, rank: int, size: int) -> Any:
    results = []
    for device in (None, torch.device("cpu")):
        if device is not None and is_gloo(group):
            continue  # it wants a backend that coalesces itself
        first, second = numbers(rank, 5), numbers(rank, 30_000)
        with dist._coalescing_manager(group, device, async_ops=True) as manager:
            dist.all_reduce(first, group=group)
            dist.all_reduce(second, group=group)
        manager.wait()
        outputs = [torch.empty(size * 4), torch.empty(size * 6)]
        with dist._coalescing_manager(group, device):
            for output, length in zip(outputs, (4, 6), strict=True):
                dist.all_gather_into_tensor(output, numbers(rank, length), group=group)
        shares = [torch.empty(4), torch.empty(6)]
        with dist._coalescing_manager(group, device, async_ops=True) as manager:
            for share in shares:
                dist.reduce_scatter_tensor(share, numbers(rank, share.numel() * size), group=group)
        manager.wait()
        found = [first, second, *outputs, *shares]
        assert not results or all(map(torch.equal, found, results))
        results = found
    return results


@case(ours_only=True)
def coalesced_with_several_dtypes_and_old_names(group: Any, rank: int, size: int) -> Any:
    tensors = [numbers(rank, 5), numbers(rank, 4, torch.int64), numbers(rank, 3)]
    with dist._coalescing_manager(group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    for tensor, length in zip(tensors, (5, 4, 3), strict=True):
        assert torch.equal(tensor, sum(numbers(at, length, tensor.dtype) for at in range(size)))
    whole = torch.empty(3 * size)
    for gathering in ("_allgather_base", "all_gather_single"):
        whole.zero_()
        getattr(group, gathering)(whole, numbers(rank, 3)).wait()
        assert torch.equal(whole, torch.cat([numbers(at, 3) for at in range(size)]))
    for gathering in ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"):
        whole.zero_()
        getattr(group, gathering)([whole], [numbers(rank, 3)]).wait()
        assert torch.equal(whole, torch.cat([numbers(at, 3) for at in range(size)]))
    expected = sum(numbers(at, 3 * size) for at in range(size))[3 * rank : 3 * rank + 3]
    for scattering in ("_reduce_scatter_base", "reduce_scatter_single"):
        share = torch.empty(3)
        getattr(group, scattering)(share, numbers(rank, 3 * size)).wait()
        assert torch.equal(share, expected)
    for scattering in ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"):
        share = torch.empty(3)
        getattr(group, scattering)([share], [numbers(rank, 3 * size)]).wait()
        assert torch.equal(share, expected)
    for exchanging in ("alltoall_base", "all_to_all_single"):
        exchanged = torch.empty(size)
        getattr(group, exchanging)(exchanged, numbers(rank, size), [], []).wait()
        assert torch.equal(exchanged, torch.stack([numbers(at, size)[rank] for at in range(size)]))
    lists = [[torch.empty(2), torch.empty(3)] for _ in range(size)]
    dist.all_gather_coalesced(lists, [numbers(rank, 2), numbers(rank, 3)], group=group)
    for at, pair in enumerate(lists):
        assert torch.equal(pair[0], numbers(at, 2))
        assert torch.equal(pair[1], numbers(at, 3))
    dist.all_reduce_coalesced(tensors[:1], group=group)
    return []


@case()
def functional_collectives(group: Any, rank: int, size: int) -> Any:
    works = [
        functional.all_reduce(numbers(rank, 5), "sum", group),
        functional.all_gather_tensor(numbers(rank, 4), 0, group),
        functional.all_gather_tensor(numbers(rank, 4).view(2, 2), 1, group),
        functional.reduce_scatter_tensor(numbers(rank, 4 * size), "sum", 0, group),
        functional.broadcast(numbers(rank, 3), 1, group),
        functional.all_to_all_single(numbers(rank, size), None, None, group),
        *functional.all_gather_into_tensor_coalesced([numbers(rank, 2), numbers(rank, 3)], group),
        *functional.reduce_scatter_tensor_coalesced(
            [numbers(rank, 2 * size), numbers(rank, size)], "sum", [0, 0], group
        ),
        *functional.all_reduce_coalesced([numbers(rank, 2), numbers(rank, 3)], "sum", group),
    ]
    return [functional.wait_tensor(each).clone() for each in works]


@case()
def questions_about_the_group(group: Any, rank: int, size: int) -> Any:
    return [
        dist.get_rank(group),
        dist.get_world_size(group),
        dist.get_process_group_ranks(group),
        dist.get_group_rank(group, 1),
        dist.get_global_rank(group, 1),
        group.rank(),
        group.size(),
        group.group_desc,
    ]


@case(least=4)
def groups_of_some_ranks(group: Any, rank: int, size: int) -> Any:
    results = []
    for ranks in ([0, 2], [1, 3], [3, 1, 0], [2]):
        part = dist.new_group(ranks)
        if rank in ranks:
            tensor = numbers(rank, 4)
            dist.all_reduce(tensor, group=part)
            slots = [torch.empty(2) for _ in ranks]
            dist.all_gather(slots, numbers(rank, 2), group=part)
            results += [tensor, *slots, dist.get_process_group_ranks(part)]
    ours = [rank % 2, rank % 2 + 2]
    if rank < 4:
        local = dist.new_group(ours, use_local_synchronization=True)
        tensor = numbers(rank, 4)
        dist.all_reduce(tensor, group=local)
        results += [tensor, dist.get_process_group_ranks(local)]
    return results


@case(ours_only=True)
def groups_that_are_split_off(group: Any, rank: int, size: int) -> Any:
    part = group.split_group([1, 0], group_name="split", group_desc="two of them")
    assert (part is None) == (rank > 1)
    if part is not None:
        assert (part.rank(), part.size(), part.group_desc) == (1 - rank, 2, "two of them")
        tensor = torch.full((3,), float(rank))
        part.allreduce([tensor]).wait()
        assert tensor.tolist() == [1.0] * 3
        part.shutdown()
    return []
