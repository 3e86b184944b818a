"""When a stage is lost, the cells that are left carry all layers on; spares make cells where that helps."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elas.planner.plan import initial_plan, replan
from megatron_elas.spec.errors import NoFeasiblePlan
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.plan import ElasticPlan


def make_job(grid: tuple[int, int, int], *stage_layers: int, per_row: int = 4) -> JobSpec:
    tp, pp, dp = grid
    return JobSpec(
        tensor_parallel=tp,
        pipeline_parallel=pp,
        data_parallel=dp,
        micro_batch_size=1,
        num_microbatches=per_row * dp,
        stage_layers=stage_layers,
    )


def lose(job: JobSpec, *losses: set[int]) -> ElasticPlan:
    """The plan after these losses, one after the other."""
    plan = initial_plan(job, {})
    for epoch, lost in enumerate(losses, start=1):
        plan = replan(job, plan, lost, epoch, {})
    return plan


@st.composite
def jobs(draw: st.DrawFn) -> JobSpec:
    grid = draw(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4)))
    layers = draw(st.lists(st.integers(1, 4), min_size=grid[1], max_size=grid[1]))
    return make_job(grid, *layers, per_row=draw(st.integers(1, 4)))


@given(job=jobs(), data=st.data())
@settings(max_examples=300)
def test_whoever_is_lost_all_layers_and_micro_batches_are_run_as_long_as_a_cell_can_be_made(
    job: JobSpec, data: st.DataObject
) -> None:
    domains = {worker: f"node{worker // 2}" for worker in range(job.world_size)}
    plan = initial_plan(job, domains)
    alive = set(range(job.world_size))
    for epoch in itertools.count(1):
        lost = data.draw(st.sets(st.sampled_from(sorted(alive)), min_size=1, max_size=job.world_size), label="lost")
        alive -= lost
        if len(alive) < job.tensor_parallel:
            with pytest.raises(NoFeasiblePlan, match=rf"too few workers are left \({len(alive)}\), a cell takes"):
                replan(job, plan, lost, epoch, domains)
            return
        before, plan = plan, replan(job, plan, lost, epoch, domains)
        assert plan == replan(job, before, lost, epoch, domains), "the same inputs give the same plan"
        seated = [worker for cells in plan.placement.stages for cell in cells for worker in cell.workers]
        assert sorted([*seated, *plan.placement.spares]) == sorted(alive), "a living worker has one seat or none"
        assert {len(cell.workers) for cells in plan.placement.stages for cell in cells} == {job.tensor_parallel}
        assert [layer for start, stop in plan.layers for layer in range(start, stop)] == list(range(job.num_layers))
        assert len(plan.layers) == plan.placement.num_stages <= job.pipeline_parallel
        assert all(start < stop for start, stop in plan.layers)
        for cells, items in zip(plan.placement.stages, plan.items, strict=True):
            assert sorted(itertools.chain(*items)) == list(range(job.num_microbatches))
            assert len(items) == len(cells) and all(items)
            rows = [cell.row for cell in cells]
            assert rows == sorted(set(rows))


@given(job=jobs(), data=st.data())
def test_stages_that_keep_a_cell_keep_their_layers_and_cells_unless_another_one_is_lost(
    job: JobSpec, data: st.DataObject
) -> None:
    first = initial_plan(job, {})
    lost = data.draw(st.sets(st.integers(0, job.world_size - 1), max_size=4))
    survivors = first.placement.without(lost)
    if not all(survivors.stages):
        return
    plan = replan(job, first, lost, 1, {})
    assert plan.layers == first.layers
    for kept, cells in zip(survivors.stages, plan.placement.stages, strict=True):
        assert set(kept) <= set(cells)


def test_a_pipeline_without_a_spare_cell_goes_on_with_fewer_stages_down_to_one_worker() -> None:
    job = make_job((1, 4, 1), 1, 1, 1, 1)
    plan = lose(job, {1})
    assert (plan.placement.describe(), plan.layers) == (
        "stage 0: [0] | stage 1: [2] | stage 2: [3]",
        ((0, 1), (1, 3), (3, 4)),
    ), "one layer moves, to a neighbour, and the other workers keep what they have"
    plan = lose(job, {1}, {2})
    assert (plan.placement.describe(), plan.layers) == ("stage 0: [0] | stage 1: [3]", ((0, 2), (2, 4)))
    plan = lose(job, {1}, {2}, {0})
    assert (plan.placement.describe(), plan.layers) == ("stage 0: [3]", ((0, 4),))


def test_a_lost_stage_gets_a_cell_of_another_one_when_there_is_one_to_give() -> None:
    plan = lose(make_job((1, 2, 2), 2, 2), {2, 3})
    assert (plan.placement.describe(), plan.layers) == ("stage 0: [0] | stage 1: [1]", ((0, 2), (2, 4)))


def test_of_three_cells_per_stage_each_remaining_stage_gives_one() -> None:
    plan = lose(make_job((1, 3, 3), 2, 2, 2), {3, 4, 5})
    assert [len(cells) for cells in plan.placement.stages] == [2, 2, 2]
    assert plan.layers == ((0, 2), (2, 4), (4, 6))
    stayed = [plan.placement.seat(worker).stage for worker in (0, 1, 6, 7)]
    assert stayed == [0, 0, 2, 2]


def test_more_layers_go_where_more_cells_are() -> None:
    job = make_job((1, 4, 1), 2, 2, 2, 2, per_row=8)
    plan = lose(job, {1})
    loads = [
        (max(map(len, items)) - 1) * (stop - start)
        for items, (start, stop) in zip(plan.items, plan.layers, strict=True)
    ]
    assert max(loads) == 21, "3 cells in 2 stages would have to hold 4 layers each: 28"
    assert max(stop - start for start, stop in plan.layers) == 3


def test_the_least_predicted_step_time_is_found_among_all_even_shares() -> None:
    for layers, workers, items in itertools.product(range(1, 7), range(1, 7), range(1, 9)):
        job = replace(make_job((1, 1, 1), layers), pipeline_parallel=layers, stage_layers=(1,) * layers)
        job = replace(job, data_parallel=2, num_microbatches=2 * items)
        kept = {2 * stage for stage in range(layers)}  # one cell of every stage but the first ones
        alive = sorted(kept)[:workers]
        lost = set(range(job.world_size)) - set(alive)
        plan = replan(job, initial_plan(job, {}), lost, 1, {})
        fullest = max(1, -(-layers // min(layers, len(alive))))
        assert _load_of(plan) == min(
            _cheapest(layers, stages, len(alive), job.num_microbatches, fullest)
            for stages in range(1, min(layers, len(alive)) + 1)
        )


def _load_of(plan: ElasticPlan) -> int:
    return max(
        (max(map(len, items)) - 1) * (stop - start)
        for items, (start, stop) in zip(plan.items, plan.layers, strict=True)
    )


def _cheapest(layers: int, stages: int, cells: int, items: int, fullest: int) -> float:
    """By trying every cut and every even share of cells."""
    small, larger = divmod(cells, stages)
    best = float("inf")
    for more in itertools.combinations(range(stages), larger):
        counts = [min(small + (stage in more), items) for stage in range(stages)]
        for inner in itertools.combinations(range(1, layers), stages - 1):
            sizes = [stop - start for start, stop in itertools.pairwise((0, *inner, layers))]
            if max(sizes) <= fullest:
                load = max((-(-items // d) - 1) * size for d, size in zip(counts, sizes, strict=True))
                best = min(best, load)
    return best


def test_cell_mates_of_two_lost_workers_make_a_cell_and_keep_their_lanes() -> None:
    job = make_job((2, 2, 2), 2, 2)
    plan = lose(job, {5})
    assert plan.placement.describe() == "stage 0: [0,1] [2,3] | stage 1: [6,7] | spare: 4"
    plan = lose(job, {5}, {6})
    assert plan.placement.describe() == "stage 0: [0,1] [2,3] | stage 1: [4,7]"
    plan = lose(job, {5, 3})
    assert plan.placement.describe() == "stage 0: [0,1] [2,4] | stage 1: [6,7]", "both were in lane 0: one changes"


def test_spares_stay_spares_where_another_cell_would_not_help() -> None:
    job = make_job((2, 1, 3), 4, per_row=1)  # 3 micro-batches: 2 in the busiest of 2 cells, and of 3 cells 1
    assert lose(job, {1, 3}).placement.spares == ()
    job = make_job((2, 1, 4), 4, per_row=1)  # 4 micro-batches: 2 in the busiest of 2 cells as of 3
    assert lose(job, {1, 3}).placement.spares == (0, 2)


def test_a_worker_alone_is_not_enough_for_a_cell_of_two_and_the_sentence_says_so() -> None:
    job = make_job((2, 2, 1), 2, 2)
    with pytest.raises(
        NoFeasiblePlan, match=r"epoch 1: too few workers are left \(1\), a cell takes 2 \(workers lost: \[0, 1, 2"
    ):
        lose(job, {0, 1, 2})
