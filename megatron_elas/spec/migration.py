"""A planned change of who holds which layers, while everybody lives: how it is asked for, and what it took."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

MigrationMode = Literal["async", "blocking", "off"]
"""``async``: the state of moving layers goes to its new owners while steps run under the old plan, and the gradients of
every step after it, so that at the switch between two steps all is there. ``blocking``: it moves at the switch, while
nothing else runs. ``off``: layers stay until a stage is lost or memory asks for it."""

MIGRATION_PHASES = ("drain", "assemble", "groups", "rebuild", "gather")
"""Parts of the switch, in order of time: everybody comes to it, and copies on their way end; the new shard is put
together (``blocking``: it moves); groups enter the epoch; model, buffers and optimizer are fitted; parameters are
gathered. What must fit together is compared at the end of the first step under the new plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationReport:
    """One worker's view of one migration."""

    worker: int
    epoch: int
    """Of the plan that is in force after it."""
    step: int
    """The first one under that plan; it is finished."""
    streamed_steps: int = 0
    """Steps under the old plan in which state or gradients went to the new owners."""
    streamed_bytes: int = 0
    """State that this worker sent for it, beside those steps."""
    gradient_bytes: int = 0
    """And gradients."""
    hand_over_s: float = 0.0
    """How much longer the steps' exchange of gradients took for it, all of them together: gradients were noted, and
    copies waited for that took longer than forward and backward passes."""
    moved_bytes: int = 0
    """Sent at the switch."""
    blocked_s: float = 0.0
    """Between the last step under the old plan and the first one under the new, from when this worker came to it."""
    verify_s: float = 0.0
    """What comparing the state, and waiting for new backups' copies, took in the first step under the new plan."""
    phases_s: dict[str, float] = field(default_factory=dict)
    """Seconds of MIGRATION_PHASES; their sum is ``blocked_s``."""
