"""What a running job goes over to while nobody is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elas.planner.improve import LEAST_GAIN, improve
from megatron_elas.planner.job_costs import JobCosts
from megatron_elas.planner.plan import initial_plan, predict_step_s, replan
from megatron_elas.spec.errors import BadUsage, NoFeasiblePlan
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.policy import RUNNING_POLICIES, RunningPolicy
from tests.planner.situations import cost
from tests.planner.test_job_plans import LINK, bytes_of, check, jobs


def job_of(stages: int = 4, rows: int = 3, per_row: int = 8, *, size: int = 2, split: bool = True) -> JobSpec:
    return JobSpec(
        tensor_parallel=1,
        pipeline_parallel=stages,
        data_parallel=rows,
        micro_batch_size=size,
        num_microbatches=per_row * rows,
        stage_layers=(3,) * stages,
        split_backward=split,
    )


def costs_of(job: JobSpec, memory: int = 1_000_000) -> JobCosts:
    return JobCosts(cost=cost(job.num_layers), memory_bytes=memory, link=LINK)


def alone(job: JobSpec) -> dict[int, str]:
    """Every worker is a failure domain."""
    return {worker: f"worker{worker}" for worker in range(job.world_size)}


def after_loss(job: JobSpec, costs: JobCosts | None, lost: set[int], policy: RunningPolicy = "ours") -> ElasticPlan:
    return replan(job, initial_plan(job, alone(job), costs), lost, 1, alone(job), costs, policy)


@given(job=jobs(), data=st.data())
@settings(max_examples=15, deadline=None)
def test_a_better_plan_has_the_same_seats_fits_and_is_shorter(job: JobSpec, data: st.DataObject) -> None:
    memory = data.draw(st.sampled_from((3_000, 10_000, 1_000_000)))
    costs = data.draw(st.sampled_from((costs_of(job, memory), None)))
    policy = data.draw(st.sampled_from(RUNNING_POLICIES))
    first = initial_plan(job, alone(job), costs)
    lost = data.draw(st.sets(st.integers(0, job.world_size - 1), max_size=3))
    try:
        plan = replan(job, first, lost, 1, alone(job), costs, policy)
    except NoFeasiblePlan:
        return
    better = improve(job, plan, 2, alone(job), costs, policy=policy)
    assert better == improve(job, plan, 2, alone(job), costs, policy=policy), "the same inputs give the same plan"
    if better is None:
        return
    assert policy in ("ours", "elaswave") and better.epoch == 2
    assert set(better.placement.workers) == set(plan.placement.workers)
    assert better.placement.spares == plan.placement.spares and not better.over_memory
    check(job, better, set(range(job.world_size)) - lost, whole=costs is None and policy == "ours")
    if costs is not None:
        assert better.predicted_s == pytest.approx(predict_step_s(job, better, costs))
        assert predict_step_s(job, better, costs) <= (1 - LEAST_GAIN) * predict_step_s(job, plan, costs) * (1 + 1e-9)
        assert bytes_of(better, costs) <= max(costs.memory_bytes, bytes_of(plan, costs))
    if better.placement == plan.placement:
        assert better.backups == plan.backups
    again = improve(job, better, 3, alone(job), costs, policy=policy)
    assert again is None or costs is not None


@given(job=jobs(), data=st.data())
@settings(max_examples=20, deadline=None)
def test_a_plan_without_drained_workers_is_made_whenever_a_cell_is_left(job: JobSpec, data: st.DataObject) -> None:
    costs = data.draw(st.sampled_from((costs_of(job), costs_of(job, 3_000), None)))
    plan = initial_plan(job, alone(job), costs)
    if data.draw(st.booleans()):
        plan = replan(job, plan, data.draw(st.sets(st.integers(0, job.world_size - 1), max_size=1)), 1, {}, costs)
    living = {*plan.placement.workers, *plan.placement.spares}
    drained = data.draw(st.sets(st.sampled_from(sorted(living)), min_size=1))
    if not any(plan.placement.without(drained).stages):
        with pytest.raises(NoFeasiblePlan, match="too few workers are left"):
            improve(job, plan, 2, alone(job), costs, drained)
        return
    better = improve(job, plan, 2, alone(job), costs, drained)
    assert better is not None
    check(job, better, living - drained, whole=costs is None)
    # Whoever waited goes on waiting; cell mates of who leaves wait from now on.
    assert set(better.placement.spares) >= set(plan.placement.spares) - drained
    assert set(better.placement.workers) <= set(plan.placement.workers) - drained
    assert (better.predicted_s is None) == (costs is None)


def test_layers_leave_the_stage_that_lost_a_cell_and_orders_are_not_those_of_1f1b() -> None:
    job = job_of()
    costs = costs_of(job)
    plan = after_loss(job, costs, {3})
    better = improve(job, plan, 2, alone(job), costs)
    assert better is not None and plan.predicted_s is not None and better.predicted_s is not None
    assert plan.layers == initial_plan(job, {}).layers
    assert better.layers != plan.layers
    assert better.orders and any("W" in text for cells in better.orders for text in cells)
    assert better.predicted_s < 0.85 * plan.predicted_s
    # The next loss begins from there.
    again = replan(job, better, {6}, 3, alone(job), costs)
    assert again.layers == better.layers
    best = improve(job, again, 4, alone(job), costs)
    assert best is not None and best.predicted_s is not None
    assert again.predicted_s is not None and best.predicted_s < again.predicted_s


def test_jobs_that_cannot_split_their_backward_passes_have_no_orders() -> None:
    job = job_of(split=False)
    costs = costs_of(job)
    plan = after_loss(job, costs, {3})
    better = improve(job, plan, 2, alone(job), costs)
    assert better is not None and not plan.orders and not better.orders
    split = improve(replace(job, split_backward=True), plan, 2, alone(job), costs)
    assert split is not None and split.predicted_s is not None and better.predicted_s is not None
    assert split.predicted_s < better.predicted_s


def test_a_plan_that_is_hardly_better_is_left_alone() -> None:
    job = job_of(stages=1, rows=2)
    costs = costs_of(job)
    assert improve(job, initial_plan(job, alone(job), costs), 1, alone(job), costs) is None


def test_drained_workers_that_wait_anyway_change_nothing_but_who_is_spare() -> None:
    job = replace(job_of(), tensor_parallel=2)
    costs = costs_of(job)
    plan = replan(job, initial_plan(job, alone(job), costs), {0}, 1, alone(job), costs)
    assert plan.placement.spares == (1,)
    better = improve(job, plan, 2, alone(job), costs, drained=(1,))
    assert better is not None
    assert better.placement.spares == () and set(better.placement.workers) == set(plan.placement.workers)


@pytest.mark.parametrize("policy", RUNNING_POLICIES)
def test_a_drained_replica_leaves_the_others_whoever_plans(policy: RunningPolicy) -> None:
    job = job_of()
    costs = costs_of(job)
    plan = initial_plan(job, alone(job), costs)
    better = improve(job, plan, 1, alone(job), costs, drained=(0, 3, 6, 9), policy=policy)
    assert better is not None and better.placement.spares == ()
    check(job, better, set(range(12)) - {0, 3, 6, 9}, whole=False)


def test_nobody_is_left_after_draining_all() -> None:
    job = job_of(stages=2, rows=1)
    with pytest.raises(NoFeasiblePlan, match=r"epoch 3: too few workers are left \(0\)"):
        improve(job, initial_plan(job, {}), 3, {}, drained=(0, 1))


def test_costs_of_another_model_are_refused() -> None:
    job = job_of()
    with pytest.raises(BadUsage, match="costs are those of 7 layers"):
        improve(job, initial_plan(job, {}), 1, {}, replace(costs_of(job), cost=cost(7)))


def test_large_jobs_keep_the_order_of_1f1b() -> None:
    job = job_of(stages=4, rows=64, per_row=16)
    costs = costs_of(job, 10_000_000)
    plan = after_loss(job, costs, set(range(30)))
    better = improve(job, plan, 2, alone(job), costs)
    assert better is not None and not better.orders
    assert better.layers != plan.layers
    assert better.predicted_s == pytest.approx(predict_step_s(job, better, costs))


@pytest.mark.parametrize("policy", RUNNING_POLICIES)
@pytest.mark.parametrize("with_costs", [True, False])
def test_given_layers_are_taken_even_where_steps_get_longer(policy: RunningPolicy, with_costs: bool) -> None:
    job = job_of()
    costs = costs_of(job) if with_costs else None
    plan = initial_plan(job, alone(job), costs)
    given_layers = improve(job, plan, 1, alone(job), costs, policy=policy, layers=(6, 1, 3, 2))
    assert given_layers is not None and given_layers.layers == ((0, 6), (6, 7), (7, 10), (10, 12))
    assert given_layers.placement == plan.placement and given_layers.backups == plan.backups
    check(job, given_layers, set(range(12)), whole=costs is None)
    assert given_layers.over_memory == (costs is None), "more than four layers on a device were not there at launch"
    drained = improve(job, plan, 1, alone(job), costs, (4,), policy, (6, 1, 3, 2))
    assert drained is not None and drained.layers == given_layers.layers and 4 not in drained.placement.workers


@pytest.mark.parametrize("layers", [(3, 3, 3), (3, 3, 3, 4), (4, 0, 4, 4), (3, 3, 3, 2, 1)])
def test_layers_that_do_not_make_up_the_model_are_refused(layers: tuple[int, ...]) -> None:
    job = job_of()
    with pytest.raises(NoFeasiblePlan, match=r"layers are none for stages of \[3, 3, 3, 3\] cells.*12 in all"):
        improve(job, initial_plan(job, {}), 1, {}, layers=layers)
    with pytest.raises(NoFeasiblePlan, match=r"none for stages of \[0, 3, 3, 3\] cells"):
        improve(job, initial_plan(job, {}), 1, {}, drained=(0, 1, 2), layers=(3, 3, 3, 3))
