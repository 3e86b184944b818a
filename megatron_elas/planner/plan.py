"""The running job's plan: that of the step planner, with the freedom that the runtime has.

As long as every stage has a cell, or spare workers make one for it, layers and cells stay, the samples of lost rows are
dealt to the other cells of their stage, in whole micro-batches or in items of other sizes, and spare workers make cells
where these relieve the busiest stage. Where that does not fit the memory, layers may move too, and if need be cells.
When a stage has no cell left, both may. Clocks are nominal. Orders are those of 1F1B, or, in jobs that can split their
backward passes and are small enough to time every item while workers wait, whatever is found to be faster. Where
nothing is known of what passes take, micro-batches stay whole.

Layers move beside training afterwards, see ``planner.improve``. Other policies: ``planner.running_policies``.

A job goes on as long as a cell can be made: see ``ElasticPlan.over_memory``.

Pure: the same inputs give the same plan on any machine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from megatron_elas.planner.backups import place_backups
from megatron_elas.planner.choices import Choice, Choices, best_of, plan_bytes, time_plan
from megatron_elas.planner.dataflow import Deal, is_possible
from megatron_elas.planner.finding import REGROUPING, RESTAGING, RUNTIME, find_plan
from megatron_elas.planner.job_costs import JobCosts, uniform_costs
from megatron_elas.planner.prediction import Candidate
from megatron_elas.planner.running_policies import choose_like
from megatron_elas.planner.seating import seat_workers
from megatron_elas.planner.situation import Situation, divided
from megatron_elas.planner.step_plan import Effort, StepPlan
from megatron_elas.schedule.warmups import find_order
from megatron_elas.spec.errors import NoFeasiblePlan
from megatron_elas.spec.items import are_whole, whole_micro_batches
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.layout import Placement
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.policy import RunningPolicy

EXACT_ITEMS = 600
"""Most items of all stages together that are timed one by one while workers wait."""
TIMED_ITEMS = 2_000
"""Of all orders that are timed while workers wait, about."""
TIMED_ITEMS_LOST = 6_000
"""The same when a stage is lost: then there is more to choose from, and no plan to fall back on."""


def initial_plan(job: JobSpec, domains: Mapping[int, str], costs: JobCosts | None = None) -> ElasticPlan:
    """The plan of epoch 0: Megatron's own grid.

    Args:
        job: What all workers said when they joined.
        domains: Failure domain of each worker.
        costs: What the plan's step is predicted with; None: not at all.

    Raises:
        BadUsage: The costs are those of another model.
    """
    placement = Placement.initial(job)
    cells = whole_micro_batches(share_items(job.num_microbatches, job.data_parallel), job.micro_batch_size)
    items = (cells,) * placement.num_stages
    plan = ElasticPlan(
        epoch=0,
        placement=placement,
        layers=job.launch_layers,
        items=items,
        backups=place_backups(placement, domains, job.snapshot_replicas),
        warmups=find_order(items).warmups,
    )
    return plan if costs is None else replace(plan, predicted_s=predict_step_s(job, plan, costs))


def replan(
    job: JobSpec,
    old: ElasticPlan,
    lost: Collection[int],
    epoch: int,
    domains: Mapping[int, str],
    costs: JobCosts | None = None,
    policy: RunningPolicy = "ours",
) -> ElasticPlan:
    """The plan without ``lost``.

    Args:
        job: What all workers said when they joined.
        old: The plan before.
        lost: Workers.
        epoch: Of the plan.
        domains: Failure domain of each worker.
        costs: What plans are compared and predicted with; None: every layer takes and holds as much, see
            ``uniform_costs``, micro-batches stay whole, and nothing is predicted.
        policy: Who plans.

    Raises:
        NoFeasiblePlan: Fewer workers are left than a cell takes; or another policy than ours cannot go on.
        BadUsage: The costs are those of another model.
    """
    left = old.placement.without(lost)
    check_workers(job, old, left, lost, epoch)
    reckoned = costs_or_even(job, left, costs)
    now = situation_of(job, left, old, reckoned)
    chosen = choose(now, whole=costs is None) if policy == "ours" else choose_like(policy, now)
    return finish(job, chosen, old, left, epoch, domains, costs)


def check_workers(job: JobSpec, old: ElasticPlan, left: Placement, lost: Collection[int], epoch: int) -> None:
    """Raise NoFeasiblePlan when nobody is left to make a cell."""
    workers = _count_workers(job, left)
    if workers < job.tensor_parallel:
        raise NoFeasiblePlan(
            f"epoch {epoch}: too few workers are left ({workers}), a cell takes {job.tensor_parallel} (workers lost: "
            f"{sorted(lost)}; before: {old.placement.describe()}): restart on more machines from the newest "
            f"checkpoint with --load"
        )


def _count_workers(job: JobSpec, left: Placement) -> int:
    return sum(len(cells) for cells in left.stages) * job.tensor_parallel + len(left.spares)


def finish(
    job: JobSpec,
    chosen: Choice,
    old: ElasticPlan,
    left: Placement,
    epoch: int,
    domains: Mapping[int, str],
    costs: JobCosts | None,
) -> ElasticPlan:
    """The plan of a choice: who sits where, and who keeps whose copy. Backups stay where all seats do."""
    assert not job.keeps_micro_batches or are_whole(chosen.work.items, job.micro_batch_size)
    placement = seat_workers(chosen.candidate, left, job.tensor_parallel, old.placement)
    same = placement.stages == old.placement.stages
    return ElasticPlan(
        epoch=epoch,
        placement=placement,
        layers=chosen.work.layers,
        items=chosen.work.items,
        backups=old.backups if same else place_backups(placement, domains, job.snapshot_replicas),
        warmups=chosen.work.warmups,
        orders=chosen.work.orders,
        predicted_s=None if costs is None else chosen.work.step_s,
        over_memory=not chosen.fits,
    )


def choose(situation: Situation, *, whole: bool = False) -> Choice:
    """What the job does: never slower than to do nothing, but to move whole micro-batches, where that is possible.

    Args:
        situation: After a loss.
        whole: Micro-batches are neither cut nor joined.
    """
    is_lost = len(situation.lost_stages) > situation.spares
    freedoms = (REGROUPING,) if is_lost else (RUNTIME, RESTAGING, REGROUPING)
    found, fits = find_plan(situation, freedoms, _effort, whole=whole)
    return best_of(list_choices(situation, found, fits=fits))


def list_choices(situation: Situation, found: StepPlan, *, fits: bool) -> list[Choice]:
    """What a search's end comes to, item by item: as it was found, to do nothing, and a few that are near."""
    # The search may have timed one cell for each stage, and knows nothing of cells that join.
    candidates = [found.candidate]
    if found.nothing is not None and found.nothing.candidate != found.candidate:
        candidates.insert(0, found.nothing.candidate)
    if (mixed := _mixed(found)) is not None:
        candidates.append(mixed)
    make = Choices(situation)
    choices = [make.in_turns(candidate, fits=fits) for candidate in candidates]
    if found.effort.exact and found.prediction.found.tastes is not None:
        ordered = make.ordered(found.candidate, found.prediction.program, fits=fits)
        if ordered is not None:
            choices.append(ordered)
    return choices


def _mixed(found: StepPlan) -> Candidate | None:
    """One that mixes where this one reshapes: one cell for each stage does not tell which of them is faster."""
    candidate = found.candidate
    job = divided(found.situation.job, candidate.size)
    if found.effort.exact or job.num_microbatches * candidate.num_stages > TIMED_ITEMS_LOST:
        return None
    deals: tuple[Deal, ...] = tuple(
        "mix" if deal == "reshape" and is_possible(job, width, "mix") else deal
        for deal, width in zip(candidate.deals, candidate.widths, strict=True)
    )
    if deals == candidate.deals:
        return None
    return replace(candidate, deals=deals)


def situation_of(job: JobSpec, left: Placement, old: ElasticPlan, costs: JobCosts) -> Situation:
    """Of a job whose cells are ``left`` of an old plan's."""
    # What the plan before takes on the fullest device is there, whatever a profile says: it ran.
    return Situation(
        job=job,
        cost=costs.cost,
        cuts=(0, *(stop for _, stop in old.layers)),
        rows=_rows(left),
        memory_bytes=max(costs.memory_bytes, plan_bytes(old, costs.cost)),
        link=costs.link,
        held=_rows(old.placement),
        spares=len(left.spares) // job.tensor_parallel,
    )


def _rows(placement: Placement) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(cell.row for cell in cells) for cells in placement.stages)


def costs_or_even(job: JobSpec, left: Placement, costs: JobCosts | None) -> JobCosts:
    """The costs, checked; without them uniform ones, with room for as many layers as a worker has to hold at least."""
    if costs is not None:
        costs.check(job)
        return costs
    even = uniform_costs(job)
    deepest = min(job.pipeline_parallel, job.num_layers, _count_workers(job, left) // job.tensor_parallel)
    return replace(even, memory_bytes=max(even.memory_bytes, -(-job.num_layers // deepest)))


def _effort(situation: Situation) -> Effort:
    """As much as takes some milliseconds; tens where items are timed one by one, for steps that are shorter."""
    job, stages = situation.job, situation.num_stages
    exact = job.num_microbatches * stages <= EXACT_ITEMS
    items = stages * (job.num_microbatches if exact else job.num_microbatches // job.data_parallel)
    timed = TIMED_ITEMS_LOST if situation.lost_stages else TIMED_ITEMS
    return Effort(evaluations=max(3, min(32, timed // items)), exact=exact)


def predict_step_s(job: JobSpec, plan: ElasticPlan, costs: JobCosts) -> float:
    """Seconds of a step under a plan, its items as they are dealt and in its orders, or in 1F1B.

    Raises:
        BadUsage: The costs are those of another model, or the plan's orders are none of its items.
        Deadlock: These wait for each other.
    """
    costs.check(job)
    return time_plan(plan, costs.cost, costs.link)


def share_items(num_items: int, num_cells: int) -> tuple[tuple[int, ...], ...]:
    """Deal a pass's micro-batches round to the cells of one stage.

    With the original number of cells this is Megatron's sampler: ``g = m * D + d`` goes to row ``d``.

    Returns:
        One ascending tuple per cell. Sizes differ by at most one; together each of
        ``range(num_items)`` once. Example: 8 over 3 gives (0, 3, 6), (1, 4, 7), (2, 5).

    Raises:
        NoFeasiblePlan: Fewer micro-batches than cells.
    """
    if num_items < num_cells:
        raise NoFeasiblePlan(f"{num_items} micro-batches cannot feed {num_cells} cells")
    return tuple(tuple(range(cell, num_items, num_cells)) for cell in range(num_cells))
