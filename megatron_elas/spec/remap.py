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


def lacking_parameters(catalogue: Catalogue, base: ElasticPlan, plan: ElasticPlan, worker: int) -> frozenset[str]:
    """Names of what the model of a worker with a seat holds under the later plan, but for what it and all its replicas
    held before in the same lane. The same for all replicas.
    """
    seat = plan.placement.seat(worker)
    replicas = plan.placement.replicas(seat.stage, seat.lane)
    if all(keeps_model(base, plan, replica) for replica in replicas):
        return frozenset()
    names = {parameter.name for parameter in catalogue.parameters(plan, seat.stage)}
    kept = set(names)
    for replica in replicas:
        before = base.placement.find_seat(replica)
        if before is None or before.lane != seat.lane:
            kept.clear()
        else:
            kept &= {parameter.name for parameter in catalogue.parameters(base, before.stage)}
    return frozenset(names - kept)


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
