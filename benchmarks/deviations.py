"""How far a run's losses are from those of the run in which nothing happened."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SPIKE_STEPS = 10
"""From an event on: where a spike of the loss is looked for."""
END_STEPS = 20
"""The last ones, over which the loss at the end is averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Of the steps from the first event on; losses are natural logarithms per token."""

    mean: float
    """Of |loss - undisturbed|."""
    largest: float
    """Of |loss - undisturbed|."""
    before: float
    """The largest |loss - undisturbed| of the steps before the first event."""
    spike: float
    """The largest loss - undisturbed in the SPIKE_STEPS from an event on; 0 where no loss is higher."""
    end: float
    """Mean loss - undisturbed of the last END_STEPS."""
    equal: int
    """Steps whose loss is that of the undisturbed run to the last bit."""
    steps: int
    """From the first event on."""


def read_losses(told: Iterable[Mapping[str, Any]]) -> list[float]:
    """Losses of steps 0, 1, ... from the lines of ``consistency_worker.py``.

    Raises:
        ValueError: A step is missing, or workers tell different losses of one.
    """
    found: dict[int, float] = {}
    for line in told:
        if "step" in line and found.setdefault(line["step"], line["loss"]) != line["loss"]:
            raise ValueError(f"step {line['step']}: workers tell losses {found[line['step']]!r} and {line['loss']!r}")
    if not found or sorted(found) != list(range(len(found))):
        missing = sorted(set(range(max(found, default=0))) - set(found))
        raise ValueError(f"no loss was told of steps {missing}" if missing else "no loss was told")
    return [found[step] for step in range(len(found))]


def find_deviation(losses: Sequence[float], undisturbed: Sequence[float], events: Sequence[int]) -> Deviation:
    """Compare two runs.

    Args:
        losses: Of every step.
        undisturbed: As many.
        events: Steps of the events, ascending, at least one.
    """
    signed = [loss - calm for loss, calm in zip(losses, undisturbed, strict=True)]
    after = signed[events[0] :]
    near = [signed[step] for event in events for step in range(event, min(event + SPIKE_STEPS, len(signed)))]
    return Deviation(
        mean=statistics.fmean(map(abs, after)),
        largest=max(map(abs, after)),
        before=max(map(abs, signed[: events[0]]), default=0.0),
        spike=max(0.0, *near),
        end=statistics.fmean(signed[-END_STEPS:]),
        equal=sum(one == 0.0 for one in after),
        steps=len(after),
    )
