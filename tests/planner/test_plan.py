"""Plans deal every micro-batch once per stage and keep copies apart from their owners."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_elas.planner.backups import place_backups
from megatron_elas.planner.plan import initial_plan, replan, share_items
from megatron_elas.spec.errors import NoFeasiblePlan
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.layout import Cell, Placement


def job(tp: int = 1, pp: int = 2, dp: int = 2, per_row: int = 4) -> JobSpec:
    return JobSpec(
        tensor_parallel=tp,
        pipeline_parallel=pp,
        data_parallel=dp,
        micro_batch_size=2,
        num_microbatches=per_row * dp,
    )


def test_the_first_plan_is_megatrons_grid_and_sampler() -> None:
    plan = initial_plan(job(), {})
    assert plan.placement.describe() == "stage 0: [0] [1] | stage 1: [2] [3]"
    assert plan.items[0] == plan.items[1] == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert plan.backups == ((0, 1), (1, 0), (2, 3), (3, 2))


def test_a_lost_workers_micro_batches_go_to_the_other_cells_of_its_stage() -> None:
    plan = replan(job(), initial_plan(job(), {}), [3], 1, {})
    assert plan.placement.describe() == "stage 0: [0] [1] | stage 1: [2]"
    assert plan.items == (((0, 2, 4, 6), (1, 3, 5, 7)), ((0, 1, 2, 3, 4, 5, 6, 7),))
    assert plan.host_of(1, 5, 0) == 2
    assert plan.backups == ((0, 1), (1, 0))


def test_a_lost_worker_takes_its_cell_along_and_its_mates_become_spares() -> None:
    plan = replan(job(tp=2), initial_plan(job(tp=2), {}), [5], 1, {})
    assert plan.placement.describe() == "stage 0: [0,1] [2,3] | stage 1: [6,7] | spare: 4"


def test_a_stage_without_cells_is_not_feasible_and_the_sentence_says_which() -> None:
    with pytest.raises(NoFeasiblePlan, match=r"epoch 1: stage 1 lost all its cells \(workers lost: \[2, 3\]"):
        replan(job(), initial_plan(job(), {}), [2, 3], 1, {})


def test_fewer_micro_batches_than_cells_is_not_feasible() -> None:
    with pytest.raises(NoFeasiblePlan, match="2 micro-batches cannot feed 3 cells"):
        share_items(2, 3)


@given(tp=st.integers(1, 2), pp=st.integers(1, 4), dp=st.integers(1, 5), per_row=st.integers(1, 4), data=st.data())
def test_every_micro_batch_runs_once_per_stage_whoever_is_lost(
    tp: int, pp: int, dp: int, per_row: int, data: st.DataObject
) -> None:
    spec = job(tp, pp, dp, per_row)
    lost = data.draw(st.sets(st.integers(0, spec.world_size - 1), max_size=3))
    domains = {worker: f"node{worker // 2}" for worker in range(spec.world_size)}
    first = initial_plan(spec, domains)
    try:
        plan = replan(spec, first, lost, 1, domains)
    except NoFeasiblePlan:
        assert any(not stage for stage in first.placement.without(lost).stages)
        return
    assert not lost & set(plan.placement.workers)
    assert set(plan.placement.workers) | set(plan.placement.spares) | lost == set(range(spec.world_size))
    for stage, stage_items in zip(plan.placement.stages, plan.items, strict=True):
        assert sorted(item for items in stage_items for item in items) == list(range(spec.num_microbatches))
        sizes = [len(items) for items in stage_items]
        assert len(sizes) == len(stage) and max(sizes) - min(sizes) <= 1
    for owner, backup in plan.backups:
        seat = plan.placement.seat(owner)
        assert backup != owner and backup in plan.placement.replicas(seat.stage, seat.lane)


def test_copies_go_to_another_failure_domain_where_there_is_one() -> None:
    stage = tuple(Cell(row=row, workers=(worker,)) for row, worker in enumerate([0, 1, 4]))
    placement = Placement(stages=(stage, (Cell(row=0, workers=(2,)),)))
    assert place_backups(placement, {0: "a", 1: "a", 4: "b", 2: "b"}) == ((0, 4), (1, 4), (4, 0))
