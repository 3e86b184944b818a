"""What every plan of a running job holds, whoever is lost, one loss after the other."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elas.planner.dataflow import deal_items
from megatron_elas.planner.job_costs import JobCosts
from megatron_elas.planner.plan import choose, initial_plan, predict_step_s, replan
from megatron_elas.planner.prediction import Predictor
from megatron_elas.planner.search import stay
from megatron_elas.planner.situation import Situation
from megatron_elas.schedule.checks import peak_samples
from megatron_elas.schedule.orders import check_orders, read_orders
from megatron_elas.schedule.routes import Flow
from megatron_elas.schedule.warmups import find_warmups, run_items
from megatron_elas.spec.cluster import Link
from megatron_elas.spec.errors import BadUsage, NoFeasiblePlan
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.layout import Placement
from megatron_elas.spec.plan import ElasticPlan
from tests.planner.situations import cost, largest_item, most_in_flight

LINK = Link(bandwidth=1e6, latency_s=0.001)


@st.composite
def jobs(draw: st.DrawFn) -> JobSpec:
    tp, pp, dp = draw(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4)))
    return JobSpec(
        tensor_parallel=tp,
        pipeline_parallel=pp,
        data_parallel=dp,
        micro_batch_size=draw(st.sampled_from((1, 2))),
        num_microbatches=draw(st.integers(1, 4)) * dp,
        stage_layers=tuple(draw(st.lists(st.integers(1, 4), min_size=pp, max_size=pp))),
        split_backward=draw(st.booleans()),
    )


@st.composite
def jobs_with_costs(draw: st.DrawFn) -> tuple[JobSpec, JobCosts | None]:
    job = draw(jobs())
    if draw(st.booleans()):
        return job, None
    memory = draw(st.sampled_from((3_000, 6_000, 10_000, 1_000_000)))
    head = draw(st.sampled_from((0.0, 1.0, 3.0)))
    return job, JobCosts(cost=cost(job.num_layers, head=head), memory_bytes=memory, link=LINK)


def bytes_of(plan: ElasticPlan, costs: JobCosts) -> int:
    """Of the fullest device."""
    if plan.orders:
        schedule = read_orders(plan.items, plan.orders)
        return max(
            costs.cost.state_bytes(first, last, len(cells))
            + round(
                largest_item(cells) * costs.cost.working_bytes(first, last)
                + max(peak_samples(schedule, stage, cell, share) for cell in range(len(cells)))
                * costs.cost.activation_bytes(first, last)
            )
            for stage, ((first, last), cells) in enumerate(zip(plan.layers, plan.items, strict=True))
            for share in [costs.cost.kept_share(first, last)]
        )
    return max(
        costs.cost.device_bytes(
            first, last, cells=len(cells), in_flight=most_in_flight(cells, ahead), largest_item=largest_item(cells)
        )
        for (first, last), cells, ahead in zip(plan.layers, plan.items, plan.warmups, strict=True)
    )


def check(job: JobSpec, plan: ElasticPlan, alive: set[int], *, whole: bool) -> None:
    seated = [worker for cells in plan.placement.stages for cell in cells for worker in cell.workers]
    assert sorted([*seated, *plan.placement.spares]) == sorted(alive), "a living worker has one seat or none"
    assert {len(cell.workers) for cells in plan.placement.stages for cell in cells} == {job.tensor_parallel}
    assert [layer for start, stop in plan.layers for layer in range(start, stop)] == list(range(job.num_layers))
    assert len(plan.layers) == plan.placement.num_stages <= job.pipeline_parallel
    assert all(start < stop for start, stop in plan.layers)
    size = job.micro_batch_size
    for cells, items in zip(plan.placement.stages, plan.items, strict=True):
        ranges = sorted(part for own in items for item in own for part in item.ranges)
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])], "every sample once"
        assert ranges[-1][1] == job.num_microbatches * size
        assert len(items) == len(cells) and all(items)
        numbers = [item.number for own in items for item in own]
        assert len(set(numbers)) == len(numbers)
        starts = [[item.ranges[0][0] for item in own] for own in items]
        assert all(own == sorted(own) for own in starts), "links hand over in this order"
        assert all(len(item.ranges) == 1 for own in items for item in own), "what the pipeline can put together"
        busiest = max(sum(item.samples for item in own) for own in items)
        assert busiest <= -(-job.num_microbatches // len(cells)) * size, "no busier than with whole micro-batches"
        if whole:
            assert all(item.is_whole(size) for own in items for item in own)
        rows = [cell.row for cell in cells]
        assert rows == sorted(set(rows))
    assert run_items(Flow(plan.items), plan.warmups, joined=True) is not None
    if plan.orders:
        assert job.split_backward
        check_orders(plan.items, plan.orders)
    assert {owner for owner, _ in plan.backups} == (set(seated) if len(seated) > 1 else set())


@given(given_job=jobs_with_costs(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_whoever_is_lost_all_layers_and_micro_batches_are_run_as_long_as_a_cell_can_be_made(
    given_job: tuple[JobSpec, JobCosts | None], data: st.DataObject
) -> None:
    job, costs = given_job
    domains = {worker: f"node{worker // 2}" for worker in range(job.world_size)}
    plan = initial_plan(job, domains, costs)
    alive = set(range(job.world_size))
    check(job, plan, alive, whole=True)
    for epoch in itertools.count(1):
        lost = data.draw(st.sets(st.sampled_from(sorted(alive)), min_size=1, max_size=job.world_size), label="lost")
        alive -= lost
        if len(alive) < job.tensor_parallel:
            with pytest.raises(NoFeasiblePlan, match=rf"too few workers are left \({len(alive)}\), a cell takes"):
                replan(job, plan, lost, epoch, domains, costs)
            return
        before, plan = plan, replan(job, plan, lost, epoch, domains, costs)
        assert plan == replan(job, before, lost, epoch, domains, costs), "the same inputs give the same plan"
        check(job, plan, alive, whole=costs is None)
        assert (plan.predicted_s is None) == (costs is None)
        if costs is not None:
            assert plan.predicted_s == pytest.approx(predict_step_s(job, plan, costs))
        if costs is not None and not plan.over_memory:
            assert bytes_of(plan, costs) <= max(costs.memory_bytes, bytes_of(before, costs))


@given(job=jobs(), data=st.data())
@settings(max_examples=60, deadline=None)
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
        for cell, items in zip(cells, plan.items[plan.placement.stages.index(cells)], strict=True):
            if len(cells) < job.data_parallel and cell.row < job.data_parallel:
                own = set(range(cell.row, job.num_microbatches, job.data_parallel))
                assert own <= {item.number for item in items}, "own rows stay"


@given(given_job=jobs_with_costs(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_plan_is_slower_than_to_do_nothing(given_job: tuple[JobSpec, JobCosts | None], data: st.DataObject) -> None:
    job, costs = given_job
    costs = costs or JobCosts(cost=cost(job.num_layers), memory_bytes=1_000_000, link=LINK)
    costs = replace(costs, memory_bytes=1_000_000)
    first = initial_plan(job, {}, costs)
    lost = data.draw(st.sets(st.integers(0, job.world_size - 1), max_size=4))
    left = first.placement.without(lost)
    if not all(left.stages):
        return
    plan = replan(job, first, lost, 1, {}, costs)
    rows = [[cell.row for cell in cells] for cells in left.stages]
    items = tuple(deal_items(job, own_rows, "reroute") for own_rows in rows)
    warmups = find_warmups(items)
    nothing = replace(first, placement=replace(left, spares=()), items=items, warmups=warmups, epoch=1)
    assert plan.predicted_s is not None
    assert plan.predicted_s <= predict_step_s(job, nothing, costs) * (1 + 1e-9)


@pytest.mark.parametrize("grid", [(4, 3, 4), (3, 2, 6), (2, 4, 2)])
def test_the_prediction_is_that_of_the_step_planner(grid: tuple[int, int, int]) -> None:
    stages, rows, per_row = grid
    job = JobSpec(
        tensor_parallel=1,
        pipeline_parallel=stages,
        data_parallel=rows,
        micro_batch_size=2,
        num_microbatches=per_row * rows,
        stage_layers=(2,) * stages,
    )
    costs = JobCosts(cost=cost(job.num_layers), memory_bytes=1_000_000, link=LINK)
    plan = replan(job, initial_plan(job, {}, costs), {rows}, 1, {}, costs)
    now = Situation(
        job=job,
        cost=costs.cost,
        cuts=tuple(2 * stage for stage in range(stages + 1)),
        rows=tuple(tuple(cell.row for cell in cells) for cells in plan.placement.stages),
        memory_bytes=costs.memory_bytes,
        link=costs.link,
    )
    chosen = choose(now)
    found = Predictor(now, exact=True, staggered=False).predict(chosen.candidate, 0)
    assert plan.predicted_s == chosen.work.step_s == predict_step_s(job, plan, costs)
    assert plan.predicted_s == pytest.approx(found.step_s)
    whole = choose(now, whole=True)
    found = Predictor(now, exact=True, staggered=False).predict(stay(now), 0)
    assert whole.work.step_s == pytest.approx(found.step_s)


def test_memory_moves_layers_and_refuses_no_plan() -> None:
    job = JobSpec(
        tensor_parallel=1,
        pipeline_parallel=3,
        data_parallel=3,
        micro_batch_size=1,
        num_microbatches=12,
        stage_layers=(3, 2, 2),
    )
    plenty = JobCosts(cost=cost(7), memory_bytes=1_000_000, link=LINK)
    first = initial_plan(job, {}, plenty)
    most = bytes_of(first, plenty)
    tight = replace(plenty, memory_bytes=most)
    assert replan(job, first, {0}, 1, {}, plenty).layers == first.layers
    moved = replan(job, first, {0}, 1, {}, tight)
    assert moved.layers != first.layers and not moved.over_memory
    assert bytes_of(moved, tight) <= most
    # A profile that says less than what ran already is not believed, and one cell alone has to take all layers.
    last = replan(job, first, set(range(8)), 1, {}, replace(plenty, memory_bytes=100))
    assert last.placement == Placement(stages=(last.placement.stages[0],)) and last.over_memory


def test_costs_of_another_model_are_refused() -> None:
    job = JobSpec(
        tensor_parallel=1, pipeline_parallel=2, data_parallel=2, micro_batch_size=1, num_microbatches=4,
        stage_layers=(2, 2),
    )  # fmt: skip
    with pytest.raises(BadUsage, match="costs are those of 7 layers, and the job has 4"):
        initial_plan(job, {}, JobCosts(cost=cost(7), memory_bytes=1_000_000, link=LINK))
