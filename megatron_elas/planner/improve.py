"""A better plan for a running job that has lost nobody: what it goes over to between two steps.

While workers wait for a plan there is time for a few milliseconds' search, and what moves then keeps them waiting. Once
training goes on, layers may move beside it, orders are searched for longer, and cells change their stage where that
pays. Seats stay: spare workers take no part in such a change.

Pure: the same inputs give the same plan on any machine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from megatron_elas.planner.choices import Choice, Choices, best_of, time_plan
from megatron_elas.planner.dataflow import DEALS, Deal, Dealt, deal_stages, is_possible, is_stock
from megatron_elas.planner.finding import REGROUPING, RUNTIME, find_plan
from megatron_elas.planner.job_costs import JobCosts
from megatron_elas.planner.plan import check_workers, costs_or_even, finish, list_choices, situation_of
from megatron_elas.planner.prediction import Candidate, Predictor
from megatron_elas.planner.running_policies import choose_like, improve_like
from megatron_elas.planner.search import Freedom, stay
from megatron_elas.planner.situation import Situation, divided
from megatron_elas.planner.step_plan import Effort
from megatron_elas.schedule.timing import Deadlock
from megatron_elas.spec.errors import NoFeasiblePlan
from megatron_elas.spec.items import StageItems
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.policy import RunningPolicy

LEAST_GAIN = 0.02
"""Share of the step by which a plan has to be shorter than the one in force."""
EXACT_ITEMS = 4_000
"""Most items of all stages together whose orders are searched for one by one."""
TIMED_ITEMS = 100_000
"""Of all orders that are tried, about: a second."""
_MORE_ORDERS = 6
"""Further searches where the order that was found is none for the running job."""


def improve(
    job: JobSpec,
    plan: ElasticPlan,
    epoch: int,
    domains: Mapping[int, str],
    costs: JobCosts | None = None,
    drained: Collection[int] = (),
    policy: RunningPolicy = "ours",
    layers: Sequence[int] | None = None,
) -> ElasticPlan | None:
    """The plan to go over to between two steps.

    Args:
        job: What all workers said when they joined.
        plan: In force.
        epoch: Of the new plan.
        domains: Failure domain of each worker.
        costs: As of ``replan``.
        drained: Workers that leave: they live until the new plan is in force, and have no part in it.
        policy: Who plans.
        layers: Of every stage, in place of those that would be found.

    Returns:
        None where nothing is better by at least ``LEAST_GAIN``. With drained workers, or given layers, always a plan,
        of longer steps if need be.

    Raises:
        NoFeasiblePlan: Without the drained workers no cell is left; the layers are none for the stages; or another
            policy than ours cannot go on.
        BadUsage: The costs are those of another model.
    """
    left = plan.placement.without(drained)
    # Spare workers have none of the state that a change needs at once.
    seated = replace(left, spares=())
    check_workers(job, plan, seated, drained, epoch)
    reckoned = costs_or_even(job, seated, costs)
    situation = situation_of(job, seated, plan, reckoned)
    if layers is not None:
        chosen = _choose_with(layers, situation, plan, policy, whole=costs is None)
        return finish(job, chosen, plan, left, epoch, domains, costs)
    if policy == "ours":
        found: Choice | None = _choose(situation, plan, REGROUPING, whole=costs is None)
    elif drained:
        found = choose_like(policy, situation)
    else:
        found = improve_like(policy, situation)
    if found is None:
        return None
    if not drained:
        cells = sum(found.candidate.widths)
        limit_s = time_plan(plan, reckoned.cost, reckoned.link) * (1 - LEAST_GAIN)
        if found.work.step_s > limit_s or not found.fits or cells < situation.num_cells:
            return None
    return finish(job, found, plan, left, epoch, domains, costs)


def _choose_with(
    layers: Sequence[int], situation: Situation, plan: ElasticPlan, policy: RunningPolicy, *, whole: bool
) -> Choice:
    """The best with given layers, cells staying. Raises NoFeasiblePlan."""
    total = situation.cost.num_layers
    if len(layers) != situation.num_stages or sum(layers) != total or min(layers) < 1 or situation.lost_stages:
        raise NoFeasiblePlan(
            f"{list(layers)} layers are none for stages of {list(map(len, situation.rows))} cells: give a number from "
            f"1 up for each stage, all of which have cells, {total} in all"
        )
    # As if they were there already: nothing else than what stages run is looked for.
    there = replace(situation, cuts=tuple(accumulate(layers, initial=0)))
    if policy == "ours":
        return _choose(there, plan, RUNTIME, whole=whole)
    return choose_like(policy, there)


def _choose(situation: Situation, plan: ElasticPlan, freedom: Freedom, *, whole: bool) -> Choice:
    """The best that is found."""
    seeds = _seeds(situation, plan)
    found, fits = find_plan(situation, (freedom,), _effort, seeds, whole=whole)
    choices = list_choices(situation, found, fits=fits)
    if found.effort.exact and found.prediction.found.tastes is not None and not any(own.work.orders for own in choices):
        choices += _other_orders(situation, found.candidate)
        freedom = replace(freedom, split=False, orders=False)
        found, fits = find_plan(situation, (freedom,), _effort, seeds, whole=whole)
        choices += list_choices(situation, found, fits=fits)
    return best_of(choices)


def _other_orders(situation: Situation, candidate: Candidate) -> list[Choice]:
    """Of a candidate whose best order is none for the running job."""
    make, predictor = Choices(situation), Predictor(situation, exact=True, staggered=False)
    choices = []
    for seed in range(_MORE_ORDERS):
        try:
            found = predictor.predict(candidate, 8 * (seed + 1), seed=seed).found
        except Deadlock:
            continue
        ordered = None if found.tastes is None else make.ordered(candidate, found.program)
        if ordered is not None:
            choices.append(ordered)
    return choices


def _effort(situation: Situation) -> Effort:
    """A second or so, however large the job is."""
    job, stages = situation.job, situation.num_stages
    exact = job.num_microbatches * stages <= EXACT_ITEMS
    items = stages * (job.num_microbatches if exact else job.num_microbatches // job.data_parallel)
    return Effort(evaluations=max(24, min(240, TIMED_ITEMS // items)), exact=exact)


def _seeds(situation: Situation, plan: ElasticPlan) -> tuple[Candidate, ...]:
    """The plan in force as candidates, where its cells are all left."""
    if situation.lost_stages or any(
        len(rows) != len(items) for rows, items in zip(situation.rows, plan.items, strict=True)
    ):
        return ()
    job, known = situation.job, Dealt()
    for size in [size for size in range(job.micro_batch_size, 0, -1) if job.micro_batch_size % size == 0]:
        deals = [
            _deal_of(divided(job, size), rows, own, known) for rows, own in zip(situation.rows, plan.items, strict=True)
        ]
        if all(deals):
            plain = replace(stay(situation), size=size, deals=tuple(deal for deal in deals if deal))
            return (replace(plain, split=True), plain) if job.split_backward else (plain,)
    return ()


def _deal_of(job: JobSpec, rows: tuple[int, ...], items: StageItems, known: Dealt) -> Deal | None:
    possible = (deal for deal in DEALS if is_stock(job, rows) or is_possible(job, len(rows), deal))
    return next((deal for deal in possible if deal_stages(job, [rows], [deal], known)[0] == items), None)
