"""From one plan to another: which worker needs what from whom, over all stages and lanes.

A worker that owns under the new plan just what it owned under the old one, and is in the same lane, needs nothing;
everybody else gets a new shard, cut out of the old ones by name. Pure, so that all workers come to the same list.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_elas.spec.catalogue import Catalogue
from megatron_elas.spec.moves import Move, plan_moves
from megatron_elas.spec.plan import ElasticPlan


def keeps_shard(catalogue: Catalogue, base: ElasticPlan, plan: ElasticPlan, worker: int) -> bool:
    """Whether the worker owns the same elements under both plans."""
    before, after = base.placement.find_seat(worker), plan.placement.find_seat(worker)
    return (
        before is not None
        and after is not None
        and before.lane == after.lane
        and catalogue.layout(base, worker) == catalogue.layout(plan, worker)
    )


def keeps_model(base: ElasticPlan, plan: ElasticPlan, worker: int) -> bool:
    """Whether the worker has a seat under the later plan and its model holds the same parameters under both."""
    if base.placement.find_seat(worker) is None or plan.placement.find_seat(worker) is None:
        return False
    return base.part_of(worker) == plan.part_of(worker)


def plan_remap(
    catalogue: Catalogue, base: ElasticPlan, plan: ElasticPlan, holders: Mapping[int, int]
) -> tuple[Move, ...]:
    """All moves of optimizer state that take the job from one plan to the other, in the same order everywhere.

    Args:
        catalogue: Of the model.
        base: In whose layout the state is.
        plan: In whose layout it is to be.
        holders: For each owner of the base plan who has its shard now: itself, or who has a copy if it is lost.

    Raises:
        StateInvalid: A part of the state is nowhere.
    """
    moves: list[Move] = []
    for lane in range(plan.placement.tensor_parallel):
        new = {
            worker: layout
            for worker, layout in catalogue.layouts(plan, lane).items()
            if not keeps_shard(catalogue, base, plan, worker)
        }
        moves += plan_moves(catalogue.layouts(base, lane), new, holders, catalogue.twins)
    return tuple(moves)
