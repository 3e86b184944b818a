"""What ``torch.distributed`` keeps about groups, written when members change without ``dist.new_group``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_elas.runtime.communicator.process_group import ElasticProcessGroup
from megatron_elas.runtime.communicator.running_group import BACKEND


def owns_torch(groups: Sequence[ElasticProcessGroup]) -> bool:
    """Whether torch's default group is one of these, so that torch knows the others too."""
    return dist.is_initialized() and any(group is dist.GroupMember.WORLD for group in groups)


def init_torch(rank: int, size: int) -> None:
    """Make torch's default group over the registered backend; nothing is exchanged."""
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=size)


def write_ranks(group: ElasticProcessGroup, rank_of: Mapping[int, int]) -> None:
    """Bring torch's map of a group's global ranks up to date, in place; nothing for groups that it does not know."""
    ranks = c10d._world.pg_group_ranks.get(group)
    if ranks is not None:
        ranks.clear()
        ranks.update({rank_of[worker]: position for position, worker in enumerate(group.members)})


def write_own_rank(rank: int) -> None:
    """Tell torch's C++ side, which puts it into log lines."""
    torch._C._distributed_c10d._set_global_rank(rank)


def make_group(name: str, ranks: Sequence[int], position: int, description: str) -> None:
    """As ``dist.new_group``, on one process alone and under a given name; the backend makes the object.

    ``new_group`` itself counts its calls to find the name, which must be the same on all processes: one that comes
    later has not made the calls of the others.

    Args:
        name: Not taken yet.
        ranks: Global ranks, in group order.
        position: Own one in ``ranks``.
        description: See ``dist.new_group``.
    """
    _, store = c10d._world.pg_map[dist.GroupMember.WORLD]
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        position,
        list(ranks),
        BACKEND,
        store,
        name,
        timeout=c10d.default_pg_timeout,
        group_desc=description,
    )
    c10d._world.pg_group_ranks[group] = {rank: at for at, rank in enumerate(ranks)}


def count_group(name: str) -> None:
    """Have ``dist.new_group`` give later groups other names than this one."""
    if name.isdecimal():
        c10d._world.group_count = max(c10d._world.group_count, int(name) + 1)


def is_taken(name: str) -> bool:
    """True when torch knows a group of this name, of whatever backend."""
    return name in c10d._world.pg_names.values()
