"""Clocks that take out what imbalance is left, in two ways; both keep the order of the schedule.

* **Boost**: the busiest stages run faster, within their range, each only as fast as makes the step shorter.
* **Slow**: stages that wait run slower, where that saves energy and the step gets hardly longer. All passes of
  a stage have the same clock, so that a slower stage also fills and drains the pipeline more slowly; hence "hardly".
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megatron_elas.planner.prediction import Prediction, Predictor, Timed

_SAME = 1 + 1e-9
_MOST_SETTINGS = 16
"""Of lower clocks: nearer ones save hardly more."""
_AS_SHORT = 1e-4
"""Steps longer by less than this are as short: no clock is raised for it."""


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
    """Raise the busiest stages as far as that shortens the step.

    Only stages busier than the mean are raised: a cluster that could run faster as a whole would do so anyway. No step
    is shorter than with all of these at their highest clock. From there each is lowered, the least busy first, to where
    the step begins to get longer.

    Args:
        predictor: Of the situation.
        prediction: Whose schedule is followed.
        start: The nominal clocks, where they were timed already.
    """
    plain = start or nominal(predictor, prediction)
    clock = predictor.situation.clock
    settings = [setting for setting in clock.settings() if setting > 1 + 1e-9] if clock else []
    busy = plain.timed.busy_s
    mean = sum(busy) / len(busy)
    raised = sorted((stage for stage, own in enumerate(busy) if own > mean * _SAME), key=lambda stage: busy[stage])
    if not settings or not raised:
        return plain
    highest = tuple(settings[-1] if stage in raised else 1.0 for stage in range(len(busy)))
    best = Clocked(clocks=highest, timed=predictor.time(prediction.candidate, prediction.program, highest))
    limit_s = best.timed.step_s * (1 + _AS_SHORT)
    if limit_s >= plain.timed.step_s:
        return plain
    for stage in raised:
        # A lower clock never makes the step shorter, so the lowest that will do is found by halving.
        lower = [1.0, *settings]
        low, high = 0, len(settings)
        while low < high:
            middle = (low + high) // 2
            other = _with(predictor, prediction, best.clocks, stage, lower[middle])
            if other.timed.step_s <= limit_s:
                best, high = other, middle
            else:
                low = middle + 1
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
    power = predictor.situation.power
    if clock is None or power is None or best.timed.energy_j is None:
        return best
    step_s = best.timed.step_s
    limit_s = step_s * (1 + slack) * _SAME
    settings = [setting for setting in clock.settings() if setting < 1 - 1e-9]
    settings = settings[:: 1 + len(settings) // _MOST_SETTINGS]
    busy = best.timed.busy_s
    for stage in sorted(range(len(busy)), key=lambda own: (busy[own], own)):
        # As the clock goes down, energy falls and then rises, while the step only gets longer.
        needed = partial(predictor.stage_energy_j, prediction.candidate, stage, step_s, power=power)
        low, high = bisect_left(range(len(settings) - 1), True, key=partial(_rises, settings, needed)), len(settings)
        while low < high:
            middle = (low + high) // 2
            other = _with(predictor, prediction, best.clocks, stage, settings[middle])
            if other.timed.step_s <= limit_s:
                high = middle
                if _energy(other) < _energy(best):
                    best = other
            else:
                low = middle + 1
    return best


def _rises(settings: list[float], needed: Callable[[float], float], at: int) -> bool:
    """Whether the next clock takes more energy."""
    return needed(settings[at]) <= needed(settings[at + 1])


def _energy(clocked: Clocked) -> float:
    return float("inf") if clocked.timed.energy_j is None else clocked.timed.energy_j


def _with(
    predictor: Predictor, prediction: Prediction, clocks: tuple[float, ...], stage: int, setting: float
) -> Clocked:
    changed = (*clocks[:stage], setting, *clocks[stage + 1 :])
    return Clocked(clocks=changed, timed=predictor.time(prediction.candidate, prediction.program, changed))
