"""What an edit makes of each of Megatron's groups."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron_elas.host.groups import FUSED_CHANNELS, GroupKind, classify_group, edit_groups
from megatron_elas.planner.plan import initial_plan, replan
from megatron_elas.spec.job import JobSpec

JOB = JobSpec(tensor_parallel=1, pipeline_parallel=2, data_parallel=2, micro_batch_size=1, num_microbatches=8)
FIRST = initial_plan(JOB, {})
INITIAL = FIRST.placement


class Group:
    """Members and a description, as the communicator's groups have."""

    def __init__(self, members: Sequence[int], description: str) -> None:
        self.members = self.original_members = tuple(members)
        self.description = description
        self.channel: int | None = None

    def edit(self, members: Sequence[int], channel: int | None = None) -> None:
        self.members = tuple(members)
        self.channel = channel


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


def groups_of(worker: int) -> dict[str, Group]:
    row, stage = worker % 2, worker // 2
    return {
        "world": Group([0, 1, 2, 3], "default_pg"),
        "replicas": Group([2 * stage, 2 * stage + 1], "DATA_PARALLEL_GROUP"),
        "chain": Group([row, 2 + row], "PIPELINE_MODEL_PARALLEL_GROUP"),
        "first of chain": Group([row], "POSITION_EMBEDDING_GROUP"),
        "pipeline": Group([row, 2 + row], "MODEL_PARALLEL_GROUP"),
        "pipeline again": Group([row, 2 + row], "MODEL_PARALLEL_GROUP"),
    }


def test_after_a_loss_no_group_holds_the_lost_worker_and_all_survivors_agree() -> None:
    placement = replan(JOB, FIRST, [2], 1, {}).placement
    edited = {}
    for worker in placement.workers:
        groups = groups_of(worker)
        if worker % 2:  # worker 1 is not in row 0's position group, and so on
            del groups["first of chain"]
        edit_groups(list(groups.values()), INITIAL, placement, worker)
        edited[worker] = groups
    for worker, groups in edited.items():
        assert all(2 not in group.members and worker in group.members for group in groups.values())
        assert groups["world"].members == (0, 1, 3)
        assert groups["pipeline"].members == groups["pipeline again"].members == (0, 1, 3)
    assert edited[0]["replicas"].members == edited[1]["replicas"].members == (0, 1)
    assert edited[3]["replicas"].members == (3,)
    assert edited[0]["chain"].members == (0, 3) and edited[1]["chain"].members == (1, 3)
    assert edited[3]["chain"].members == (0, 3), "the only cell of stage 1 sees the first cell of stage 0"
    channels = {tuple(groups[name].channel for name in ("pipeline", "pipeline again")) for groups in edited.values()}
    assert len(channels) == 1, "groups that become one need one channel"
    first, second = channels.pop()
    assert first != second and first is not None and first >= FUSED_CHANNELS
