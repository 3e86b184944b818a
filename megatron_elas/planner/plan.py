"""The running job's plan: that of the step planner, with the freedom that the runtime has.

As long as every stage has a cell, or spare workers make one for it, layers and cells stay, the samples of lost rows are
dealt to the other cells of their stage, in whole micro-batches or in items of other sizes, and spare workers make cells
where these relieve the busiest stage. Where that does not fit the memory, layers may move too, and if need be cells.
When a stage has no cell left, both may. Orders are those of 1F1B at nominal clocks. Where nothing is known of what
passes take, micro-batches stay whole.

A job goes on as long as a cell can be made: see ``ElasticPlan.over_memory``.

Pure: the same inputs give the same plan on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count, pairwise
from typing import NamedTuple

from megatron_elas.planner.backups import place_backups
from megatron_elas.planner.cost_model import crossing
from megatron_elas.planner.dataflow import Deal, Dealt, is_possible
from megatron_elas.planner.job_costs import JobCosts, uniform_costs
from megatron_elas.planner.prediction import stage_tail_s
from megatron_elas.planner.search import Freedom
from megatron_elas.planner.situation import Situation, divided
from megatron_elas.planner.step_plan import Effort, StepPlan, make_plan
from megatron_elas.schedule.lockstep import Known
from megatron_elas.schedule.one_f_one_b import stock_warmup
from megatron_elas.schedule.warmups import find_order, time_order
from megatron_elas.spec.cluster import Link
from megatron_elas.spec.cost import CostSums, JobCost, PassTime, StageTimes
from megatron_elas.spec.errors import NoFeasiblePlan
from megatron_elas.spec.items import StageItems, whole_micro_batches
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.layout import Placement
from megatron_elas.spec.plan import ElasticPlan

RUNTIME = Freedom(layers=False, cells=False, split=False, orders=False)
"""What the runtime carries out in any step."""
RESTAGING = replace(RUNTIME, layers=True)
"""What it carries out in a recovery in which models are made anew, cells staying."""
REGROUPING = replace(RESTAGING, cells=True)
"""And that in which they do not."""
_WHOLE: tuple[Deal, ...] = ("reroute",)
"""How whole micro-batches move."""
EXACT_ITEMS = 600
"""Most items of all stages together that are timed one by one while workers wait."""
TIMED_ITEMS = 2_000
"""Of all orders that are timed while workers wait, about."""
TIMED_ITEMS_LOST = 6_000
"""The same when a stage is lost: then there is more to choose from, and no plan to fall back on."""

MORE_MEMORY = 1.1
"""By which the limit is raised when no plan fits."""

Layers = tuple[tuple[int, int], ...]
"""Of every stage: ``[start, stop)``."""


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

    Raises:
        NoFeasiblePlan: Fewer workers are left than a cell takes.
        BadUsage: The costs are those of another model.
    """
    left = old.placement.without(lost)
    workers = sum(len(cells) for cells in left.stages) * job.tensor_parallel + len(left.spares)
    if workers < job.tensor_parallel:
        raise NoFeasiblePlan(
            f"epoch {epoch}: too few workers are left ({workers}), a cell takes {job.tensor_parallel} (workers lost: "
            f"{sorted(lost)}; before: {old.placement.describe()}): restart on more machines from the newest "
            f"checkpoint with --load"
        )
    costs_or_even = costs or _roomy_costs(job, workers)
    costs_or_even.check(job)
    chosen = choose(_situation(job, left, old, costs_or_even), whole=costs is None)
    placement, backups = chosen.plan.place(left, domains, before=old.placement, replicas=job.snapshot_replicas)
    return ElasticPlan(
        epoch=epoch,
        placement=placement,
        layers=chosen.work.layers,
        items=chosen.work.items,
        backups=backups,
        warmups=chosen.work.warmups,
        predicted_s=None if costs is None else chosen.work.step_s,
        over_memory=not chosen.fits,
    )


class Work(NamedTuple):
    """What stages run in a step, and how."""

    layers: Layers
    items: tuple[StageItems, ...]
    warmups: tuple[int, ...]
    step_s: float
    """Predicted, every item of every cell timed."""


class Choice(NamedTuple):
    """What a running job does in a situation."""

    plan: StepPlan
    work: Work
    fits: bool
    """Into the memory. What a profile says of it is an estimate, and no reason to end a job."""


def choose(situation: Situation, *, whole: bool = False) -> Choice:
    """What the job does: never slower than to do nothing, but to move whole micro-batches, where that is possible.

    Args:
        situation: After a loss.
        whole: Micro-batches are neither cut nor joined.
    """
    found, fits = _find(situation, whole=whole)
    # The search may have timed one cell for each stage, and knows nothing of cells that join.
    plans = [found]
    if found.nothing is not None and found.nothing.candidate != found.candidate:
        plans.insert(0, replace(found, prediction=found.nothing))
    if (mixed := _mixed(found)) is not None:
        plans.append(mixed)
    choose_from = _Choices(situation)
    choices = (choose_from.make(plan, fits) for plan in plans)
    return max(choices, key=lambda choice: (choice.fits, -choice.work.step_s))


def _mixed(found: StepPlan) -> StepPlan | None:
    """A plan that mixes where this one reshapes: one cell for each stage does not tell which of them is faster."""
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
    return replace(found, prediction=replace(found.prediction, candidate=replace(candidate, deals=deals)))


class _Choices:
    """Makes choices for one situation; what several of them have is looked at once."""

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._dealt, self._known = Dealt(), Known()
        self._times: dict[tuple[Layers, tuple[int, ...]], _Times] = {}

    def make(self, found: StepPlan, fits: bool) -> Choice:
        """What this plan comes to."""
        situation, layers = self._situation, tuple(pairwise(found.candidate.cuts))
        items = found.all_items(self._dealt)
        key = layers, found.candidate.widths
        if key not in self._times:
            self._times[key] = _times_of(*key, situation.cost, situation.link)
        times = self._times[key]
        order = find_order(items, times.stages, times.links, self._known)
        filled = _filled_bytes(situation.cost, layers, items, order.warmups)
        work = Work(layers, items, order.warmups, order.step_s + times.tail_s)
        return Choice(found, work, fits and filled <= situation.memory_bytes)


def _situation(job: JobSpec, left: Placement, old: ElasticPlan, costs: JobCosts) -> Situation:
    # What the plan before takes on the fullest device is there, whatever a profile says: it ran.
    filled = _filled_bytes(costs.cost, old.layers, old.items, _warmups(old))
    return Situation(
        job=job,
        cost=costs.cost,
        cuts=(0, *(stop for _, stop in old.layers)),
        rows=_rows(left),
        memory_bytes=max(costs.memory_bytes, filled),
        link=costs.link,
        held=_rows(old.placement),
        spares=len(left.spares) // job.tensor_parallel,
    )


def _filled_bytes(cost: JobCost, layers: Layers, items: tuple[StageItems, ...], warmups: Sequence[int]) -> int:
    """Of the fullest device."""
    # Few stages, and few of their cells, have other sizes than the rest.
    distinct = {id(cells): cells for cells in items}
    sizes = {key: {tuple([item.samples for item in own]) for own in cells} for key, cells in distinct.items()}
    return max(
        cost.device_bytes(
            first,
            last,
            cells=len(cells),
            in_flight=max(_most_in_flight(own, ahead + 1) for own in sizes[id(cells)]),
            largest_item=max(map(max, sizes[id(cells)])),
        )
        for (first, last), cells, ahead in zip(layers, items, warmups, strict=True)
    )


def _most_in_flight(sizes: Sequence[int], items: int) -> int:
    """Most samples of so many items that follow one another."""
    window = most = sum(sizes[:items])
    for gone, new in zip(sizes, sizes[items:], strict=False):
        window += new - gone
        most = max(most, window)
    return most


def _rows(placement: Placement) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(cell.row for cell in cells) for cells in placement.stages)


def _roomy_costs(job: JobSpec, workers: int) -> JobCosts:
    """Uniform costs, with room for as many layers as a worker has to hold at least."""
    costs = uniform_costs(job)
    deepest = min(job.pipeline_parallel, job.num_layers, workers // job.tensor_parallel)
    return replace(costs, memory_bytes=max(costs.memory_bytes, -(-job.num_layers // deepest)))


def _find(situation: Situation, *, whole: bool) -> tuple[StepPlan, bool]:
    """The plan, and whether it fits the memory. ``whole``: micro-batches are neither cut nor joined.

    What a profile says of memory is an estimate, and no reason to end a job. So when nothing fits, limits are raised
    until something does, which then is near the least that any plan takes.
    """
    is_lost = len(situation.lost_stages) > situation.spares
    freedoms = (REGROUPING,) if is_lost else (RUNTIME, RESTAGING, REGROUPING)
    for more in count():
        room = replace(situation, memory_bytes=math.ceil(situation.memory_bytes * MORE_MEMORY**more))
        for freedom in freedoms:
            if whole:
                freedom = replace(freedom, deals=_WHOLE, divide=False)
            with suppress(NoFeasiblePlan):
                return make_plan(room, freedom, _effort(room)), more == 0
    raise AssertionError


def _effort(situation: Situation) -> Effort:
    """As much as takes some milliseconds; tens where items are timed one by one, for steps that are shorter."""
    job, stages = situation.job, situation.num_stages
    exact = job.num_microbatches * stages <= EXACT_ITEMS
    items = stages * (job.num_microbatches if exact else job.num_microbatches // job.data_parallel)
    timed = TIMED_ITEMS_LOST if situation.lost_stages else TIMED_ITEMS
    return Effort(evaluations=max(3, min(32, timed // items)), exact=exact)


def predict_step_s(job: JobSpec, plan: ElasticPlan, costs: JobCosts) -> float:
    """Seconds of a step under a plan, its items as they are dealt, with 1F1B.

    Raises:
        BadUsage: The costs are those of another model.
    """
    costs.check(job)
    times = _times_of(plan.layers, list(map(len, plan.items)), costs.cost, costs.link)
    return time_order(plan.items, _warmups(plan), times.stages, times.links) + times.tail_s


class _Times(NamedTuple):
    stages: tuple[StageTimes, ...]
    links: tuple[PassTime, ...]
    tail_s: float
    """After the last gradient."""


def _times_of(layers: Layers, widths: Sequence[int], cost: JobCost, link: Link) -> _Times:
    sums = CostSums(cost)
    tails = [
        stage_tail_s(cost, link, first, last, width, sums) for (first, last), width in zip(layers, widths, strict=True)
    ]
    stages = tuple(cost.stage_times(first, last) for first, last in layers)
    return _Times(stages, (crossing(cost, link),) * (len(layers) - 1), max(tails))


def _warmups(plan: ElasticPlan) -> tuple[int, ...]:
    widths = [len(cells) for cells in plan.items]
    return plan.warmups or tuple(stock_warmup(stage, widths) for stage in range(len(widths)))


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
