"""What a running job does when another policy plans."""

from __future__ import annotations

import pytest

from megatron_elas.planner.improve import improve
from megatron_elas.planner.plan import initial_plan, predict_step_s, replan
from megatron_elas.planner.policies import POLICIES
from megatron_elas.planner.situation import Situation
from megatron_elas.spec.errors import NoFeasiblePlan
from tests.planner.test_improve import after_loss, alone, costs_of, job_of
from tests.planner.test_job_plans import check

JOB = job_of()
COSTS = costs_of(JOB)
BEGIN = Situation(
    job=JOB, cost=COSTS.cost, cuts=(0, 3, 6, 9, 12), rows=((0, 1, 2),) * 4, memory_bytes=COSTS.memory_bytes,
    link=COSTS.link,
)  # fmt: skip


def test_torchft_leaves_replicas_out_that_are_not_whole_and_keeps_the_batch() -> None:
    plan = after_loss(JOB, COSTS, {3}, "torchft")
    assert plan.placement.spares == (0, 6, 9)
    assert [[cell.row for cell in cells] for cells in plan.placement.stages] == [[1, 2]] * 4
    check(JOB, plan, set(range(12)) - {3}, whole=True)
    assert plan.layers == initial_plan(JOB, {}).layers and not plan.orders
    assert plan.predicted_s == pytest.approx(POLICIES["torchft"](BEGIN, [(1, 0)]).step_s)
    assert improve(JOB, plan, 2, alone(JOB), COSTS, policy="torchft") is None


def test_torchft_loses_another_replica_and_then_the_last_one() -> None:
    first = after_loss(JOB, COSTS, {3}, "torchft")
    second = replan(JOB, first, {7}, 2, alone(JOB), COSTS, "torchft")
    assert second.placement.spares == (0, 1, 4, 6, 9, 10)
    assert second.placement.workers == (2, 5, 8, 11)
    # A worker that waited changes nothing for the others.
    third = replan(JOB, second, {0}, 3, alone(JOB), COSTS, "torchft")
    assert third.placement.stages == second.placement.stages and third.items == second.items
    with pytest.raises(NoFeasiblePlan, match=r"every replica lost a worker .* use --policy ours"):
        replan(JOB, third, {2}, 4, alone(JOB), COSTS, "torchft")


def test_recycle_moves_whole_micro_batches_in_split_backward_and_no_layers() -> None:
    plan = after_loss(JOB, COSTS, {3}, "recycle")
    assert plan.layers == initial_plan(JOB, {}).layers and plan.orders
    assert all("W" in text for cells in plan.orders for text in cells)
    check(JOB, plan, set(range(12)) - {3}, whole=True)
    assert plan.predicted_s is not None
    assert plan.predicted_s <= POLICIES["recycle"](BEGIN, [(1, 0)], staggered=False).step_s * 1.001  # type: ignore[call-arg]
    assert improve(JOB, plan, 2, alone(JOB), COSTS, policy="recycle") is None
    second = replan(JOB, plan, {4}, 2, alone(JOB), COSTS, "recycle")
    assert second.layers == plan.layers and second.orders
    with pytest.raises(NoFeasiblePlan, match="stage 1 lost all its cells"):
        replan(JOB, second, {5}, 3, alone(JOB), COSTS, "recycle")


def test_recycle_without_split_backward_is_1f1b() -> None:
    job = job_of(split=False)
    plan = after_loss(job, COSTS, {3}, "recycle")
    assert not plan.orders
    check(job, plan, set(range(12)) - {3}, whole=True)


def test_elaswave_reshapes_at_once_and_moves_layers_later() -> None:
    plan = after_loss(JOB, COSTS, {3}, "elaswave")
    assert plan.layers == initial_plan(JOB, {}).layers and not plan.orders
    assert [len(own) for own in plan.items[1]] == [8, 8], "as many items as before, of more samples"
    better = improve(JOB, plan, 2, alone(JOB), COSTS, policy="elaswave")
    assert better is not None and not better.orders and better.items == plan.items
    assert better.predicted_s == pytest.approx(POLICIES["elaswave"](BEGIN, [(1, 0)]).step_s)
    second = replan(JOB, better, {6}, 3, alone(JOB), COSTS, "elaswave")
    assert second.layers == better.layers
    again = improve(JOB, second, 4, alone(JOB), COSTS, policy="elaswave")
    assert again is not None and again.predicted_s == pytest.approx(
        POLICIES["elaswave"](BEGIN, [(1, 0), (2, 0)]).step_s
    )


def test_elaswave_deals_a_lost_stage_out_anew() -> None:
    plan = after_loss(JOB, COSTS, {3, 4, 5}, "elaswave")
    check(JOB, plan, set(range(12)) - {3, 4, 5}, whole=False)
    assert not plan.orders


@pytest.mark.parametrize("lost", [{0}, {3}, {0, 4}])
def test_ours_is_ahead_of_all_others_after_its_migration(lost: set[int]) -> None:
    """By the same predictions, item by item."""
    steps = {}
    for policy in ("ours", "elaswave", "recycle", "torchft"):
        plan = after_loss(JOB, COSTS, lost, policy)  # type: ignore[arg-type]
        better = improve(JOB, plan, 2, alone(JOB), COSTS, policy=policy) or plan  # type: ignore[arg-type]
        steps[policy] = predict_step_s(JOB, better, COSTS)
    assert steps["ours"] == min(steps.values())


@pytest.mark.parametrize("worker", [0, 4, 11])
def test_torchft_drains_a_worker_with_its_replica(worker: int) -> None:
    plan = initial_plan(JOB, {})
    target = improve(JOB, plan, 1, alone(JOB), COSTS, drained=(worker,), policy="torchft")
    assert target is not None and target.layers == plan.layers
    replica = {mate for mate in range(12) if mate % 3 == worker % 3}
    assert set(target.placement.workers) == set(range(12)) - replica
    assert set(target.placement.spares) == replica - {worker}
