"""What every plan holds, whatever the grid and the loss."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elas.planner.cost_model import stage_limits
from megatron_elas.planner.dataflow import busiest_share
from megatron_elas.planner.prediction import Predictor, stage_loads
from megatron_elas.planner.search import Freedom, objective_s, stay
from megatron_elas.planner.situation import Situation, divided
from megatron_elas.planner.step_plan import QUICK, Effort, StepPlan, improve_plan, make_plan
from megatron_elas.schedule.checks import check_schedule
from megatron_elas.spec.errors import NoFeasiblePlan
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.layout import Placement
from tests.planner.situations import situation, situations

SMALL = Effort(evaluations=12, exact=True)


def plan_of(given_situation: Situation, effort: Effort = SMALL, freedom: Freedom | None = None) -> StepPlan | None:
    try:
        return make_plan(given_situation, freedom, effort)
    except NoFeasiblePlan:
        return None


@settings(max_examples=40, deadline=None)
@given(now=situations())
def test_every_plan_is_whole_fits_and_is_no_slower_than_doing_nothing(now: Situation) -> None:
    plan = plan_of(now)
    if plan is None:
        return
    new = plan.candidate
    # Every layer once, every cell once.
    assert new.cuts[0] == 0 and new.cuts[-1] == now.cost.num_layers
    assert all(first < last for first, last in pairwise(new.cuts))
    named = sorted(
        name for origins, rows in zip(new.origins, new.rows, strict=True) for name in zip(origins, rows, strict=True)
    )
    assert named == sorted((stage, row) for stage, rows in enumerate(now.rows) for row in rows)
    # The batch once per stage; orders can be carried out, in memory.
    items = [plan.items(stage) for stage in range(new.num_stages)]
    assert tuple(items) == plan.prediction.schedule.items
    for cells in items:
        samples = [s for own in cells for item in own for start, stop in item.ranges for s in range(start, stop)]
        assert sorted(samples) == list(range(now.batch_samples))
    check_schedule(plan.prediction.schedule, stage_limits(now.cost, new.cuts, items, now.memory_bytes))
    # Never worse than doing nothing; bounds are bounds.
    assert plan.nothing is None or plan.prediction.step_s <= plan.nothing.step_s
    assert plan.prediction.bound_s <= plan.prediction.step_s * (1 + 1e-9)
    assert plan.step_s <= plan.nominal.timed.step_s * (1 + 1e-9)
    # Random numbers: every sample of every layer is drawn for by exactly one cell of the layer's stage.
    for stage in range(new.num_stages):
        parts = sorted(part for stream in plan.streams() if stream.stage == stage for part in stream.samples)
        assert parts[0][0] == 0 and parts[-1][1] == now.batch_samples
        assert all(a[1] == b[0] for a, b in pairwise(parts))


@settings(max_examples=15, deadline=None)
@given(now=situations())
def test_the_same_inputs_give_the_same_plan_and_more_effort_never_a_worse_one(now: Situation) -> None:
    steps = []
    for evaluations in (1, 5, 12, 30):
        plan = plan_of(now, Effort(evaluations=evaluations, exact=True))
        again = plan_of(now, Effort(evaluations=evaluations, exact=True))
        assert plan == again
        steps.append(float("inf") if plan is None else objective_s(plan.prediction))
    assert all(more <= less * (1 + 1e-9) for less, more in pairwise(steps))


@settings(max_examples=15, deadline=None)
@given(now=situations())
def test_an_improved_plan_is_no_slower_than_the_quick_one(now: Situation) -> None:
    quick = plan_of(now, QUICK)
    if quick is None:
        return
    exact = Predictor(now, exact=True, staggered=False)
    try:
        before = objective_s(exact.predict(quick.candidate, 8 if quick.candidate.split else 2))
    except ValueError:  # By class it fits, item by item it does not.
        return
    assert objective_s(improve_plan(quick, SMALL).prediction) <= before * (1 + 1e-9)


def test_layers_leave_the_stage_that_lost_a_cell() -> None:
    plan = make_plan(situation(4, 2, 8, lost=((1, 0),)), Freedom(cells=False), SMALL)
    layers = [last - first for first, last in pairwise(plan.candidate.cuts)]
    assert layers[1] == min(layers) and layers[1] < 3
    assert plan.nothing is not None and plan.nothing.step_s > 1.4 * plan.prediction.step_s
    text = plan.explain()
    assert "Cells per stage: 2 1 2 2" in text and "Layers per stage:" in text and "To do nothing takes" in text


def test_a_cell_moves_to_the_stage_that_lost_two() -> None:
    now = situation(3, 4, 8, size=1, layers=3, lost=((1, 0), (1, 1)))
    plan = make_plan(now, Freedom(), Effort(evaluations=60, exact=True))
    # With one layer per stage only cells can even out the load.
    assert plan.candidate.widths != (4, 2, 4)
    assert plan.prediction.step_s < make_plan(now, Freedom(cells=False), SMALL).prediction.step_s
    assert "gets row" in plan.explain()


def test_a_shallower_pipeline_is_taken_when_there_are_few_micro_batches() -> None:
    now = situation(4, 2, 1, size=1, layers=12, lost=((1, 0),))
    plan = make_plan(now, Freedom(), Effort(evaluations=60, exact=True))
    fixed = make_plan(now, Freedom(cells=False), Effort(evaluations=60, exact=True))
    assert plan.prediction.step_s <= fixed.prediction.step_s


def test_memory_that_is_too_small_is_said_in_a_sentence() -> None:
    with pytest.raises(NoFeasiblePlan, match="GB: use smaller micro-batches"):
        make_plan(situation(lost=((0, 1),), memory=500))
    with pytest.raises(NoFeasiblePlan, match="stage 0 lost all its cells"):
        stay(situation(rows=2, lost=((0, 0), (0, 1))))
    with pytest.raises(NoFeasiblePlan, match="no cell is left"):
        situation(1, 2, lost=((0, 0), (0, 1)))


def test_split_backward_needs_memory_and_is_left_out_without_it() -> None:
    plenty = make_plan(situation(4, 2, 2, size=1, lost=((1, 0),)), Freedom(layers=False, cells=False), SMALL)
    assert any(plenty.prediction.schedule.is_split(*place) for place in plenty.prediction.schedule.cells())
    whole = make_plan(
        situation(4, 2, 2, size=1, lost=((1, 0),)), Freedom(layers=False, cells=False, split=False), SMALL
    )
    assert plenty.prediction.step_s < whole.prediction.step_s


def test_clocks_shorten_the_step_and_then_save_energy() -> None:
    now = situation(4, 3, 6, layers=8, lost=((1, 0),), clocks=True)
    plan = make_plan(now, Freedom(layers=False, cells=False), SMALL)
    assert plan.boosted.clocks[1] > 1 and plan.boosted.timed.step_s < plan.nominal.timed.step_s
    assert plan.clocks == plan.boosted.clocks and plan.step_s == plan.boosted.timed.step_s


def test_stages_that_wait_save_energy_at_lower_clocks() -> None:
    now = situation(4, 2, 12, layers=8, lost=((1, 0),), clocks=True)
    plan = make_plan(now, Freedom(layers=False, cells=False), SMALL)
    assert plan.slowed.timed.step_s <= plan.nominal.timed.step_s * 1.0101
    assert plan.slowed.timed.energy_j is not None and plan.nominal.timed.energy_j is not None
    assert plan.slowed.timed.energy_j < plan.nominal.timed.energy_j
    assert min(plan.slowed.clocks) < 1 and plan.slowed.clocks[1] == 1


def test_by_class_is_exact_where_samples_divide_and_near_it_elsewhere() -> None:
    even = situation(4, 3, 6, size=2, lost=((1, 0),))
    uneven = situation(4, 4, 6, size=1, lost=((1, 0),))
    for now, tolerance in ((even, 1e-6), (uneven, 0.1)):
        candidate = stay(now, deal="reshape")
        steps = [Predictor(now, exact=exact, staggered=False).predict(candidate, 0).step_s for exact in (True, False)]
        assert steps[1] == pytest.approx(steps[0], rel=tolerance)


def test_staggered_steps_follow_each_other_faster() -> None:
    now = situation(4, 2, 4, lost=((1, 0),))
    synchronous, staggered = (
        make_plan(now, Freedom(staggered=staggered), SMALL).prediction for staggered in (False, True)
    )
    assert staggered.step_s < synchronous.step_s
    # No faster than the busiest cell works.
    predictor = Predictor(now, exact=True, staggered=True)
    busy = predictor.time(staggered.candidate, staggered.schedule).busy_s
    assert staggered.step_s >= max(busy) * (1 - 1e-9)


@settings(max_examples=20, deadline=None)
@given(now=situations(), data=st.data())
def test_a_loss_after_a_plan_is_planned_for_from_where_the_plan_led(now: Situation, data: st.DataObject) -> None:
    for _ in range(3):
        plan = plan_of(now, Effort(evaluations=8, exact=True))
        if plan is None:
            return
        settled = plan.carried_out()
        assert settled.num_cells == now.num_cells and settled.cuts == plan.candidate.cuts
        # Nothing is left to be sent.
        assert not list(plan_of_same(settled, plan).moves())
        spare = [(stage, row) for stage, rows in enumerate(settled.rows) if len(rows) > 1 for row in rows]
        if not spare:
            return
        now = settled.without([data.draw(st.sampled_from(spare))])
        assert now.held == settled.rows


def plan_of_same(settled: Situation, plan: StepPlan) -> StepPlan:
    """A plan that changes nothing once another is carried out."""
    new = plan.candidate
    still = replace(new, rows=new.names, origins=tuple((stage,) * width for stage, width in enumerate(new.widths)))
    prediction = Predictor(settled, exact=True, staggered=False).predict(still, 1)
    return replace(plan, situation=settled, prediction=prediction)


def test_workers_sit_where_the_plan_says_and_copies_are_apart() -> None:
    spec = JobSpec(tensor_parallel=1, pipeline_parallel=3, data_parallel=4, micro_batch_size=1, num_microbatches=32)
    now = situation(3, 4, 8, size=1, layers=3, lost=((1, 0), (1, 1)))
    plan = make_plan(now, Freedom(), Effort(evaluations=60, exact=True))
    old = Placement.initial(spec).without([4, 5])
    domains = {worker: f"node{worker % 4}" for worker in range(12)}
    placement, backups = plan.place(old, domains)
    assert sorted(placement.workers) == sorted(old.workers)
    assert tuple(map(len, placement.stages)) == plan.candidate.widths
    assert all(domains[owner] != domains[backup] for owner, backup in backups)


@settings(max_examples=30, deadline=None)
@given(now=situations())
def test_moves_cut_every_slice_once_from_a_live_holder(now: Situation) -> None:
    plan = plan_of(now)
    if plan is None:
        return
    new = plan.candidate
    assert now.held is not None
    before = now.held
    alive = {(stage, row) for stage, rows in enumerate(now.rows) for row in rows}
    received: dict[tuple[int, tuple[int, int]], int] = {}
    taken: set[tuple[int, int]] = set()
    for move in plan.moves():
        assert move.source in alive and move.target in alive and move.source != move.target
        assert move.start < move.stop
        assert move.owner == move.source or move.owner not in alive
        for element in range(move.start, move.stop):
            assert (move.unit, element) not in taken
            taken.add((move.unit, element))
        received[move.unit, move.target] = received.get((move.unit, move.target), 0) + move.numel
    # What a cell receives and what it had make up its slice.
    for stage, (first, last) in enumerate(pairwise(new.cuts)):
        cells = list(zip(new.origins[stage], new.rows[stage], strict=True))
        for layer in range(first, last):
            count = now.cost.layers[layer].parameters
            old = before[now.home(layer)]
            for place, cell in enumerate(cells):
                start, stop = count * place // len(cells), count * (place + 1) // len(cells)
                kept = sum(
                    max(0, min(stop, count * (k + 1) // len(old)) - max(start, count * k // len(old)))
                    for k, row in enumerate(old)
                    if _holder(now, before, now.home(layer), row) == cell
                )
                assert received.get((layer, cell), 0) + kept == stop - start


def _holder(now: Situation, before: tuple[tuple[int, ...], ...], stage: int, row: int) -> tuple[int, int]:
    while row not in now.rows[stage]:
        row = (row + 1) % len(before[stage])
    return stage, row


@settings(max_examples=40, deadline=None)
@given(now=situations())
def test_the_busiest_share_is_that_of_the_items(now: Situation) -> None:
    plan = plan_of(now, Effort(evaluations=4, exact=True))
    if plan is None:
        return
    job = divided(now.job, plan.candidate.size)
    for stage, load in enumerate(stage_loads(now, plan.candidate)):
        share = busiest_share(job, plan.candidate.widths[stage], plan.candidate.deals[stage])
        cells = plan.items(stage)
        assert load.samples == share.samples == max(sum(item.samples for item in own) for own in cells)
        assert share.items >= max(len(own) for own in cells) or share.items == len(cells[0])


@settings(max_examples=25, deadline=None)
@given(now=situations(), data=st.data())
def test_lost_stages_and_spare_cells_are_planned_for_too(now: Situation, data: st.DataObject) -> None:
    gone = data.draw(st.sets(st.integers(0, now.num_stages - 1), max_size=now.num_stages - 1), label="lost stages")
    now = replace(
        now.without([(stage, row) for stage in gone for row in now.rows[stage]]), spares=data.draw(st.integers(0, 2))
    )
    plan = plan_of(now)
    if plan is None:
        return
    new = plan.candidate
    check_schedule(
        plan.prediction.schedule,
        stage_limits(now.cost, new.cuts, [plan.items(stage) for stage in range(new.num_stages)], now.memory_bytes),
    )
    assert plan.nothing is None or plan.prediction.step_s <= plan.nothing.step_s * (1 + 1e-9)
    assert (plan.nothing is None) or not gone
    # State comes from live cells, from the nearest stage where nobody of the own one is left, and goes to seated ones.
    alive = {(stage, row) for stage, rows in enumerate(now.rows) for row in rows}
    seated = {
        name for origins, rows in zip(new.origins, new.rows, strict=True) for name in zip(origins, rows, strict=True)
    }
    for move in plan.moves():
        assert move.source in alive and move.target in seated and move.source != move.target
    settled = plan.carried_out()
    assert settled.num_cells == now.num_cells and not settled.lost_stages
    assert not gone or "a stage has no cell left" in plan.explain()
