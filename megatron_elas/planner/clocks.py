"""Clocks that take out what imbalance is left, in two ways; both keep the order of the schedule.

* **Boost**: the busiest stages run faster, within their range, as long as the step gets shorter.
* **Slow**: stages that wait run slower, where that saves energy and the step gets hardly longer. All passes of
  a stage have the same clock, so that a slower stage also fills and drains the pipeline more slowly; hence "hardly".
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_elas.planner.prediction import Prediction, Predictor, Timed

_SAME = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocked:
    """Clocks of all stages, 1.0 being nominal, and what they give."""

    clocks: tuple[float, ...]
    timed: Timed


def nominal(predictor: Predictor, prediction: Prediction) -> Clocked:
    """All stages at the nominal clock."""
    clocks = (1.0,) * prediction.candidate.num_stages
    return Clocked(clocks=clocks, timed=predictor.time(prediction.candidate, prediction.program, clocks))


def boost(predictor: Predictor, prediction: Prediction, start: Clocked | None = None) -> Clocked:
    """Raise the busiest stage a setting at a time, as long as it helps.

    Only stages busier than the mean are raised: a cluster that could run faster as a whole would do so anyway.

    Args:
        predictor: Of the situation.
        prediction: Whose schedule is followed.
        start: The nominal clocks, where they were timed already.
    """
    best = start or nominal(predictor, prediction)
    clock = predictor.situation.clock
    if clock is None:
        return best
    settings = clock.settings()
    mean = sum(best.timed.busy_s) / len(best.timed.busy_s)
    raised = {stage for stage, busy in enumerate(best.timed.busy_s) if busy > mean * _SAME}
    while raised:
        busy = best.timed.busy_s
        stage = max(raised, key=lambda own: (busy[own], -own))
        faster = next((setting for setting in settings if setting > best.clocks[stage] + 1e-9), None)
        if faster is None:
            return best
        other = _with(predictor, prediction, best.clocks, stage, faster)
        if other.timed.step_s >= best.timed.step_s:
            return best
        best = other
    return best


def slow(predictor: Predictor, prediction: Prediction, start: Clocked | None = None, *, slack: float = 0.01) -> Clocked:
    """Lower the clocks of stages that wait, those that wait most first, to where they use least energy.

    Args:
        predictor: Of the situation.
        prediction: Whose schedule is followed.
        start: The nominal clocks, where they were timed already.
        slack: How much longer the step may become in all, as a share of it.
    """
    best = start or nominal(predictor, prediction)
    clock = predictor.situation.clock
    if clock is None or best.timed.energy_j is None:
        return best
    limit_s = best.timed.step_s * (1 + slack) * _SAME
    busy = best.timed.busy_s
    for stage in sorted(range(len(busy)), key=lambda own: (busy[own], own)):
        for setting in reversed(clock.settings()):
            if setting >= best.clocks[stage]:
                continue
            other = _with(predictor, prediction, best.clocks, stage, setting)
            if other.timed.step_s > limit_s:
                break
            if _energy(other) < _energy(best):
                best = other
    return best


def _energy(clocked: Clocked) -> float:
    return float("inf") if clocked.timed.energy_j is None else clocked.timed.energy_j


def _with(
    predictor: Predictor, prediction: Prediction, clocks: tuple[float, ...], stage: int, setting: float
) -> Clocked:
    changed = (*clocks[:stage], setting, *clocks[stage + 1 :])
    return Clocked(clocks=changed, timed=predictor.time(prediction.candidate, prediction.program, changed))
