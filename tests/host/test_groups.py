"""What an edit makes of each of Megatron's groups."""

from __future__ import annotations

import importlib.util
import itertools
import random
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_elas.host.groups import (
    _CHAIN_PREFIXES,
    _KINDS,
    MIXED_CHANNELS,
    GroupKind,
    classify_group,
    plan_groups,
)
from megatron_elas.planner.plan import initial_plan, replan
from megatron_elas.runtime.communicator.membership import GroupMembers
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.layout import Cell, Placement

JOB = JobSpec(tensor_parallel=1, pipeline_parallel=2, data_parallel=2, micro_batch_size=1, num_microbatches=8)
FIRST = initial_plan(JOB, {})
INITIAL = FIRST.placement


class Group(NamedTuple):
    """Name, members and a description, as the communicator's groups have."""

    group_name: str
    original_members: Sequence[int]
    description: str


@pytest.mark.parametrize(
    ("members", "description", "kind"),
    [
        ([0, 1, 2, 3], "default_pg", GroupKind.WORLD),
        ([2, 3], "DATA_PARALLEL_GROUP", GroupKind.REPLICAS),
        ([2], "TENSOR_MODEL_PARALLEL_GROUP", GroupKind.CELL),
        ([2], "CONTEXT_PARALLEL_GROUP", GroupKind.SELF),
        ([2, 3], "TENSOR_AND_DATA_PARALLEL_GROUP", GroupKind.STAGE),
        ([1, 3], "PIPELINE_MODEL_PARALLEL_GROUP", GroupKind.CHAIN),
        ([1, 3], "EMBEDDING_GROUP", GroupKind.CHAIN),
        ([0], "POSITION_EMBEDDING_GROUP", GroupKind.CHAIN),
        ([1, 3], "MODEL_PARALLEL_GROUP", GroupKind.FUSED),
        ([2, 3], "undefined", GroupKind.FIRST),
        ([1, 3], "undefined", GroupKind.FUSED),
        ([2, 3], "TENSOR_MODEL_PARALLEL_GROUP", GroupKind.FIRST),
    ],
)
def test_a_group_is_what_its_description_and_its_first_members_say(
    members: list[int], description: str, kind: GroupKind
) -> None:
    assert classify_group(members, description, INITIAL) is kind


def groups_of(worker: int) -> list[Group]:
    row, stage = worker % 2, worker // 2
    first_of_chain = [] if row else [Group("first of chain", [row], "POSITION_EMBEDDING_GROUP")]
    return [
        Group("world", [0, 1, 2, 3], "default_pg"),
        Group("replicas", [2 * stage, 2 * stage + 1], "DATA_PARALLEL_GROUP"),
        Group("chain", [row, 2 + row], "PIPELINE_MODEL_PARALLEL_GROUP"),
        *first_of_chain,  # worker 1 is not in row 0's position group, and so on
        Group("pipeline", [row, 2 + row], "MODEL_PARALLEL_GROUP"),
        Group("pipeline again", [row, 2 + row], "MODEL_PARALLEL_GROUP"),
    ]


def test_after_a_loss_no_group_holds_the_lost_worker_and_all_survivors_agree() -> None:
    placement = replan(JOB, FIRST, [2], 1, {}).placement
    planned = {worker: plan_groups(groups_of(worker), INITIAL, placement, worker) for worker in placement.workers}
    for worker, groups in planned.items():
        assert list(groups) == [group.group_name for group in groups_of(worker)]
        assert all(2 not in group.members and worker in group.members for group in groups.values())
        assert groups["world"].members == (0, 1, 3)
        assert groups["pipeline"].members == groups["pipeline again"].members == (0, 1, 3)
        assert [name for name, group in groups.items() if group.is_view] == [n for n in groups if "chain" in n]
    assert planned[0]["replicas"].members == planned[1]["replicas"].members == (0, 1)
    assert planned[3]["replicas"].members == (3,)
    assert planned[0]["chain"].members == (0, 3) and planned[1]["chain"].members == (1, 3)
    assert planned[3]["chain"].members == (0, 3), "the only cell of stage 1 sees the first cell of stage 0"
    channels = {tuple(groups[name].channel for name in ("pipeline", "pipeline again")) for groups in planned.values()}
    assert len(channels) == 1, "groups that become one need one channel"
    first, second = channels.pop()
    assert first != second and first is not None and first >= MIXED_CHANNELS


# ------------------------------------------------------------ workers that change places

DESCRIPTIONS = {
    "DATA_PARALLEL_GROUP": "stage lane",
    "DATA_PARALLEL_GROUP_WITH_CP": "stage lane",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "stage lane",
    "EXPERT_DATA_PARALLEL_GROUP": "stage lane",
    "TENSOR_MODEL_PARALLEL_GROUP": "stage row",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "stage row",
    "EXPERT_TENSOR_PARALLEL_GROUP": "stage row",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "stage row",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "stage",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "stage",
    "CONTEXT_PARALLEL_GROUP": "stage row lane",
    "EXPERT_MODEL_PARALLEL_GROUP": "stage row lane",
    "MODEL_PARALLEL_GROUP": "row",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "row",
    "PIPELINE_MODEL_PARALLEL_GROUP": "row lane",
    "EMBEDDING_GROUP": "row lane",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "",
}
"""What the members of one group have in common at launch."""


def launch_groups(initial: Placement) -> dict[int, list[Group]]:
    """The groups of every worker, named by number as c10d does."""
    groups: dict[int, list[Group]] = defaultdict(list)
    for worker in initial.workers:
        groups[worker].append(Group("0", initial.workers, "default_pg"))
    names = itertools.count(1)
    for description, common in DESCRIPTIONS.items():
        found: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for worker in initial.workers:
            seat = initial.seat(worker)
            place = {"stage": seat.stage, "row": seat.cell, "lane": seat.lane}
            found[tuple(place[word] for word in common.split())].append(worker)
        for members in found.values():
            if description.startswith("EMBEDDING"):  # the two ends only
                members = [members[0], members[-1]]
            name = str(next(names))
            for worker in members:
                groups[worker].append(Group(name, tuple(members), description))
    return groups


def placements(job: JobSpec, seed: int) -> Iterator[Placement]:
    """Workers in any seats, of any number of stages, cells and spares, one epoch after the other."""
    chance = random.Random(seed)
    for _ in range(8):
        workers = list(range(job.world_size))
        chance.shuffle(workers)
        lanes = job.tensor_parallel
        cells = [tuple(workers[at : at + lanes]) for at in range(0, len(workers), lanes)]
        del cells[chance.randint(1, len(cells)) :]
        stages: list[list[Cell]] = [[] for _ in range(chance.randint(1, min(job.pipeline_parallel, len(cells))))]
        for number, cell in enumerate(cells):
            stage = stages[number] if number < len(stages) else chance.choice(stages)
            stage.append(Cell(row=len(stage), workers=cell))
        yield Placement(stages=tuple(map(tuple, stages)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("grid", [(1, 4, 1), (1, 2, 2), (2, 2, 2), (2, 3, 3), (1, 1, 4)])
def test_wherever_workers_go_members_agree_on_members_and_channel(grid: tuple[int, int, int], seed: int) -> None:
    tensor, pipeline, data = grid
    job = JobSpec(
        tensor_parallel=tensor, pipeline_parallel=pipeline, data_parallel=data, micro_batch_size=1,
        num_microbatches=data,
    )  # fmt: skip
    initial = initial_plan(job, {}).placement
    groups = launch_groups(initial)
    for placement in (initial, *placements(job, seed)):
        planned = {worker: plan_groups(groups[worker], initial, placement, worker) for worker in placement.workers}
        by_channel = {worker: index_by_channel(mine) for worker, mine in planned.items()}
        for worker, mine in planned.items():
            assert len({group.channel for group in mine.values()}) == len(mine), f"worker {worker}: one channel twice"
            assert all(
                worker in group.members and set(group.members) <= set(placement.workers) for group in mine.values()
            )
            for group in mine.values():
                for member in () if group.is_view else group.members:
                    theirs = by_channel[member][group.channel]
                    assert (theirs.members, theirs.description) == (group.members, group.description)
            assert_purposes(mine, placement, worker)
        if placement is initial:
            for worker, mine in planned.items():
                for group in groups[worker]:
                    if DESCRIPTIONS.get(group.description) != "row":  # these become one of all
                        assert mine[group.group_name].channel == int(group.group_name), "a channel changed for nothing"


def index_by_channel(groups: Mapping[str, GroupMembers]) -> dict[int | None, GroupMembers]:
    return {group.channel: group for group in groups.values() if not group.is_view}


def assert_purposes(mine: Mapping[str, GroupMembers], placement: Placement, worker: int) -> None:
    """Of a moved worker as of one that stayed."""
    seat = placement.seat(worker)
    expected = {
        "stage lane": placement.replicas(seat.stage, seat.lane),
        "stage row": placement.stages[seat.stage][seat.cell].workers,
        "stage": tuple(w for cell in placement.stages[seat.stage] for w in cell.workers),
        "stage row lane": (worker,),
        "row": placement.workers,
        "": placement.workers,
    }
    for group in mine.values():
        common = DESCRIPTIONS.get(group.description, "")
        if not group.is_view:
            assert group.members == expected[common], f"{group.description} of worker {worker}"
    chain = placement.chain(worker)
    views = {group.description: group.members for group in mine.values() if group.is_view}
    assert views["PIPELINE_MODEL_PARALLEL_GROUP"] == chain
    if "EMBEDDING_GROUP" in views:
        ends = tuple(dict.fromkeys((chain[0], chain[-1])))
        assert views["EMBEDDING_GROUP"] == (ends if worker in ends else (worker,))


def test_all_descriptions_of_megatron_are_known_and_their_channels_differ() -> None:
    """As far as parallelism that ``--elastic`` covers makes them."""
    (package,) = importlib.util.find_spec("megatron").submodule_search_locations  # type: ignore[union-attr, misc]
    source = (Path(package) / "core" / "parallel_state.py").read_text()
    written = set(re.findall(r"group_desc=[\"'](\w+)[\"']", source))
    assert len(written) > 10
    unknown = {name for name in written - _KINDS.keys() if not name.startswith(_CHAIN_PREFIXES)}
    assert {name for name in unknown if not name.endswith("_GLOO") and "_WITH_GTP_REMAT" not in name} == set()
    keys = [f"{name}/{order}" for name in _KINDS for order in range(3)]
    assert len({zlib.crc32(key.encode()) % MIXED_CHANNELS for key in keys}) == len(keys)
