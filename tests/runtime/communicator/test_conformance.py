"""What torch.distributed gives with gloo, it gives with the elastic backend too.

Every case runs once on gloo and once on ours in the same four processes. Inputs are small whole numbers, so sums are
exact in every dtype and results must be equal.
"""

from __future__ import annotations

import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP needs it, and importing it takes seconds: before the forks
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed import ReduceOp

from megatron_elas.runtime.communicator.communicator import Communicator
from tests.runtime.workers import introduce, run_workers

pytestmark = pytest.mark.process

SIZE = 4
Case = Callable[[Any, int, int], Any]
CASES: dict[str, Case] = {}

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INTEGERS = [torch.int32, torch.int64, torch.int8, torch.uint8]
DTYPES = [*FLOATS, *INTEGERS, torch.bool]
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
ONLY_OURS = {
    *(f"all_reduce AVG {dtype}" for dtype in FLOATS),
    "reduce_scatter AVG",
    "all_gather of different lengths",
}
"""gloo refuses these, or takes them only in some versions of torch."""


def case(function: Case) -> Case:
    CASES[function.__name__.replace("_", " ").strip()] = function
    return function


def numbers(rank: int, length: int, dtype: torch.dtype = torch.float32, shift: int = 0) -> Tensor:
    """0, 1, 2 or 3, differing by rank."""
    return ((torch.arange(length) * 7 + rank * 5 + shift) % 4).to(dtype)


def expected_reduction(op: str, dtype: torch.dtype, length: int) -> Tensor:
    total = numbers(0, length, dtype)
    for rank in range(1, SIZE):
        total = COMBINE[op](total, numbers(rank, length, dtype))
    return total / SIZE if op == "AVG" else total


def add_all_reduce(op: str, dtype: torch.dtype) -> None:
    def run(group: Any, rank: int, size: int) -> Any:
        results = []
        for length in (1, 5, 40_000):
            tensor = numbers(rank, length, dtype)
            dist.all_reduce(tensor, OPS[op][0], group=group)
            assert torch.equal(tensor, expected_reduction(op, dtype, length)), "is not what it should be"
            results.append(tensor)
        return results

    CASES[f"all_reduce {op} {dtype}"] = run


for _op, (_, _dtypes) in OPS.items():
    for _dtype in _dtypes:
        add_all_reduce(_op, _dtype)


@case
def all_reduce_asynchronous_ones_in_order(group: Any, rank: int, size: int) -> Any:
    tensors = [numbers(rank, 1 + 1000 * at, shift=at) for at in range(8)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    last = numbers(rank, 3)
    dist.all_reduce(last, group=group)  # synchronous, behind them
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
    return [*tensors, last]


@case
def all_reduce_future(group: Any, rank: int, size: int) -> Any:
    work = dist.all_reduce(numbers(rank, 9), group=group, async_op=True)
    value = work.get_future().wait()
    return value[0] if isinstance(value, list) else value


@case
def all_reduce_of_strided_and_scalar_tensors(group: Any, rank: int, size: int) -> Any:
    strided = numbers(rank, 40).view(5, 8).t().contiguous().t()
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar, group=group)
    if "gloo" not in str(dist.get_backend(group)):  # gloo wants contiguous tensors
        every_other = numbers(rank, 40)[::2]
        dist.all_reduce(every_other, group=group)
        total = sum(numbers(at, 40)[::2] for at in range(size))
        assert torch.equal(every_other, total)
        dist.all_reduce(strided, group=group)
        assert torch.equal(strided, sum(numbers(at, 40) for at in range(size)).view(5, 8))
    return scalar


@case
def all_reduce_of_a_parameter(group: Any, rank: int, size: int) -> Any:
    parameter = torch.nn.Parameter(numbers(rank, 6))
    with torch.no_grad():
        dist.all_reduce(parameter, group=group)
    return parameter.detach()


@case
def reduce(group: Any, rank: int, size: int) -> Any:
    results = []
    for root in range(size):
        tensor = numbers(rank, 50_000 if root == 1 else 5)
        dist.reduce(tensor, root, op=ReduceOp.SUM, group=group)
        if rank == root:
            results.append(tensor)
    return results


@case
def reduce_scatter_list(group: Any, rank: int, size: int) -> Any:
    output = torch.empty(7)
    dist.reduce_scatter(output, list(numbers(rank, 7 * size).split(7)), group=group)
    return output


@case
def reduce_scatter_tensor(group: Any, rank: int, size: int) -> Any:
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        output = torch.empty(30_000, dtype=dtype)
        dist.reduce_scatter_tensor(output, numbers(rank, 30_000 * size, dtype), group=group)
        results.append(output)
    return results


def _reduce_scatter_average(group: Any, rank: int, size: int) -> Any:
    output = torch.empty(3)
    dist.reduce_scatter_tensor(output, numbers(rank, 3 * size), op=ReduceOp.AVG, group=group)
    assert torch.equal(output, expected_reduction("AVG", torch.float32, 3 * size)[3 * rank : 3 * rank + 3])
    return output


CASES["reduce_scatter AVG"] = _reduce_scatter_average


@case
def all_gather_list(group: Any, rank: int, size: int) -> Any:
    results = []
    for dtype in DTYPES:
        slots = [torch.empty(3, 4, dtype=dtype) for _ in range(size)]
        dist.all_gather(slots, numbers(rank, 12, dtype).view(3, 4), group=group)
        results += slots
    return results


@case
def all_gather_into_tensor_also_in_place(group: Any, rank: int, size: int) -> Any:
    output = torch.empty(size * 20_000)
    dist.all_gather_into_tensor(output, numbers(rank, 20_000), group=group)
    whole = torch.zeros(size * 5)
    own = whole[rank * 5 : rank * 5 + 5]
    own.copy_(numbers(rank, 5))
    dist.all_gather_into_tensor(whole, own, group=group)
    return [output, whole]


def _all_gather_uneven(group: Any, rank: int, size: int) -> Any:
    slots = [torch.empty(at + 1) for at in range(size)]
    dist.all_gather(slots, numbers(rank, rank + 1), group=group)
    assert all(torch.equal(slot, numbers(at, at + 1)) for at, slot in enumerate(slots))
    return slots


CASES["all_gather of different lengths"] = _all_gather_uneven


@case
def broadcast(group: Any, rank: int, size: int) -> Any:
    results = []
    for root in range(size):
        for dtype in DTYPES:
            tensor = numbers(rank, 11, dtype)
            dist.broadcast(tensor, root, group=group)
            results.append(tensor)
    large = numbers(rank, 500_000)
    dist.broadcast(large, 2, group=group)
    return [*results, large]


@case
def gather(group: Any, rank: int, size: int) -> Any:
    results = []
    for root in range(size):
        slots = [torch.empty(5) for _ in range(size)] if rank == root else None
        dist.gather(numbers(rank, 5), slots, root, group=group)
        results += slots or []
    return results


@case
def scatter(group: Any, rank: int, size: int) -> Any:
    results = []
    for root in range(size):
        output = torch.empty(5)
        shares = [numbers(at, 5, shift=root) for at in range(size)] if rank == root else None
        dist.scatter(output, shares, root, group=group)
        results.append(output)
    return results


@case
def all_to_all_single(group: Any, rank: int, size: int) -> Any:
    even = torch.empty(2 * size, 3)
    dist.all_to_all_single(even, numbers(rank, 6 * size).view(2 * size, 3), group=group)
    sends = [(rank + at) % 3 for at in range(size)]
    receives = [(at + rank) % 3 for at in range(size)]
    uneven = torch.empty(sum(receives), 2)
    dist.all_to_all_single(uneven, numbers(rank, 2 * sum(sends)).view(-1, 2), receives, sends, group=group)
    return [even, uneven]


@case
def send_and_receive_around_the_ring(group: Any, rank: int, size: int) -> Any:
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for length in (3, 300_000):
            got = torch.empty(length, dtype=dtype)
            work = dist.isend(numbers(rank, length, dtype), (rank + 1) % size, group=group)
            dist.recv(got, (rank - 1) % size, group=group)
            work.wait()
            results.append(got)
    return results


@case
def batch_isend_irecv(group: Any, rank: int, size: int) -> Any:
    following, preceding = (rank + 1) % size, (rank - 1) % size
    forward, backward = torch.empty(200_000), torch.empty(5)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, forward, preceding, group),
            dist.P2POp(dist.isend, numbers(rank, 200_000), following, group),
            dist.P2POp(dist.irecv, backward, following, group),
            dist.P2POp(dist.isend, numbers(rank, 5, shift=1), preceding, group),
        ]
    )
    for work in works:
        work.wait()
    return [forward, backward]


@case
def barrier(group: Any, rank: int, size: int) -> Any:
    dist.barrier(group=group)
    work = dist.barrier(group=group, async_op=True)
    work.wait()
    return []


@case
def objects(group: Any, rank: int, size: int) -> Any:
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank * 1000}, group=group)
    sent = [f"from {rank}", rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(sent, 1, group=group)
    at_root: list[Any] | None = [None] * size if rank == 2 else None
    dist.gather_object((rank,), at_root, 2, group=group)
    share: list[Any] = [None]
    dist.scatter_object_list(share, [f"to {at}" for at in range(size)] if rank == 0 else None, 0, group=group)
    return [gathered, sent, at_root, share]


@case
def coalesced(group: Any, rank: int, size: int) -> Any:
    first, second = numbers(rank, 5), numbers(rank, 30_000)
    with dist._coalescing_manager(group, async_ops=True) as manager:
        dist.all_reduce(first, group=group)
        dist.all_reduce(second, group=group)
    manager.wait()
    outputs = [torch.empty(size * 4), torch.empty(size * 6)]
    with dist._coalescing_manager(group):
        for output, length in zip(outputs, (4, 6), strict=True):
            dist.all_gather_into_tensor(output, numbers(rank, length), group=group)
    shares = [torch.empty(4), torch.empty(6)]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for share in shares:
            dist.reduce_scatter_tensor(share, numbers(rank, share.numel() * size), group=group)
    manager.wait()
    return [first, second, *outputs, *shares]


@case
def functional_collectives(group: Any, rank: int, size: int) -> Any:
    reduced = functional.all_reduce(numbers(rank, 5), "sum", group)
    gathered = functional.all_gather_tensor(numbers(rank, 4), 0, group)
    scattered = functional.reduce_scatter_tensor(numbers(rank, 4 * size), "sum", 0, group)
    copied = functional.broadcast(numbers(rank, 3), 1, group)
    exchanged = functional.all_to_all_single(numbers(rank, size), None, None, group)
    return [functional.wait_tensor(each).clone() for each in (reduced, gathered, scattered, copied, exchanged)]


@case
def distributed_data_parallel(group: Any, rank: int, size: int) -> Any:
    torch.manual_seed(rank)  # DDP broadcasts rank 0's
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
    module(numbers(rank, 6).view(2, 3)).sum().backward()
    return [*(p.detach() for p in module.parameters()), *(p.grad for p in module.parameters())]


@case
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


@case
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
    return results


# ---------------------------------------------------------------- running


def run_cases(group: Any, rank: int) -> dict[str, tuple[str, Any]]:
    outcomes: dict[str, tuple[str, Any]] = {}
    gloo = "gloo" in str(dist.get_backend(group))
    for name, function in CASES.items():
        if gloo and name in ONLY_OURS:
            continue
        try:
            outcomes[name] = ("returned", function(group, rank, SIZE))
        except Exception:
            outcomes[name] = ("raised", traceback.format_exc())
            if not gloo:
                return outcomes  # the others of the group may be elsewhere
    return outcomes


def worker_body(rank: int, folder: Path) -> Any:
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", SIZE),
        rank=rank,
        world_size=SIZE,
        timeout=timedelta(seconds=10),
    )
    theirs = run_cases(dist.new_group(list(range(SIZE)), group_desc="everybody"), rank)
    dist.destroy_process_group()

    transport = introduce(rank, SIZE, folder)
    communicator = Communicator(transport, range(SIZE))
    communicator.register_backend()
    dist.init_process_group("elastic", store=dist.HashStore(), rank=rank, world_size=SIZE)
    ours = run_cases(dist.new_group(list(range(SIZE)), group_desc="everybody"), rank)
    dist.barrier()
    communicator.close()
    transport.close()
    return theirs, ours


@pytest.fixture(scope="module")
def outcomes() -> list[tuple[dict[str, tuple[str, Any]], dict[str, tuple[str, Any]]]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_workers(SIZE, worker_body, Path(folder), timeout_s=60)


def equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor):
        return isinstance(theirs, Tensor) and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, list):
        return isinstance(theirs, list) and len(ours) == len(theirs) and all(map(equal, ours, theirs))
    return bool(ours == theirs)


@pytest.mark.parametrize("name", CASES)
def test_the_elastic_backend_gives_what_gloo_gives(name: str, outcomes: Any) -> None:
    for rank, (theirs, ours) in enumerate(outcomes):
        kind, value = ours[name]
        assert kind == "returned", f"rank {rank}: {value}"
        if name not in ONLY_OURS:
            assert theirs[name][0] == "returned", f"gloo, rank {rank}: {theirs[name][1]}"
            assert equal(value, theirs[name][1]), f"rank {rank}: {value} is not gloo's {theirs[name][1]}"
