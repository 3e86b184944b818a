"""Who adds which part of a tied embedding's gradient."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_elas.host.gradients import find_overlaps, wrap_no_sync
from megatron_elas.planner.plan import initial_plan, replan
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.layout import Placement


def placement(lost: tuple[int, ...], *, stages: int = 3, rows: int = 4) -> Placement:
    job = JobSpec(
        tensor_parallel=1, pipeline_parallel=stages, data_parallel=rows, micro_batch_size=1, num_microbatches=24
    )
    plan = initial_plan(job, {})
    return (replan(job, plan, lost, 1, {}) if lost else plan).placement


@pytest.mark.parametrize("lost", [(), (0,), (9,), (0, 1, 2), (1, 8, 10), (0, 1, 2, 8, 9)])
@pytest.mark.parametrize("numel", [1, 127, 128, 1000, 16384])
def test_each_end_covers_the_weight_once_and_both_say_the_same(lost: tuple[int, ...], numel: int) -> None:
    where = placement(lost)
    ends = [where.replicas(stage, 0) for stage in (0, 2)]
    pairs = []
    for members in ends:
        overlaps = {worker: find_overlaps(where, worker, numel) for worker in members}
        covered = sorted((o.start, o.stop) for found in overlaps.values() for o in found)
        assert [start for start, _ in covered] == [0, *(stop for _, stop in covered[:-1])]
        assert covered[-1][1] == numel
        pairs.append({(frozenset((worker, o.peer)), o.start, o.stop) for worker in members for o in overlaps[worker]})
    assert pairs[0] == pairs[1]


def test_equal_ends_meet_pairwise() -> None:
    where = placement(())
    found = [find_overlaps(where, worker, 1024) for worker in where.replicas(0, 0)]
    assert [[(o.peer, o.start, o.stop) for o in overlaps] for overlaps in found] == [
        [(peer, start, start + 256)] for peer, start in zip(range(8, 12), range(0, 1024, 256), strict=True)
    ]


def test_gradients_are_reduced_again_when_they_are_told_to_and_not_when_a_schedule_is_forgotten() -> None:
    groups = [SimpleNamespace(is_last_microbatch=True) for _ in range(3)]
    ddp = SimpleNamespace(bucket_groups=groups[:2], expert_parallel_bucket_groups=groups[2:])
    no_sync = wrap_no_sync(lambda self: None)

    def run_forward_only() -> None:
        no_sync(ddp).__enter__()

    run_forward_only()
    assert not any(group.is_last_microbatch for group in groups)
    with no_sync(ddp):
        assert not any(group.is_last_microbatch for group in groups)
    assert all(group.is_last_microbatch for group in groups)
