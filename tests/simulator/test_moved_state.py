"""What the busiest link carries, against the transfers of a plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from megatron_elas.planner.policies import ours
from megatron_elas.planner.situation import Situation
from megatron_elas.planner.step_plan import Effort
from megatron_elas.simulator.moved_state import Held, busiest_bytes
from megatron_elas.simulator.rates import today
from tests.simulator.small_jobs import ROWS, STAGES, small_cluster, small_job

CELLS = tuple(tuple((stage, row) for row in range(ROWS)) for stage in range(STAGES))


def begin() -> Situation:
    job = small_job()
    return Situation.of(job, small_cluster(job))


@pytest.mark.parametrize("lost", [{(1, 1)}, {(0, 0), (0, 1)}, {(2, row) for row in range(ROWS)}])
def test_the_busiest_link_is_that_of_the_plans_transfers(lost: set[tuple[int, int]]) -> None:
    situation = begin()
    found = ours(situation, lost, effort=Effort(evaluations=30, exact=True))
    assert found.plan is not None and found.candidate is not None
    cost = situation.cost
    sent: Counter[tuple[int, int]] = Counter()
    received: Counter[tuple[int, int]] = Counter()
    for move in found.plan.moves():
        sent[move.source] += move.numel * cost.optimizer_bytes
        received[move.target] += move.numel * cost.optimizer_bytes
    before, after = Held(situation.cuts, CELLS), Held.of(found.candidate, known=True)
    slices_alone = busiest_bytes(replace(cost, weight_bytes=0), before, after, lost, ROWS)
    assert slices_alone == max(*sent.values(), *received.values()) > 0
    assert busiest_bytes(cost, before, after, lost, ROWS) >= slices_alone


def test_a_cell_that_changes_its_stage_receives_all_its_weights() -> None:
    situation = begin()
    cuts, cost = situation.cuts, situation.cost
    swapped = (((1, 0), *CELLS[0][1:]), ((0, 0), *CELLS[1][1:]), *CELLS[2:])
    moved = busiest_bytes(cost, Held(cuts, CELLS), Held(cuts, swapped), (), ROWS)
    parameters = max(cost.parameters(cuts[stage], cuts[stage + 1]) for stage in (0, 1))
    assert moved == pytest.approx(parameters * (cost.weight_bytes + cost.optimizer_bytes / ROWS), rel=1e-6)


def test_nothing_moves_without_a_change_and_a_cell_in_a_lost_ones_place_gets_all() -> None:
    situation = begin()
    cuts, cost = situation.cuts, situation.cost
    held = Held(cuts, CELLS)
    assert busiest_bytes(cost, held, held, (), ROWS) == 0
    parameters = cost.parameters(cuts[1], cuts[2])
    whole = parameters * (cost.weight_bytes + cost.optimizer_bytes / ROWS)
    assert busiest_bytes(cost, held, held, [(1, 0)], ROWS) == pytest.approx(whole, rel=1e-6)


def test_the_bound_of_unknown_cells_holds() -> None:
    situation = begin()
    known = Held(situation.cuts, CELLS)
    found = ours(situation, {(1, 1)}, effort=Effort(evaluations=30, exact=True))
    assert found.candidate is not None and found.candidate.origins == tuple(
        (stage,) * len(rows) for stage, rows in enumerate(found.candidate.rows)
    )
    after = Held.of(found.candidate, known=True)
    exact = busiest_bytes(situation.cost, known, after, {(1, 1)}, ROWS)
    bound = busiest_bytes(situation.cost, known._replace(cells=None), after, {(1, 1)}, ROWS)
    assert 0 < exact <= bound


def test_todays_plan_moves_layers_only_for_a_lost_stage() -> None:
    situation = begin()
    one = today(situation, {(1, 1)})
    assert one.candidate is not None and one.candidate.cuts == situation.cuts and not one.candidate.split
    stage = today(situation, {(1, row) for row in range(ROWS)})
    assert stage.candidate is not None and all(stage.candidate.rows)
    free = ours(situation, {(1, 1)})
    assert free.step_s <= one.step_s
