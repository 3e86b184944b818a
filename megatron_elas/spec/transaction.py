"""A training step as a transaction: its phases, and what decides between commit and abort.

Every worker goes through the phases of step ``k`` in this order::

    COMPUTE    forward and backward passes; gradients add up in the buffers
       |       gradients are reduced inside the stage
    REDUCE     the own shard's gradients go to its backups, the wards' come in (the *duty*); then one all-reduce over
       |       all workers: the gradient norm. A worker joins it only with its duty fulfilled, so whoever knows the norm
       |       knows that every duty of the step is fulfilled
    PREPARED   the norm is known here: the step can be finished from what the workers hold, whoever is lost now
       |
    APPLY      the optimizer changes the own shard; backups do the same to their copies of it
       |
    SYNC       updated parameters are gathered
       |
    COMPUTE    of step k + 1

When the membership ends, step ``k`` **commits** if any survivor is PREPARED or later, and **aborts** otherwise: then
no survivor has changed anything. Nobody can be PREPARED for ``k + 1`` while somebody has not applied ``k``, because
that one has not joined the norm of ``k + 1``; so at most one step is open, and survivors are at most one apart.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class StepPhase(enum.StrEnum):
    """Where in a step a worker is."""

    COMPUTE = "compute"
    REDUCE = "reduce"
    PREPARED = "prepared"
    APPLY = "apply"
    SYNC = "sync"


FOLLOWS = {
    StepPhase.COMPUTE: frozenset({StepPhase.REDUCE}),
    StepPhase.REDUCE: frozenset({StepPhase.PREPARED}),
    StepPhase.PREPARED: frozenset({StepPhase.APPLY}),
    StepPhase.APPLY: frozenset({StepPhase.SYNC}),
    StepPhase.SYNC: frozenset({StepPhase.COMPUTE}),
}
"""Phases that may come after each, when no membership ends; a recovery leads to COMPUTE from all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What turns the reduced gradients of a step into the next version, beside them; the same on all workers."""

    step: int
    norm_hex: str | None
    """``norm``, as ``float.hex`` writes it: JSON has no number for infinity and NaN, which the norm may be where the
    framework does not check it, and a NaN would not be equal to itself."""
    zeros: float | None = None
    """How many elements of the gradients are zero, where that is counted."""
    applies: bool = True
    """False: the framework leaves the update out (too large a norm), and the state stays as it is."""
    losses_hex: tuple[tuple[str, str], ...] = ()
    """Name and value of the step's losses, for who tells them and had no seat in the step."""

    @staticmethod
    def of(
        step: int,
        norm: float | None,
        zeros: float | None = None,
        *,
        applies: bool = True,
        losses: Mapping[str, float] | None = None,
    ) -> Update:
        """With norm and losses as numbers."""
        return Update(
            step=step,
            norm_hex=None if norm is None else float(norm).hex(),
            zeros=zeros,
            applies=applies,
            losses_hex=tuple((name, float(loss).hex()) for name, loss in (losses or {}).items()),
        )

    @property
    def overflowed(self) -> bool:
        """Whether the update is left out because a gradient is infinite or NaN, so that no norm was computed."""
        return not self.applies and self.norm_hex is None

    @property
    def norm(self) -> float | None:
        """Of all gradients, before clipping. None when the framework computes none."""
        return None if self.norm_hex is None else float.fromhex(self.norm_hex)

    @property
    def losses(self) -> dict[str, float]:
        """Of the step, by name."""
        return {name: float.fromhex(loss) for name, loss in self.losses_hex}
