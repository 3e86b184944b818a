"""The running job's plan: that of the step planner, with the freedom that the runtime has.

As long as every stage has a cell, or spare workers make one for it, layers and cells stay, whole micro-batches of
lost rows are dealt to the other cells of their stage, and spare workers make cells where these relieve the busiest
stage. Where that does not fit the memory, layers may move too, and if need be cells. When a stage has no cell left,
both may. Orders are those of 1F1B at nominal clocks.

A job goes on as long as a cell can be made: see ``ElasticPlan.over_memory``.

Pure: the same inputs give the same plan on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count, pairwise

from megatron_elas.planner.backups import place_backups
from megatron_elas.planner.cost_model import stage_durations
from megatron_elas.planner.job_costs import JobCosts, uniform_costs
from megatron_elas.planner.prediction import stage_tail_s
from megatron_elas.planner.search import Freedom
from megatron_elas.planner.situation import Situation
from megatron_elas.planner.step_plan import Effort, StepPlan, make_plan
from megatron_elas.schedule.one_f_one_b import one_f_one_b_program, stock_warmup, stock_warmups
from megatron_elas.schedule.routes import Flow
from megatron_elas.schedule.warmups import StagePasses, find_item_warmups, run_1f1b
from megatron_elas.spec.cost import JobCost
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
EXACT_ITEMS = 600
"""Most items of all stages together that are timed one by one while workers wait."""
TIMED_ITEMS = 6_000
"""Of all orders that are timed while workers wait, about."""

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
    items = tuple(
        whole_micro_batches(share_items(job.num_microbatches, len(stage)), job.micro_batch_size)
        for stage in placement.stages
    )
    backups = place_backups(placement, domains, job.snapshot_replicas)
    return _plan(job, 0, placement, job.launch_layers, items, backups, costs)


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
            ``uniform_costs``, and nothing is predicted.

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
    situation = _situation(job, left, old.placement, old.layers, costs or _roomy_costs(job, workers))
    found, fits = _find(situation)
    placement, backups = found.place(left, domains, before=old.placement, replicas=job.snapshot_replicas)
    layers = tuple(pairwise(found.candidate.cuts))
    items = tuple(found.items(stage) for stage in range(found.candidate.num_stages))
    return _plan(job, epoch, placement, layers, items, backups, costs, over_memory=not fits)


def _situation(job: JobSpec, left: Placement, before: Placement, layers: Layers, costs: JobCosts) -> Situation:
    costs.check(job)
    return Situation(
        job=job,
        cost=costs.cost,
        cuts=(0, *(stop for _, stop in layers)),
        rows=_rows(left),
        memory_bytes=max(costs.memory_bytes, _filled_bytes(job, before, layers, costs.cost)),
        link=costs.link,
        held=_rows(before),
        spares=len(left.spares) // job.tensor_parallel,
    )


def _filled_bytes(job: JobSpec, before: Placement, layers: Layers, cost: JobCost) -> int:
    """What the plan before takes on the fullest device. It ran, so there is as much, whatever a profile says."""
    widths = [len(cells) for cells in before.stages]
    most = [-(-job.num_microbatches // width) for width in widths]
    return max(
        cost.device_bytes(
            first,
            last,
            cells=width,
            in_flight=min(ahead + 1, items) * job.micro_batch_size,
            largest_item=job.micro_batch_size,
        )
        for (first, last), width, ahead, items in zip(layers, widths, stock_warmups(widths, most), most, strict=True)
    )


def _rows(placement: Placement) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(cell.row for cell in cells) for cells in placement.stages)


def _roomy_costs(job: JobSpec, workers: int) -> JobCosts:
    """Uniform costs, with room for as many layers as a worker has to hold at least."""
    costs = uniform_costs(job)
    deepest = min(job.pipeline_parallel, job.num_layers, workers // job.tensor_parallel)
    return replace(costs, memory_bytes=max(costs.memory_bytes, -(-job.num_layers // deepest)))


def _find(situation: Situation) -> tuple[StepPlan, bool]:
    """The plan, and whether it fits the memory.

    What a profile says of memory is an estimate, and no reason to end a job. So when nothing fits, limits are raised
    until something does, which then is near the least that any plan takes.
    """
    is_lost = len(situation.lost_stages) > situation.spares
    freedoms = (REGROUPING,) if is_lost else (RUNTIME, RESTAGING, REGROUPING)
    for more in count():
        room = replace(situation, memory_bytes=math.ceil(situation.memory_bytes * MORE_MEMORY**more))
        for freedom in freedoms:
            with suppress(NoFeasiblePlan):
                return make_plan(room, freedom, _effort(room)), more == 0
    raise AssertionError


def _effort(situation: Situation) -> Effort:
    """As much as takes a few milliseconds."""
    job, stages = situation.job, situation.num_stages
    exact = job.num_microbatches * stages <= EXACT_ITEMS
    items = stages * (job.num_microbatches if exact else job.num_microbatches // job.data_parallel)
    return Effort(evaluations=max(3, min(32, TIMED_ITEMS // items)), exact=exact)


def _plan(
    job: JobSpec,
    epoch: int,
    placement: Placement,
    layers: Layers,
    items: tuple[StageItems, ...],
    backups: tuple[tuple[int, int], ...],
    costs: JobCosts | None,
    *,
    over_memory: bool = False,
) -> ElasticPlan:
    plan = ElasticPlan(
        epoch=epoch,
        placement=placement,
        layers=layers,
        items=items,
        backups=backups,
        warmups=find_item_warmups(items, job.micro_batch_size),
        over_memory=over_memory,
    )
    return plan if costs is None else replace(plan, predicted_s=predict_step_s(job, plan, costs))


def predict_step_s(job: JobSpec, plan: ElasticPlan, costs: JobCosts) -> float:
    """Seconds of a step under a plan, its items as they are dealt, with 1F1B.

    Raises:
        BadUsage: The costs are those of another model.
    """
    costs.check(job)
    cost, size = costs.cost, job.micro_batch_size
    widths = [len(cells) for cells in plan.placement.stages]
    tails = [
        stage_tail_s(cost, costs.link, first, last, width)
        for (first, last), width in zip(plan.layers, widths, strict=True)
    ]
    warmups = plan.warmups or [stock_warmup(stage, widths) for stage in range(len(widths))]
    if not all(item.is_whole(size) for cells in plan.items for own in cells for item in own):
        cuts = (0, *(stop for _, stop in plan.layers))
        durations = stage_durations(cost, cuts, plan.items, link=costs.link)
        return one_f_one_b_program(Flow(plan.items), warmups).run(durations).step_s + max(tails)
    sent_s = costs.link.transfer_s(cost.boundary_bytes * size)
    passes = []
    for first, last in plan.layers:
        times = cost.stage_times(first, last)
        backward_s = times.input_gradient.seconds(size) + times.weight_gradient.seconds(size)
        passes.append(StagePasses(times.forward.seconds(size), backward_s, sent_s))
    numbers = [[[item.number for item in own] for own in cells] for cells in plan.items]
    step_s = run_1f1b(numbers, warmups, passes)
    assert step_s is not None, f"epoch {plan.epoch}: warm-ups {warmups} get stuck"
    return step_s + max(tails)


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
