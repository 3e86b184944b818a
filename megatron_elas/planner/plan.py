"""From survivors to a plan: whole micro-batches rerouted, stages regrouped where one is lost, backups placed anew.

Pure: the same inputs give the same plan on any machine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megatron_elas.planner.backups import place_backups
from megatron_elas.planner.cost_model import stage_durations
from megatron_elas.planner.job_costs import JobCosts
from megatron_elas.planner.policies import EXACT_ITEMS
from megatron_elas.planner.prediction import Predictor
from megatron_elas.planner.regroup import regroup, seat_spares
from megatron_elas.planner.search import stay
from megatron_elas.planner.situation import Situation
from megatron_elas.schedule.items import whole_micro_batches
from megatron_elas.schedule.one_f_one_b import one_f_one_b_program
from megatron_elas.spec.errors import NoFeasiblePlan
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.layout import Placement
from megatron_elas.spec.plan import ElasticPlan


def initial_plan(job: JobSpec, domains: Mapping[int, str], costs: JobCosts | None = None) -> ElasticPlan:
    """The plan of epoch 0: Megatron's own grid.

    Args:
        job: What all workers said when they joined.
        domains: Failure domain of each worker.
        costs: What the plan's step is predicted with; None: not at all.
    """
    return _plan(job, Placement.initial(job), job.launch_layers, 0, domains)


def replan(
    job: JobSpec,
    old: ElasticPlan,
    lost: Collection[int],
    epoch: int,
    domains: Mapping[int, str],
    costs: JobCosts | None = None,
) -> ElasticPlan:
    """The plan without ``lost``: their cells dissolve, other cells of the stage take the micro-batches over.

    Layers and cells stay where they are as long as every stage has a cell; spares make a cell where it relieves the
    busiest stage. When a stage has none left, cells and layers are shared out anew, also to fewer stages.

    Raises:
        NoFeasiblePlan: Fewer workers are left than a cell takes.
    """
    survivors = old.placement.without(lost)
    left = [*survivors.workers, *survivors.spares]
    if len(left) < job.tensor_parallel:
        raise NoFeasiblePlan(
            f"epoch {epoch}: too few workers are left ({len(left)}), a cell takes {job.tensor_parallel} (workers lost: "
            f"{sorted(lost)}; before: {old.placement.describe()}): restart on more machines from the newest "
            f"checkpoint with --load"
        )
    if all(survivors.stages):
        return _plan(job, seat_spares(job, survivors, old.layers, old.placement), old.layers, epoch, domains)
    placement, layers = regroup(job, survivors, old.layers, old.placement)
    return _plan(job, placement, layers, epoch, domains)


def _plan(
    job: JobSpec, placement: Placement, layers: tuple[tuple[int, int], ...], epoch: int, domains: Mapping[int, str]
) -> ElasticPlan:
    return ElasticPlan(
        epoch=epoch,
        placement=placement,
        layers=layers,
        items=tuple(share_items(job.num_microbatches, len(stage)) for stage in placement.stages),
        backups=place_backups(placement, domains, job.snapshot_replicas),
    )


def share_items(num_items: int, num_cells: int) -> tuple[tuple[int, ...], ...]:
    """Deal a step's micro-batches round to the cells of one stage.

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


def predict_step_s(job: JobSpec, plan: ElasticPlan, costs: JobCosts) -> float:
    """Seconds of a step under a plan that is in force, its micro-batches as they are dealt, with 1F1B.

    Raises:
        BadUsage: The costs are those of another model.
    """
    costs.check(job)
    cuts = (*(start for start, _ in plan.layers), plan.layers[-1][1])
    rows = tuple(tuple(cell.row for cell in cells) for cells in plan.placement.stages)
    situation = Situation(
        job=job, cost=costs.cost, cuts=cuts, rows=rows, memory_bytes=costs.memory_bytes, link=costs.link
    )
    candidate = stay(situation)
    predictor = Predictor(situation, exact=False, staggered=False)
    if plan.num_items * plan.placement.num_stages > EXACT_ITEMS:
        return predictor.predict(candidate, 0).step_s
    items = tuple(whole_micro_batches(own, job.micro_batch_size) for own in plan.items)
    durations = stage_durations(costs.cost, cuts, items, link=costs.link)
    program = one_f_one_b_program(items, plan.warmups or None)
    return program.run(durations).step_s + max(predictor.tails(candidate))
