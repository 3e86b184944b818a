"""Megatron's loss scaler, whose state belongs to a step as the learning rate does.

A loss is multiplied by the scale before its backward pass, and reduced gradients by the inverse before their norm, when
all workers also learn whether any of them is infinite or NaN. If one is, the update is left out; and the scaler is told
in any case, so that it may have another scale when the norm comes. Who makes the update elsewhere, or later, needs the
scale that the step began with.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_elas.spec.transaction import Update


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The scaler's state before a step."""

    scale: float
    """What losses are multiplied by; an fp32 number."""
    growth_tracker: int = 0
    """Updates in a row, towards a larger scale. Of a dynamic scaler, as the next one."""
    hysteresis_tracker: int = 0
    """Updates that may still be left out before the scale gets smaller."""

    def to_ints(self) -> tuple[int, int, int]:
        """Three integers that ``from_ints`` reads."""
        (bits,) = struct.unpack("<I", struct.pack("<f", self.scale))
        return bits, self.growth_tracker, self.hysteresis_tracker

    @staticmethod
    def from_ints(numbers: Sequence[int]) -> LossScale:
        """What ``to_ints`` gave."""
        bits, growth, hysteresis = numbers
        (scale,) = struct.unpack("<f", struct.pack("<I", bits))
        return LossScale(scale=scale, growth_tracker=growth, hysteresis_tracker=hysteresis)


def read_loss_scale(chained: Any) -> LossScale | None:
    """The state of the optimizer's scaler; None where losses are not scaled."""
    (part,) = chained.chained_optimizers
    if part.grad_scaler is None:
        return None
    state = part.grad_scaler.state_dict()  # empty when the scale is given
    return LossScale(
        scale=float(part.grad_scaler.scale),
        growth_tracker=int(state.get("growth_tracker", 0)),
        hysteresis_tracker=int(state.get("hysteresis_tracker", 0)),
    )


def write_loss_scale(chained: Any, state: LossScale | None, update: Update | None = None) -> None:
    """Give the optimizer's scaler this state.

    Args:
        chained: Megatron's optimizer.
        state: As ``read_loss_scale`` gave it on any worker.
        update: What the scaler is told after: that of the step before which it had this state.
    """
    (part,) = chained.chained_optimizers
    if state is None:
        return
    part.grad_scaler.load_state_dict(
        {
            "scale": torch.tensor([state.scale], dtype=torch.float32),
            "growth_tracker": state.growth_tracker,
            "hysteresis_tracker": state.hysteresis_tracker,
        }
    )
    if update is not None:
        part.grad_scaler.update(update.overflowed)


def unscale(gradients: Sequence[torch.Tensor], state: LossScale | None) -> None:
    """Undo the scale in gradients (fp32), in place, with the bits that Megatron's optimizer gives."""
    if state is None or not gradients:
        return
    device = gradients[0].device
    inverse = torch.tensor([state.scale], dtype=torch.float32, device=device).double().reciprocal().float()
    found = torch.zeros(1, dtype=torch.float32, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), found, inverse)
