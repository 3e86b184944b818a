"""What one placement makes of every group, and of what else knows groups: parallel_state, args.

A group's object never changes; its members do. They follow from what the group was made for and from this worker's
seat, not from who its first members were: a worker that comes to another stage has other replicas.

* WORLD: all seated workers.
* STAGE: all workers of the own stage.
* REPLICAS: those of the own stage and lane (data parallel).
* CELL: those of the own cell (tensor parallel).
* SELF: this worker (kinds of parallelism that are not in use).
* CHAIN: one worker per stage (pipeline, embedding): this worker's own view of the pipeline. Views differ
  between workers when stages have different numbers of cells, so no collective may use them.
* FUSED: whole pipelines (model parallel): after a loss, pipelines are no longer apart from one another, so
  these become one group of all seated workers.
* FIRST: groups of other descriptions inside one stage: the first members that still have a seat.

Channels: as long as all members are first members of the group, it keeps the channel it was made with. Otherwise
members held different groups at first, and use a channel that follows from description and order of creation alone. Of
each description and order a worker has one group, so it never has two groups on one channel.

Global ranks are dense again after an edit, in the order of seats (Placement.workers): Megatron compares them with the
world size to find the logging rank, which has to be on the last stage, and indexes lists by them.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

from megatron_elas.runtime.communicator.channels import channel_of
from megatron_elas.runtime.communicator.membership import GroupMembers
from megatron_elas.spec.layout import Placement
from megatron_elas.spec.plan import ElasticPlan

MIXED_CHANNELS = 1 << 30
"""Groups with members that had different groups at first take channels from here on, far above those c10d counts."""

_CHAIN_PREFIXES = ("PIPELINE", "EMBEDDING", "POSITION_EMBEDDING")


class GroupKind(enum.Enum):
    """What an edit does to a group."""

    WORLD = "world"
    STAGE = "stage"
    REPLICAS = "replicas"
    CELL = "cell"
    SELF = "self"
    CHAIN = "chain"
    FUSED = "fused"
    FIRST = "first"


_KINDS = {
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": GroupKind.WORLD,
    "TENSOR_AND_DATA_PARALLEL_GROUP": GroupKind.STAGE,
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": GroupKind.STAGE,
    "DATA_PARALLEL_GROUP": GroupKind.REPLICAS,
    "DATA_PARALLEL_GROUP_WITH_CP": GroupKind.REPLICAS,
    "DATA_PARALLEL_GROUP_WITH_CP_AG": GroupKind.REPLICAS,
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": GroupKind.REPLICAS,
    "EXPERT_DATA_PARALLEL_GROUP": GroupKind.REPLICAS,
    "EXPERT_DATA_PARALLEL_GROUP_AG": GroupKind.REPLICAS,
    "TENSOR_MODEL_PARALLEL_GROUP": GroupKind.CELL,
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": GroupKind.CELL,
    "EXPERT_TENSOR_PARALLEL_GROUP": GroupKind.CELL,
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": GroupKind.CELL,
    "CONTEXT_PARALLEL_GROUP": GroupKind.SELF,
    "EXPERT_MODEL_PARALLEL_GROUP": GroupKind.SELF,
    "GTP_WEIGHT_REMAT_GROUP": GroupKind.SELF,
    "EXPERT_GTP_WEIGHT_REMAT_GROUP": GroupKind.SELF,
    "MODEL_PARALLEL_GROUP": GroupKind.FUSED,
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": GroupKind.FUSED,
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP": GroupKind.FUSED,
}
"""By Megatron's description. Members alone do not tell: with one row and one lane, all groups of a stage are alike."""


class Group(Protocol):
    """The part of ElasticProcessGroup that is looked at here."""

    original_members: Sequence[int]
    description: str
    group_name: str


def classify_group(original_members: Sequence[int], description: str, initial: Placement) -> GroupKind:
    """What a group was made for, from its first members and Megatron's description of it.

    A description counts only if the first members are what it says; others are told from the members.
    """
    if description.startswith(_CHAIN_PREFIXES):
        return GroupKind.CHAIN
    stages = {initial.seat(worker).stage for worker in original_members}
    kind = _KINDS.get(description)
    if kind is GroupKind.FUSED and len(stages) == initial.num_stages:
        return kind
    if kind not in (None, GroupKind.FUSED) and _members(kind, initial, original_members[0]) == tuple(original_members):
        return kind
    if set(original_members) == set(initial.workers):
        return GroupKind.WORLD
    return GroupKind.FIRST if len(stages) == 1 else GroupKind.FUSED


def is_view(group: Group, initial: Placement) -> bool:
    """Whether its members may disagree about who the members are, so that nothing can be exchanged in it."""
    return classify_group(group.original_members, group.description, initial) is GroupKind.CHAIN


def plan_groups(
    groups: Sequence[Group], initial: Placement, placement: Placement, worker: int
) -> dict[str, GroupMembers]:
    """The members of every group of this process under the placement; ``worker`` must have a seat in it."""
    seen: dict[str, int] = {}
    planned = {}
    for group in groups:
        kind = classify_group(group.original_members, group.description, initial)
        order = seen.get(group.description, 0)
        seen[group.description] = order + 1
        channel = channel_of(group.group_name)
        if kind is GroupKind.CHAIN:
            members = _view(group, placement, worker)
        elif kind is GroupKind.FIRST:
            seated = placement.workers
            members = tuple(w for w in group.original_members if w in seated)
        else:
            members = _members(kind, placement, worker)
            if not set(members) <= set(group.original_members):
                channel = MIXED_CHANNELS + zlib.crc32(f"{group.description}/{order}".encode()) % MIXED_CHANNELS
        planned[group.group_name] = GroupMembers(
            members=members, channel=channel, description=group.description, is_view=kind is GroupKind.CHAIN
        )
    return planned


def _members(kind: GroupKind | None, placement: Placement, worker: int) -> tuple[int, ...]:
    """Who belongs to the worker's group of that kind, in rank order."""
    seat = placement.seat(worker)
    match kind:
        case GroupKind.STAGE:
            return tuple(w for cell in placement.stages[seat.stage] for w in cell.workers)
        case GroupKind.REPLICAS:
            return placement.replicas(seat.stage, seat.lane)
        case GroupKind.CELL:
            return placement.stages[seat.stage][seat.cell].workers
        case GroupKind.SELF:
            return (worker,)
        case _:
            return placement.workers


def _view(group: Group, placement: Placement, worker: int) -> tuple[int, ...]:
    """The worker's view of its pipeline, of its two ends if it is one of them, or itself."""
    chain = placement.chain(worker)
    if group.description.startswith("PIPELINE"):
        return chain
    is_end = worker in (chain[0], chain[-1])
    if group.description.startswith("EMBEDDING") and len(group.original_members) > 1 and is_end:
        return tuple(dict.fromkeys((chain[0], chain[-1])))
    return (worker,)


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
