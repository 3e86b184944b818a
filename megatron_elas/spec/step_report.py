"""What a step took on one worker: measured by the job, compared with its plan, and fed back into its costs.

On a CPU times are of the wall clock, so on a machine that is shared they hold what others took of it. Of the step's
time the passes, the waiting and the optimizer are parts; the rest is what the step does besides (reducing gradients,
gathering parameters, copies for others) and waits for there.

A job writes one JSON object per line, ``json.dumps(as_table(report))``; ``read_step_reports`` reads such a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_elas.spec.device import require_not_negative, require_positive
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.tables import read_lines

PASSES = ("forward", "backward", "input_gradient", "weight_gradient")
"""Kinds of passes; backward is the two gradients in one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTotal:
    """All passes of one kind that a worker ran in a step, without the time it waited for their inputs."""

    kind: str
    """One of PASSES."""
    passes: int
    samples: int
    """Of all these passes together."""
    seconds: float
    """Of all these passes together."""

    def __post_init__(self) -> None:
        if self.kind not in PASSES:
            raise BadUsage(f"kind is {self.kind!r}: write one of {', '.join(PASSES)}")
        require_positive(self, "passes", "samples", "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One worker's step."""

    worker: int
    epoch: int
    step: int
    first_layer: int
    """Of the worker's stage."""
    last_layer: int
    """One past the last of the worker's stage."""
    cells: int
    """Of the worker's stage."""
    step_s: float
    """From the step's begin to its end, as training sees it."""
    predicted_s: float | None = None
    """What the plan said; None without a prediction."""
    passes: tuple[PassTotal, ...] = ()
    optimizer_s: float | None = None
    """Of the optimizer's own computing; None when it was not measured."""
    waited_s: float | None = None
    """For inputs of passes, from other stages; None when it was not measured."""
    ended_s: float | None = None
    """When the step ended, as ``time.time()`` on the worker's host; None when nobody noted it."""
    stage: int | None = None
    """The worker's; None when nobody noted it."""
    first: bool = False
    """The first step that the worker ran under its plan: it may compile, allocate, and wait for state that moves."""
    again: bool = False
    """The worker had begun this step, or a later one, before: it was cut, or the job went back to an older state."""
    clock: float = 1.0
    """That the device ran at; 1.0 is nominal."""

    def __post_init__(self) -> None:
        require_positive(self, "cells", "step_s", "clock")
        require_not_negative(self, "worker", "epoch", "step", "first_layer")
        if self.stage is not None:
            require_not_negative(self, "stage")
        if self.last_layer < self.first_layer:
            raise BadUsage(f"layers [{self.first_layer}, {self.last_layer}) end before they begin")

    @property
    def ratio(self) -> float | None:
        """Measured over predicted time."""
        return None if self.predicted_s is None else self.step_s / self.predicted_s


def read_step_reports(path: Path) -> tuple[StepReport, ...]:
    """The reports of a file with one JSON object per line, see ``tables.read_lines``. Raises BadUsage."""
    return read_lines(StepReport, path)
