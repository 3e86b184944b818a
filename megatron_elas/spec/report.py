"""What workers measure and send back. The only values that travel against the flow."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_elas.spec.transaction import StepPhase, Update


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a worker holds of the state, laid out as one plan said.

    Version ``v`` of the state is the state before step ``v``. A worker that is between two layouts
    reports both: the old one stays whole until a step has been committed under the new one.
    """

    epoch: int
    """Epoch of the plan that says who owns which shard."""
    live: int | None
    """Version of the parameters and optimizer in use; None when half-way between two."""
    kept: tuple[int, ...]
    """Versions of its own shard that it holds as complete copies."""
    wards: dict[int, tuple[int, ...]]
    """Complete versions it holds of the workers it backs up."""
    ready: int | None = None
    """The step whose reduced gradients it holds, its own and those of all its wards: with the step's ``Update`` each
    of those states of version ``ready`` becomes one of version ``ready + 1``."""
    update: Update | None = None
    """Of the newest step that it is PREPARED for, or has gone through, in this layout."""
    parameters: int | None = None
    """The version of which all parameters of its stage, as this layout's plan has it, are in its model; None when
    some may be of another version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleReport:
    """A survivor's position when it has unwound to the step boundary."""

    worker: int
    epoch: int
    """The epoch that begins."""
    step: int
    """The step the worker's training loop is in (or about to enter)."""
    phase: StepPhase = StepPhase.COMPUTE
    """Where in it."""
    activity: int
    """How many joint activities (steps, evaluations, saves) its loop has completed."""
    waived: int = -1
    """The newest joint activity that it knows to have failed and not to be run again; -1: none."""
    checkpoint: int = -1
    """Iteration of the newest checkpoint of this job that it knows to be complete; -1: none."""
    holdings: tuple[Holding, ...]
    """Newest layout first; at least one."""


PHASES = ("detect", "quiesce", "settle", "plan", "groups", "restore", "rebuild", "verify", "first_step")
"""Columns of the phase table, in order of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """One worker's view of one recovery. ``marks_s`` are wall-clock times (``time.time()``)."""

    worker: int
    epoch: int
    resume_step: int
    marks_s: dict[str, float] = field(default_factory=dict)
    """End of each phase of PHASES that the worker sees itself."""
    moved_bytes: int = 0
    """Optimizer state this worker sent to others."""
    background_s: float = 0.0
    """How long moves and new copies took beside the first step; 0 when the step waited for them to begin."""
