"""Clocks: boosting is compared with all settings of all stages, slowing keeps to its slack and never costs energy."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings

from megatron_elas.planner.clocks import boost, nominal, slow
from megatron_elas.planner.prediction import Prediction, Predictor
from megatron_elas.planner.search import stay
from megatron_elas.planner.situation import Situation
from megatron_elas.schedule.timing import Deadlock
from tests.planner.situations import CLOCK, situation, situations


@pytest.mark.parametrize("lost", [(0, 0), (1, 2), (2, 1)])
def test_no_other_clocks_of_busy_stages_are_faster(lost: tuple[int, int]) -> None:
    now = situation(3, 3, 4, layers=6, lost=(lost,), clocks=True)
    predictor = Predictor(now, exact=True, staggered=False)
    found = predictor.predict(stay(now, deal="reshape"), 0)
    before, after = nominal(predictor, found), boost(predictor, found)
    mean = sum(before.timed.busy_s) / 3
    faster = [setting for setting in CLOCK.settings() if setting >= 1]
    ranges = [faster if busy > mean else [1.0] for busy in before.timed.busy_s]
    best = min(predictor.time(found.candidate, found.program, clocks).step_s for clocks in product(*ranges))
    assert after.timed.step_s == pytest.approx(best, rel=2e-4)
    assert after.timed.step_s < before.timed.step_s
    # No clock is higher than it has to be.
    for stage, setting in enumerate(after.clocks):
        if setting > 1:
            lower = (*after.clocks[:stage], setting - CLOCK.step, *after.clocks[stage + 1 :])
            assert predictor.time(found.candidate, found.program, lower).step_s > best * (1 + 1e-4)


@settings(max_examples=25, deadline=None)
@given(now=situations())
def test_clocks_stay_in_range_and_do_what_they_are_for(now: Situation) -> None:
    predictor = Predictor(now, exact=True, staggered=False)
    try:
        found: Prediction = predictor.predict(stay(now), 0)
    except Deadlock:
        return
    plain, boosted, slowed = nominal(predictor, found), boost(predictor, found), slow(predictor, found)
    assert boosted.timed.step_s <= plain.timed.step_s
    if now.clock is None:
        assert boosted == slowed == plain
        return
    assert plain.timed.energy_j is not None and slowed.timed.energy_j is not None
    assert slowed.timed.energy_j <= plain.timed.energy_j
    assert slowed.timed.step_s <= plain.timed.step_s * (1.01 + 1e-9)
    assert all(1 <= clock <= now.clock.highest for clock in boosted.clocks)
    assert all(now.clock.lowest - 1e-9 <= clock <= 1 for clock in slowed.clocks)
