"""Plans deal every sample once per stage; lost cells dissolve."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_elas.planner.job_costs import JobCosts
from megatron_elas.planner.plan import choose, initial_plan, replan, share_items
from megatron_elas.planner.situation import Situation
from megatron_elas.spec.cluster import Link
from megatron_elas.spec.cost import JobCost, UnitCost, Work
from megatron_elas.spec.errors import NoFeasiblePlan
from megatron_elas.spec.items import whole_micro_batches
from megatron_elas.spec.job import JobSpec
from tests.planner.situations import cost, situation


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
    assert plan.items[0] == plan.items[1] == whole_micro_batches([(0, 2, 4, 6), (1, 3, 5, 7)], 2)
    assert plan.warmups == (1, 0)
    assert plan.backups == ((0, 1), (1, 0), (2, 3), (3, 2))


def test_a_lost_workers_micro_batches_go_to_the_other_cells_of_its_stage() -> None:
    plan = replan(job(), initial_plan(job(), {}), [3], 1, {})
    assert plan.placement.describe() == "stage 0: [0] [1] | stage 1: [2]"
    assert plan.items == (whole_micro_batches([(0, 2, 4, 6), (1, 3, 5, 7)], 2), whole_micro_batches([range(8)], 2))
    assert plan.items_of(2) == plan.items[1][0]
    assert plan.backups == ((0, 1), (1, 0), (2, 0))


def test_a_lost_worker_takes_its_cell_along_and_its_mates_become_spares() -> None:
    plan = replan(job(tp=2), initial_plan(job(tp=2), {}), [5], 1, {})
    assert plan.placement.describe() == "stage 0: [0,1] [2,3] | stage 1: [6,7] | spare: 4"


def test_fewer_micro_batches_than_cells_is_not_feasible() -> None:
    with pytest.raises(NoFeasiblePlan, match="2 micro-batches cannot feed 3 cells"):
        share_items(2, 3)


def costs(layers: int, *, sample_s: float, pass_s: float) -> JobCosts:
    """Layers whose passes take this long, besides a tenth of a second in the optimizer."""
    work = Work(compute_s=sample_s, fixed_s=pass_s)
    none = Work()
    layer = UnitCost(
        forward=work, input_gradient=work, weight_gradient=work, parameters=1, activation_bytes=1.0, optimizer_s=0.1
    )
    end = UnitCost(forward=none, input_gradient=none, weight_gradient=none, parameters=0, activation_bytes=0.0)
    cost_ = JobCost(
        embedding=end, layers=(layer,) * layers, head=end, loss=end, boundary_bytes=0, weight_bytes=1,
        gradient_bytes=0, optimizer_bytes=0,
    )  # fmt: skip
    return JobCosts(cost=cost_, memory_bytes=1_000, link=Link(bandwidth=1e9, latency_s=0.0))


def sizes(job: JobSpec, lost: int, of: JobCosts) -> list[list[list[int]]]:
    """Samples of all items after a loss."""
    plan = replan(job, initial_plan(job, {}, of), [lost], 1, {}, of)
    return [[[item.samples for item in own] for own in cells] for cells in plan.items]


def test_what_passes_take_decides_how_samples_are_dealt() -> None:
    three = JobSpec(
        tensor_parallel=1, pipeline_parallel=1, data_parallel=3, micro_batch_size=2, num_microbatches=9,
        stage_layers=(2,),
    )  # fmt: skip
    passes, samples = costs(2, sample_s=0.0, pass_s=1.0), costs(2, sample_s=1.0, pass_s=0.1)
    assert sizes(three, 1, passes) == [[[3, 3, 3]] * 2], "few passes"
    tight = replace(samples, memory_bytes=2 + 2 * 2)
    assert sizes(three, 1, tight) == [[[2, 2, 2, 2, 1]] * 2], "as even as can be, with no room for larger items"
    plan = replan(three, initial_plan(three, {}), [1], 1, {})
    assert all(item.is_whole(2) for own in plan.items[0] for item in own), "nothing is known"


def test_larger_items_are_refused_where_memory_has_no_room_for_them() -> None:
    job = JobSpec(
        tensor_parallel=1, pipeline_parallel=1, data_parallel=2, micro_batch_size=2, num_microbatches=8,
        stage_layers=(2,),
    )  # fmt: skip
    roomy = costs(2, sample_s=0.0, pass_s=1.0)
    assert sizes(job, 1, roomy) == [[[4] * 4]]
    tight = replace(roomy, memory_bytes=2 + 2 * 2)
    assert sizes(job, 1, tight) == [[[2] * 8]]
    first = initial_plan(job, {}, roomy)
    assert not replan(job, first, [1], 1, {}, tight).over_memory


def test_what_a_plan_before_had_in_memory_is_there() -> None:
    """Also where its items were larger than a micro-batch, whatever a profile says now."""
    job = JobSpec(
        tensor_parallel=1, pipeline_parallel=1, data_parallel=3, micro_batch_size=2, num_microbatches=12,
        stage_layers=(2,),
    )  # fmt: skip
    roomy = costs(2, sample_s=0.0, pass_s=1.0)
    first = initial_plan(job, {}, roomy)
    second = replan(job, first, [0], 1, {}, roomy)
    assert {item.samples for own in second.items[0] for item in own} == {3}
    again = replan(job, second, [], 2, {}, replace(roomy, memory_bytes=1))
    assert again.items == second.items and not again.over_memory


@pytest.mark.parametrize("rows", [3, 4, 7])
def test_no_choice_is_slower_than_to_move_whole_micro_batches_at_any_size(rows: int) -> None:
    """Also of jobs so large that one cell is timed for each stage, which is too low for items of unequal size."""
    layers = 4
    spec = JobSpec(
        tensor_parallel=1, pipeline_parallel=4, data_parallel=rows, micro_batch_size=1, num_microbatches=48 * rows,
        stage_layers=(1,) * layers,
    )  # fmt: skip
    now = Situation(
        job=spec, cost=cost(layers), cuts=tuple(range(layers + 1)), memory_bytes=10_000_000,
        rows=tuple(tuple(range(rows - (stage == 1))) for stage in range(4)), link=Link(bandwidth=1e6, latency_s=0.001),
    )  # fmt: skip
    assert choose(now).work.step_s <= choose(now, whole=True).work.step_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("grid", "deal", "size"),
    [
        ((1, 2, 1, 1), "reshape", 1),
        ((2, 2, 1, 2), "reshape", 1),
        ((2, 2, 1, 1), "reroute", 1),
        ((2, 3, 1, 2), "reroute", 1),
        ((2, 4, 5, 4), "mix", 2),
    ],
)
def test_a_running_job_fuses_items_cuts_them_and_keeps_them_apart(
    grid: tuple[int, int, int, int], deal: str, size: int
) -> None:
    """Stages, rows, micro-batches per row, samples in each; row 0 of stage 0 is lost."""
    chosen = choose(situation(*grid, lost=((0, 0),), memory=1_000_000))
    assert (chosen.candidate.deals[0], chosen.candidate.size) == (deal, size)
    _, rows, steps, samples = grid
    whole = chosen.work.items[-1] if grid[0] > 1 else ()
    assert all(len(own) == steps * samples // size for own in whole), "parts are passes of their own"
    sizes = [[item.samples for item in own] for own in chosen.work.items[0]]
    assert sum(map(sum, sizes)) == rows * steps * samples
    if deal == "reshape":
        assert {len(own) for own in sizes} == {steps * samples // size} and max(map(max, sizes)) > size
    elif deal == "mix":
        assert {own[-1] < size for own in sizes} == {True, False}, "what remains is shared sample by sample"
    else:
        assert {each for own in sizes for each in own} == {size}
