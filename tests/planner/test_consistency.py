"""At ``bitwise`` every plan consists of the job's own micro-batches, whoever plans and whatever happens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elas.planner.improve import improve
from megatron_elas.planner.job_costs import JobCosts
from megatron_elas.planner.plan import initial_plan, replan
from megatron_elas.planner.policies import POLICIES, ours
from megatron_elas.planner.step_plan import QUICK
from megatron_elas.spec.cluster import load_cluster
from megatron_elas.spec.consistency import CONSISTENCY_LEVELS
from megatron_elas.spec.errors import NoFeasiblePlan
from megatron_elas.spec.items import are_whole
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.job_profile import load_job
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.policy import RUNNING_POLICIES
from tests.planner.situations import cost, situation
from tests.planner.test_job_plans import LINK, check, jobs


def costs_of(job: JobSpec, memory: int = 1_000_000) -> JobCosts:
    return JobCosts(cost=cost(job.num_layers), memory_bytes=memory, link=LINK)


@given(job=jobs(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_event_and_no_policy_cuts_or_joins_micro_batches(job: JobSpec, data: st.DataObject) -> None:
    """Losses, better plans, drained workers and given layers, one after the other."""
    job = replace(job, **data.draw(st.sampled_from(({"consistency": "bitwise"}, {"fp16": True})), label="why"))
    costs = data.draw(st.sampled_from((costs_of(job), costs_of(job, 3_000), None)), label="costs")
    policy = data.draw(st.sampled_from(RUNNING_POLICIES), label="policy")
    domains = {worker: f"worker{worker}" for worker in range(job.world_size)}
    plan = initial_plan(job, domains, costs)
    alive = set(range(job.world_size))
    check(job, plan, alive, whole=True)
    for epoch in range(1, 5):
        event = data.draw(st.sampled_from(("loss", "improve", "drain", "rebalance")), label="event")
        gone = data.draw(st.sets(st.sampled_from(sorted(alive)), min_size=1, max_size=2), label="gone")
        new: ElasticPlan | None
        try:
            if event == "loss":
                new = replan(job, plan, gone, epoch, domains, costs, policy)
            elif event == "rebalance":
                layers = tuple(stop - start for start, stop in reversed(plan.layers))
                new = improve(job, plan, epoch, domains, costs, policy=policy, layers=layers)
            else:
                new = improve(job, plan, epoch, domains, costs, gone if event == "drain" else (), policy)
        except NoFeasiblePlan:
            return
        if event in ("loss", "drain"):
            alive -= gone
        if new is not None:
            assert are_whole(new.items, job.micro_batch_size)
            plan = new
            if policy == "ours":
                check(job, plan, alive, whole=True)


def test_the_same_loss_cuts_micro_batches_at_the_other_levels() -> None:
    """So the property is none of all plans."""
    job = JobSpec(
        tensor_parallel=1, pipeline_parallel=2, data_parallel=3, micro_batch_size=2, num_microbatches=12,
        stage_layers=(3, 3), split_backward=True,
    )  # fmt: skip
    for policy in ("ours", "elaswave"):
        for level in CONSISTENCY_LEVELS:
            own = replace(job, consistency=level)
            costs = costs_of(own)
            plan = replan(own, initial_plan(own, {}, costs), [1], 1, {}, costs, policy)
            assert are_whole(plan.items, 2) == (level == "bitwise"), (policy, level)


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_to_compare_with_keep_micro_batches_too(policy: str) -> None:
    lost = ((1, 0), (2, 1))
    begin = situation(4, 3, 4, 2)
    begin = replace(begin, job=replace(begin.job, consistency="bitwise"))
    step = POLICIES[policy](begin, lost)
    if step.candidate is not None:
        assert step.candidate.size == 2 and set(step.candidate.deals) == {"reroute"}


def test_what_whole_micro_batches_cost_a_step_is_predicted() -> None:
    """Never less than with all freedom, and here more."""
    lost = ((1, 0),)
    begin = situation(2, 4, 1, 4)
    exact = replace(begin, job=replace(begin.job, consistency="bitwise"))
    whole, free = ours(exact, lost, effort=QUICK).plan, ours(begin, lost, effort=QUICK).plan
    assert whole is not None and free is not None
    assert whole.step_s > 1.2 * free.step_s
    assert "neither cut nor joined: consistency is bitwise" in whole.explain()
    assert "neither cut nor joined" not in free.explain()


def test_sums_in_fixed_point_take_memory_and_are_what_is_reduced() -> None:
    cluster = load_cluster("npu-96")
    job = load_job("llama2-34b")
    plain = JobCosts.of(job.with_consistency("numerical"), cluster).cost
    exact = JobCosts.of(job.with_consistency("bitwise"), cluster).cost
    assert (plain.sum_bytes, exact.sum_bytes) == (0, 8)
    more = exact.state_bytes(0, 12, 6) - plain.state_bytes(0, 12, 6)
    assert more == 8 * plain.parameters(0, 12)
    assert (plain.reduced_bytes, exact.reduced_bytes) == (4, 8)
