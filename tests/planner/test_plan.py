"""Plans deal every micro-batch once per stage; lost cells dissolve."""

from __future__ import annotations

import pytest

from megatron_elas.planner.plan import initial_plan, replan, share_items
from megatron_elas.spec.errors import NoFeasiblePlan
from megatron_elas.spec.job import JobSpec


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
    assert plan.backups == ((0, 1), (1, 0), (2, 0))


def test_a_lost_worker_takes_its_cell_along_and_its_mates_become_spares() -> None:
    plan = replan(job(tp=2), initial_plan(job(tp=2), {}), [5], 1, {})
    assert plan.placement.describe() == "stage 0: [0,1] [2,3] | stage 1: [6,7] | spare: 4"


def test_fewer_micro_batches_than_cells_is_not_feasible() -> None:
    with pytest.raises(NoFeasiblePlan, match="2 micro-batches cannot feed 3 cells"):
        share_items(2, 3)
