"""Run by ``elasrun`` in fault tests: ``pretrain_gpt``, which also writes down what each worker held.

In the folder ELAS_TEST_OUT: ``final.W.pt`` at the end of training, and ``version.V.epoch.E.W.pt`` before every run of
the steps named in ELAS_TEST_VERSIONS.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

from megatron_elas import pretrain_gpt


def main() -> int:
    """Train with recording switched on."""
    pretrain_gpt.preload()
    from megatron_elas import worker
    from megatron_elas.host.training import MegatronHost

    begin_step, finish = MegatronHost.begin_step, worker.finish
    wanted = {int(v) for v in os.environ.get("ELAS_TEST_VERSIONS", "").split(",") if v}

    def record_version(host: Any, step: int, data_iterator: Any) -> None:
        if step in wanted:
            attached = attachment()
            epoch = attached.session.plan.epoch
            save(f"version.{step}.epoch.{epoch}", attached.worker, shard(attached))
        begin_step(host, step, data_iterator)

    def record_end() -> None:
        attached = attachment()
        attached.communicator.muted = attached.communicator.tolerant = False
        state = shard(attached)
        state |= {"problems": find_stale(attached), "reduced": reduce_all(attached)}
        state["parameters"] = {name: param.detach().clone() for name, param in parameters(attached)}
        save("final", attached.worker, state)
        finish()

    MegatronHost.begin_step = record_version  # type: ignore[method-assign]
    worker.finish = record_end
    return pretrain_gpt.main()


def attachment() -> Any:
    """Of this process."""
    from megatron_elas.host.attachment import attachment

    return attachment()


def parameters(attached: Any) -> Any:
    """(name, parameter) of this worker's stage."""
    from megatron_elas.host.model import named_parameters

    return named_parameters(attached.host._model)


def shard(attached: Any) -> dict[str, Any]:
    """Where this worker sits and its optimizer shard, piece by piece."""
    import torch

    access = attached.host._access
    layout = access.layout()
    flat = torch.empty(layout.flat_numel)
    access.read(flat)
    slots = flat[:-1].view(3, -1)
    seat = attached.route.seat
    pieces = [
        (piece.name, piece.start, piece.stop, slots[:, offset : offset + piece.numel].clone())
        for piece, offset in zip(layout.pieces, layout.offsets(), strict=True)
    ]
    return {"stage": seat.stage, "lane": seat.lane, "pieces": pieces, "step": float(flat[-1]), "pid": os.getpid()}


def save(name: str, worker: int, value: dict[str, Any]) -> None:
    """Write a record."""
    import torch

    torch.save(value, Path(os.environ["ELAS_TEST_OUT"]) / f"{name}.{worker}.pt")


def find_stale(attached: Any) -> list[str]:
    """Walk over all live objects; what knows a worker that is gone, or a group or optimizer that was replaced."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
    from megatron.core.utils import get_model_config
    from megatron.training import get_args

    from megatron_elas.host.groups import rank_lists
    from megatron_elas.host.model import bucket_groups_of, buffers_of
    from megatron_elas.runtime.communicator.process_group import ElasticProcessGroup

    problems = []
    host = attached.host
    alive = attached.session.plan.placement.workers
    rank_of = {worker: rank for rank, worker in enumerate(alive)}
    known = attached.communicator.groups
    gc.collect()
    for thing in gc.get_objects():
        if isinstance(thing, ElasticProcessGroup):
            if thing not in known:
                problems.append(f"{thing} is not one of the communicator's groups")
            if not set(thing.members) <= set(alive):
                problems.append(f"{thing} has members {thing.members}, alive are {alive}")
        elif isinstance(thing, ProcessGroupCollection):
            problems += [f"{thing} holds {group}" for group in vars(thing).values() if stranger(group, known)]
        elif isinstance(thing, DistributedOptimizer) and thing not in host._optimizer.chained_optimizers:
            problems.append(f"an old {type(thing).__name__} is still alive")
    for group in known:
        ranks = [rank_of[worker] for worker in group.members]
        if dist.get_process_group_ranks(group) != ranks or dist.get_world_size(group) != len(ranks):
            problems.append(f"{group}: torch says ranks {dist.get_process_group_ranks(group)}, members {group.members}")
    for name, group in rank_lists().items():
        if list(getattr(parallel_state, name)) != [rank_of[worker] for worker in group.members]:
            problems.append(f"parallel_state.{name} is {getattr(parallel_state, name)}, members are {group.members}")
    for name, value in vars(parallel_state).items():
        if stranger(value, known):
            problems.append(f"parallel_state.{name} holds {value}")
    for bucket_group in bucket_groups_of(host._model):
        group = bucket_group.intra_distributed_optimizer_instance_group
        if bucket_group.intra_distributed_optimizer_instance_size != group.size():
            problems.append("a bucket group remembers another number of replicas")
        if bucket_group.intra_distributed_optimizer_instance_rank != group.rank():
            problems.append("a bucket group remembers another rank among its replicas")
        for views in (bucket_group.cached_param_buffer_shard_list, bucket_group.cached_grad_buffer_shard_list):
            if any(view is not None and len(view) != group.size() for view in views):
                problems.append("a bucket group remembers slices for another number of replicas")
    problems += [
        "a buffer remembers another number of replicas"
        for buffer in buffers_of(host._model)
        if buffer.data_parallel_world_size != buffer.data_parallel_group.size()
    ]
    if get_rerun_state_machine().get_mode() is RerunMode.DISABLED:
        problems.append("an evaluation left the rerun machine disabled")
    if not all(chunk.training for chunk in host._model) or get_model_config(host._model[0]).timers is None:
        problems.append("an evaluation left the model as it needs it")
    if (get_args().rank, get_args().world_size) != (rank_of[attached.worker], len(alive)):
        problems.append(f"args.rank and args.world_size are {get_args().rank} and {get_args().world_size}")
    return problems


def stranger(value: Any, known: list[Any]) -> bool:
    """Whether it is a process group that is not one of ours."""
    import torch.distributed as dist

    return isinstance(value, dist.ProcessGroup) and value not in known


def reduce_all(attached: Any) -> dict[str, tuple[int, float]]:
    """(size, sum of ones) of every group that may carry collectives, by name."""
    import torch
    import torch.distributed as dist

    from megatron_elas.host.groups import GroupKind, classify_group

    sums = {}
    for number, group in enumerate(attached.communicator.groups):
        if classify_group(group.original_members, group.description, attached.initial) is not GroupKind.CHAIN:
            one = torch.ones(1)
            dist.all_reduce(one, group=group)
            sums[f"{number} {group.description}"] = (group.size(), float(one))
    return sums


if __name__ == "__main__":
    sys.exit(main())
