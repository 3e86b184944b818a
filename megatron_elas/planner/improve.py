"""A better plan for a running job that has lost nobody: what it goes over to between two steps.

While workers wait for a plan there is time for a few milliseconds' search, and what moves then keeps them waiting. Once
training goes on, layers may move beside it, orders are searched for longer, and cells change their stage where that
pays. Seats stay: spare workers take no part in such a change.

Pure: the same inputs give the same plan on any machine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from megatron_elas.planner.job_costs import JobCosts
from megatron_elas.planner.plan import predict_step_s, replan
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.plan import ElasticPlan

LEAST_GAIN = 0.02
"""Share of the step by which a plan has to be shorter than the one in force."""


def improve(
    job: JobSpec,
    plan: ElasticPlan,
    epoch: int,
    domains: Mapping[int, str],
    costs: JobCosts | None = None,
    drained: Collection[int] = (),
    policy: str = "ours",
) -> ElasticPlan | None:
    """The plan to go over to between two steps.

    Args:
        job: What all workers said when they joined.
        plan: In force.
        epoch: Of the new plan.
        domains: Failure domain of each worker.
        costs: As of ``replan``.
        drained: Workers that leave: they live until the new plan is in force, and have no part in it.
        policy: Who plans, see ``Launch.policy``.

    Returns:
        None where nothing is better by at least ``LEAST_GAIN``. With drained workers always a plan, of longer steps if
        need be.

    Raises:
        NoFeasiblePlan: Without the drained workers no cell is left.
        BadUsage: The costs are those of another model.
    """
    if drained:
        return replan(job, plan, drained, epoch, domains, costs)
    found = replan(job, plan, (), epoch, domains, costs)
    if costs is None or found.predicted_s is None:
        return None
    if found.predicted_s > predict_step_s(job, plan, costs) * (1 - LEAST_GAIN):
        return None
    return replace(found, backups=plan.backups) if found.placement == plan.placement else found
