"""Bodies for ``conformance``: what torch builds on process groups."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP needs it, and importing it takes seconds: before the forks
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.runtime.communicator.conformance import Suite, adder, numbers

LIBRARY: Suite = {}
case = adder(LIBRARY)


def model(seed: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def rows(rank: int, turn: int = 0) -> Tensor:
    return numbers(rank, 12, shift=turn).view(4, 3)


def gradients(module: torch.nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@case(rounds=True)
def data_parallel_training(group: Any, rank: int, size: int) -> Any:
    """Buckets of one parameter each; other seeds per rank, as rank 0's parameters are broadcast."""
    module = DistributedDataParallel(model(rank), process_group=group, bucket_cap_mb=1e-5)
    optimizer = torch.optim.SGD(module.parameters(), 0.25)
    for turn in range(3):
        with module.no_sync():
            module(rows(rank, turn)).sum().backward()
        module(rows(rank, turn + 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in module.parameters()]


@case(rounds=True)
def data_parallel_hooks(group: Any, rank: int, size: int) -> Any:
    results = []
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook):
        module = DistributedDataParallel(model(), process_group=group)
        module.register_comm_hook(group, hook)
        for turn in range(2):
            module(rows(rank, turn)).sum().backward()
        results += gradients(module)
    return results


@case(rounds=True)
def data_parallel_with_uneven_inputs(group: Any, rank: int, size: int) -> Any:
    module = DistributedDataParallel(model(), process_group=group)
    optimizer = torch.optim.SGD(module.parameters(), 0.25)
    with module.join():
        for turn in range(rank + 1):
            module(rows(rank, turn)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in module.parameters()]


@case(rounds=True)
def data_parallel_with_unused_parameters(group: Any, rank: int, size: int) -> Any:
    class Partial(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ModuleList(torch.nn.Linear(3, 1, bias=False) for _ in range(3))

        def forward(self, inputs: Tensor, part: int) -> Any:
            return self.parts[part](inputs)

    torch.manual_seed(1)
    module = DistributedDataParallel(Partial(), process_group=group, find_unused_parameters=True)
    module(rows(rank), rank % 2).sum().backward()
    return gradients(module)


@case(rounds=True)
def join_of_several_objects(group: Any, rank: int, size: int) -> Any:
    module = DistributedDataParallel(model(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, process_group=group, lr=0.25)
    with Join([module, optimizer]):
        for turn in range(size - rank):
            module(rows(rank, turn)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in module.parameters()]


@case()
def device_mesh_of_one_dimension(group: Any, rank: int, size: int) -> Any:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("all",))
    tensor = numbers(rank, 5)
    dist.all_reduce(tensor, group=mesh.get_group("all"))
    from_group = DeviceMesh.from_group(group, "cpu")
    return [tensor, mesh.get_local_rank(), mesh.size(), from_group.size(), from_group.mesh]


@case(least=4)
def device_mesh_of_two_dimensions(group: Any, rank: int, size: int) -> Any:
    if size % 2:
        return []
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    results: list[Any] = [mesh.get_coordinate()]
    for name in ("data", "tensor"):
        tensor = numbers(rank, 5)
        dist.all_reduce(tensor, group=mesh[name].get_group())
        results += [tensor, mesh[name].size(), dist.get_process_group_ranks(mesh.get_group(name))]
    flat = mesh["data", "tensor"]._flatten("both")
    tensor = numbers(rank, 5)
    dist.all_reduce(tensor, group=flat.get_group())
    return [*results, tensor, flat.size()]


@case()
def distributed_tensors(group: Any, rank: int, size: int) -> Any:
    mesh = init_device_mesh("cpu", (size,))
    whole = numbers(0, 4 * size * 3).view(4 * size, 3)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    across = sharded.redistribute(mesh, [Shard(1)]) if size <= 3 else sharded
    product = sharded.t() @ sharded
    return [
        sharded.to_local(),
        across.to_local(),
        sharded.full_tensor(),
        product.redistribute(mesh, [Replicate()]).to_local(),
        sharded.sum().full_tensor(),
    ]


@case(rounds=True)
def fully_sharded_training(group: Any, rank: int, size: int) -> Any:
    mesh = init_device_mesh("cpu", (size,))
    module = model()
    for part in module:
        if isinstance(part, torch.nn.Linear):
            fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(module.parameters(), 0.25)
    for turn in range(3):
        module(rows(rank, turn)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().detach() for parameter in module.parameters()]


@case(least=4, rounds=True)
def hybrid_sharded_training(group: Any, rank: int, size: int) -> Any:
    if size % 2:
        return []
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))
    module = model()
    fully_shard(module, mesh=mesh)
    module(rows(rank)).sum().backward()
    return [grad.full_tensor() for grad in gradients(module)]


@case()
def distributed_checkpoints(group: Any, rank: int, size: int) -> Any:
    mesh = init_device_mesh("cpu", (size,))
    whole = numbers(0, 4 * size * 3).view(4 * size, 3)
    state = {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "plain": numbers(7, 5), "step": 3}
    shared: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(shared, 0, group=group)
    folder = Path(shared[0])
    checkpoint.save(copy.copy(state), checkpoint_id=folder, process_group=group)
    loaded = {
        "sharded": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)]),
        "plain": torch.zeros(5),
        "step": 0,
    }
    checkpoint.load(loaded, checkpoint_id=folder, process_group=group)
    dist.barrier(group=group)
    if rank == 0:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    return [loaded["sharded"].full_tensor(), loaded["plain"], loaded["step"]]
