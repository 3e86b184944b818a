"""What an edit makes of each of Megatron's groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from megatron_elas.host.groups import FUSED_CHANNELS, GroupKind, classify_group, plan_groups
from megatron_elas.planner.plan import initial_plan, replan
from megatron_elas.spec.job import JobSpec

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
        ([2, 3], "DATA_PARALLEL_GROUP", GroupKind.STAGE),
        ([2], "TENSOR_MODEL_PARALLEL_GROUP", GroupKind.STAGE),
        ([1, 3], "PIPELINE_MODEL_PARALLEL_GROUP", GroupKind.CHAIN),
        ([1, 3], "EMBEDDING_GROUP", GroupKind.CHAIN),
        ([0], "POSITION_EMBEDDING_GROUP", GroupKind.CHAIN),
        ([1, 3], "MODEL_PARALLEL_GROUP", GroupKind.FUSED),
    ],
)
def test_a_group_is_what_its_first_members_and_its_description_say(
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
    assert first != second and first is not None and first >= FUSED_CHANNELS
