"""When a stage is lost, the cells that are left carry all layers on; spares make cells where that helps."""

from __future__ import annotations

import itertools
from itertools import pairwise

import pytest

from megatron_elas.planner.job_costs import JobCosts
from megatron_elas.planner.plan import initial_plan, predict_step_s, replan
from megatron_elas.schedule.items import deal_round, reroute
from megatron_elas.schedule.warmups import find_warmups
from megatron_elas.spec.cluster import Link
from megatron_elas.spec.errors import NoFeasiblePlan
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.layout import Cell, Placement
from megatron_elas.spec.plan import ElasticPlan
from tests.planner.situations import cost, largest_item, most_in_flight


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


def lose(job: JobSpec, *losses: set[int], costs: JobCosts | None = None) -> ElasticPlan:
    """The plan after these losses, one after the other."""
    plan = initial_plan(job, {}, costs)
    for epoch, lost in enumerate(losses, start=1):
        plan = replan(job, plan, lost, epoch, {}, costs)
    return plan


def costs_of(layers: int, *, head: float = 1.0, memory: int = 1_000_000) -> JobCosts:
    return JobCosts(cost=cost(layers, head=head), memory_bytes=memory, link=Link(bandwidth=1e6, latency_s=0.001))


@pytest.mark.parametrize("order", [(1, 2, 0), (3, 0, 1), (0, 1, 2)])
def test_a_pipeline_without_a_spare_cell_goes_on_down_to_one_worker(order: tuple[int, ...]) -> None:
    job = make_job((1, 4, 1), 1, 1, 1, 1)
    for count in range(1, 4):
        plan = lose(job, *({worker} for worker in order[:count]))
        left = sorted(set(range(4)) - set(order[:count]))
        assert sorted(plan.placement.workers) == left and plan.placement.spares == ()
        assert sum(stop - start for start, stop in plan.layers) == 4
    assert plan.layers == ((0, 4),)


def test_of_layers_that_are_lost_each_goes_to_a_neighbour_when_there_is_no_reason_to_move_more() -> None:
    job = make_job((1, 4, 1), 2, 2, 2, 2, per_row=32)
    plan = lose(job, {1})
    assert len(plan.layers) == 3, "deep pipelines are cheap with many micro-batches, and memory has room for 3 layers"
    assert max(stop - start for start, stop in plan.layers) == 3
    assert plan.placement.describe() == "stage 0: [0] | stage 1: [2] | stage 2: [3]"


def test_a_lost_stage_gets_a_cell_of_another_one_when_there_is_one_to_give() -> None:
    plan = lose(make_job((1, 2, 2), 2, 2), {2, 3})
    assert (plan.placement.describe(), plan.layers) == ("stage 0: [0] | stage 1: [1]", ((0, 2), (2, 4)))


def test_two_stages_are_lost_at_once() -> None:
    plan = lose(make_job((1, 4, 2), 2, 2, 2, 2, per_row=8), {2, 3, 4, 5})
    assert sorted(plan.placement.workers) == [0, 1, 6, 7] and plan.placement.spares == ()
    stages = [plan.placement.seat(worker).stage for worker in (0, 1, 6, 7)]
    assert max(stages[:2]) <= min(stages[2:]), "cells stay in the order of their layers"


def test_no_stage_gets_more_cells_than_there_are_micro_batches() -> None:
    job = make_job((1, 2, 4), 1, 1, per_row=1)
    plan = lose(job, {0, 1, 2, 3}, costs=costs_of(2))
    assert all(len(cells) <= 4 for cells in plan.placement.stages)
    job = make_job((1, 3, 4), 1, 1, 1, per_row=1)
    plan = lose(job, {0, 1, 2, 3}, costs=costs_of(3))
    assert all(len(own) >= 1 for items in plan.items for own in items)


CASES = [
    pytest.param(grid, layers, per_row, head, memory, id=f"{grid[1]}x{grid[2]}-{layers}-{per_row}-{head}-{memory}")
    for grid in ((1, 2, 2), (1, 3, 1), (1, 3, 2), (1, 4, 1))
    for layers, per_row in ((4, 2), (5, 6))
    for head, memory in ((0.0, 1_000_000), (2.0, 1_000_000), (1.0, 6_000))
]


@pytest.mark.parametrize(("grid", "layers", "per_row", "head", "memory"), CASES)
def test_plans_for_lost_stages_are_near_the_best_of_all(
    grid: tuple[int, int, int], layers: int, per_row: int, head: float, memory: int
) -> None:
    stages, rows = grid[1:]
    small, larger = divmod(layers, stages)
    job = make_job(grid, *(small + (stage < larger) for stage in range(stages)), per_row=per_row)
    costs = costs_of(layers, head=head, memory=memory)
    for stage in range(stages):
        lost = {stage * rows + row for row in range(rows)}
        plan = lose(job, lost, costs=costs)
        best = _least_s(job, costs, job.world_size - len(lost))
        if plan.over_memory:
            assert best is None or _fullest_bytes(job, plan, costs) > memory
            continue
        assert best is not None and plan.predicted_s is not None
        are_whole = all(item.is_whole(1) for cells in plan.items for own in cells for item in own)
        assert plan.predicted_s >= best * (1 - 1e-9) or not are_whole, "the best is best"
        assert _fullest_bytes(job, plan, costs) <= memory
        assert plan.predicted_s <= 1.13 * best, f"stage {stage}: {plan.placement.describe()} {plan.layers}"


def _least_s(job: JobSpec, costs: JobCosts, cells: int) -> float | None:
    """Of whole micro-batches, by trying every number of stages, every share of cells and every cut."""
    layers = job.num_layers
    best: float | None = None
    for depth in range(1, min(job.pipeline_parallel, layers, cells) + 1):
        for widths in itertools.product(range(1, min(cells, job.num_microbatches) + 1), repeat=depth):
            if sum(widths) > cells:
                continue
            for inner in itertools.combinations(range(1, layers), depth - 1):
                plan = _plan_of(job, widths, tuple(pairwise((0, *inner, layers))))
                if _fullest_bytes(job, plan, costs) <= costs.memory_bytes:
                    seconds = predict_step_s(job, plan, costs)
                    best = seconds if best is None else min(best, seconds)
    return best


def _plan_of(job: JobSpec, widths: tuple[int, ...], layers: tuple[tuple[int, int], ...]) -> ElasticPlan:
    numbers = itertools.count()
    stages = tuple(tuple(Cell(row=row, workers=(next(numbers),)) for row in range(width)) for width in widths)
    items = [
        reroute(job.num_microbatches, 1, range(width), job.data_parallel)
        if width < job.data_parallel
        else deal_round(job.num_microbatches, 1, width)
        for width in widths
    ]
    return ElasticPlan(
        epoch=1,
        placement=Placement(stages=stages),
        layers=layers,
        items=tuple(items),
        backups=(),
        warmups=find_warmups(items),
    )


def _fullest_bytes(job: JobSpec, plan: ElasticPlan, costs: JobCosts) -> int:
    return max(
        costs.cost.device_bytes(
            first, last, cells=len(cells), in_flight=most_in_flight(cells, ahead), largest_item=largest_item(cells)
        )
        for (first, last), cells, ahead in zip(plan.layers, plan.items, plan.warmups, strict=True)
    )


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
