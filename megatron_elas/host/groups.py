"""What one placement makes of every group, and of what else knows groups: parallel_state, args.

A group's object never changes; its members do. What an edit means depends on what the group was
made for:

* WORLD: all seated workers.
* STAGE: inside one stage (data parallel, tensor parallel, ...): its members that still have a seat.
* CHAIN: one worker per stage (pipeline, embedding): this worker's own view of the pipeline. Views differ
  between workers when stages have different numbers of cells, so no collective may use them.
* FUSED: whole pipelines (model parallel): after a loss, pipelines are no longer apart from one another, so
  these become one group of all seated workers, on a channel that all of them derive alike.

Global ranks are dense again after an edit (ascending worker id): Megatron compares them with the world
size to find the logging rank, and indexes lists by them.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

from megatron_elas.runtime.communicator.membership import GroupMembers
from megatron_elas.spec.layout import Placement
from megatron_elas.spec.plan import ElasticPlan

FUSED_CHANNELS = 1 << 30
"""Fused groups take channels from here on, far above those that c10d counts."""

_CHAIN_PREFIXES = ("PIPELINE", "EMBEDDING", "POSITION_EMBEDDING")


class GroupKind(enum.Enum):
    """What an edit does to a group."""

    WORLD = "world"
    STAGE = "stage"
    CHAIN = "chain"
    FUSED = "fused"


class Group(Protocol):
    """The part of ElasticProcessGroup that is looked at here."""

    original_members: Sequence[int]
    description: str
    group_name: str


def classify_group(original_members: Sequence[int], description: str, initial: Placement) -> GroupKind:
    """What a group was made for, from its first members and Megatron's description of it."""
    if description.startswith(_CHAIN_PREFIXES):
        return GroupKind.CHAIN
    if set(original_members) == set(initial.workers):
        return GroupKind.WORLD
    if len({initial.seat(worker).stage for worker in original_members}) == 1:
        return GroupKind.STAGE
    return GroupKind.FUSED


def is_view(group: Group, initial: Placement) -> bool:
    """Whether its members may disagree about who the members are, so that nothing can be exchanged in it."""
    return classify_group(group.original_members, group.description, initial) is GroupKind.CHAIN


def plan_groups(
    groups: Sequence[Group], initial: Placement, placement: Placement, worker: int
) -> dict[str, GroupMembers]:
    """The members of every group of this process under the placement; ``worker`` must have a seat in it."""
    seated = placement.workers
    chain = placement.chain(worker)
    seen: dict[str, int] = {}
    planned = {}
    for group in groups:
        kind = classify_group(group.original_members, group.description, initial)
        order = seen.get(group.description, 0)
        seen[group.description] = order + 1
        channel = None
        if kind is GroupKind.WORLD:
            members = seated
        elif kind is GroupKind.STAGE:
            members = tuple(w for w in group.original_members if w in seated)
        elif kind is GroupKind.CHAIN:
            members = tuple(chain[stage] for stage in sorted({initial.seat(w).stage for w in group.original_members}))
        else:
            members = seated
            channel = FUSED_CHANNELS + zlib.crc32(f"{group.description}/{order}".encode()) % FUSED_CHANNELS
        planned[group.group_name] = GroupMembers(
            members=members, channel=channel, description=group.description, is_view=kind is GroupKind.CHAIN
        )
    return planned


def rank_lists() -> dict[str, Any]:
    """Every list of global ranks that parallel_state caches, by its name, with the group it belongs to."""
    from megatron.core import parallel_state

    found = {}
    for name in vars(parallel_state):
        if "_RANKS" in name and getattr(parallel_state, name) is not None:
            group_name = _GROUP_OF_RANKS.get(name, name.replace("_GLOBAL_RANKS", "_GROUP").replace("_RANKS", "_GROUP"))
            found[name] = getattr(parallel_state, group_name)
    return found


_GROUP_OF_RANKS = {"_PIPELINE_GLOBAL_RANKS": "_PIPELINE_MODEL_PARALLEL_GROUP"}


def write_globals(plan: ElasticPlan, worker: int) -> None:
    """Bring parallel_state's rank lists, Megatron's ``args`` and straggler detector in line with the edited groups."""
    from megatron.core import parallel_state
    from megatron.core.utils import StragglerDetector
    from megatron.training import get_args

    rank_of = {w: rank for rank, w in enumerate(plan.placement.workers)}
    for name, group in rank_lists().items():
        ranks = getattr(parallel_state, name)
        ranks[:] = [rank_of[w] for w in group.members]
    args = get_args()
    args.rank = rank_of[worker]
    args.world_size = len(rank_of)
    detector = StragglerDetector._instance  # the one of the process: calling the class would reset it
    if detector.world:  # 0 without --log-straggler
        detector.rank, detector.world = args.rank, args.world_size


def keep_data_parallel_size_logical(data_parallel: int) -> None:
    """Make ``get_data_parallel_world_size()`` the number of rows for the whole run.

    The training loop counts consumed samples with it; physical sizes come from the groups themselves.
    """
    from megatron.core import parallel_state

    parallel_state._MPU_DATA_PARALLEL_WORLD_SIZE = data_parallel
