"""Memory of this node's workers, foretold at start: told in one line, and refused when it is not there."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megatron.training.arguments import core_transformer_config_from_args

from megatron_elas.host.shape import describe_model, describe_training, find_uncovered
from megatron_elas.planner.memory import plan_memory, sum_memories
from megatron_elas.platform.host_memory import AvailableMemory
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.plan import ElasticPlan

OWN = {"replay": "gradients on their way to backups", "copy": "two versions of the own state"}
KEPT = {"replay": "the state and the gradients of others", "copy": "two versions of the state of others"}
"""By --elastic-snapshot, for people: what a worker keeps because of its own shard, and because of its wards'."""

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"))


def check_node_memory(
    args: Any, job: JobSpec, plan: ElasticPlan, workers: Collection[int], available: AvailableMemory
) -> str:
    """What the copies of optimizer state will take on this node, in one line for the log.

    On the CPU platform, the only one that has elasticity, weights, gradients, optimizer and activations are in host
    memory too; nothing of all that is allocated yet.

    Args:
        args: Megatron's, validated.
        job: That they describe.
        plan: Of epoch 0.
        workers: Of this node.
        available: To this process.

    Raises:
        BadUsage: It does not fit.
    """
    if uncovered := find_uncovered(args):
        return f"memory of copies cannot be told with {', '.join(uncovered)}"
    mode = args.elastic_snapshot
    config = core_transformer_config_from_args(args)
    memories = plan_memory(plan, job, describe_model(args, config), describe_training(args, ()), mode)
    here = [memories[worker] for worker in workers]
    node = sum_memories(here)
    who = f"workers {min(workers)}-{max(workers)}" if len(workers) > 1 else f"worker {min(workers)}"
    if node.needed > available.size:
        raise BadUsage(
            f"host memory is too small for {who}: {_size(node.needed)} = {_size(node.training)} for training, "
            f"{_size(node.copies)} for copies of optimizer state (--elastic-snapshot {mode}) and "
            f"{_size(node.recovery)} more while a recovery goes on; available are {_size(available.size)} "
            f"({available.source}): {_remedy(args)}"
        )
    if mode == "off":
        return "no copies of optimizer state are kept (--elastic-snapshot off), so a lost worker's needs a checkpoint"
    own, kept = sum(memory.own_copies for memory in here), sum(memory.backup_copies for memory in here)
    return (
        f"copies of optimizer state (--elastic-snapshot {mode}) take {_size(node.copies)} of host memory for {who}: "
        f"{_size(own)} for {OWN[mode]}, {_size(kept)} for {KEPT[mode]}; {_size(node.copies + node.recovery)} while a "
        f"recovery goes on, with old and new shards; training takes {_size(node.training)}, available are "
        f"{_size(available.size)}"
    )


def _remedy(args: Any) -> str:
    ways = ["start fewer workers on this node", "raise the limit"]
    if args.elastic_snapshot != "off":
        ways.append("keep fewer copies with --elastic-snapshot off")
        if args.elastic_snapshot_replicas > 1:
            ways[-1] = f"keep fewer copies than --elastic-snapshot-replicas {args.elastic_snapshot_replicas}"
        elif args.elastic_snapshot == "copy":
            ways[-1] = "keep smaller copies with --elastic-snapshot replay"
    return ", ".join(ways[:-1]) + f", or {ways[-1]}"


def _size(size: int) -> str:
    """``1.5 GiB``, ``0.4 MiB``."""
    unit, name = next((pair for pair in _UNITS if size >= pair[0]), _UNITS[-1])
    return f"{size / unit:.1f} {name}"
