"""The optimizer's update of a step, done again elsewhere: on a backup's copy, or after a step that was cut.

Both go through Megatron's and torch's own functions on tensors of the same sizes as the owner's, so they give the
same bits. (An element-wise kernel may round the elements at the end of a tensor differently from those
before. Copies that are cut elsewhere give the same bits only because every cut is at a multiple of what kernels take
at a time, see ``spec.buckets``, and, with several threads, if one of them makes the update: ``host.one_thread``.)

# P elements of one slot of a shard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megatron_elas.host.loss_scale import LossScale, unscale
from megatron_elas.host.optimizer import MOMENTS
from megatron_elas.spec.shards import SLOTS, ShardLayout
from megatron_elas.spec.transaction import Update


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an update is made with beside gradients and norm."""

    groups: list[dict[str, Any]]
    """Options of every parameter group of the optimizer: learning rate, weight decay, betas, ..."""
    loss_scale: LossScale | None = None
    """With which the gradients were computed."""


def read_settings(chained: Any, loss_scale: LossScale | None) -> Settings:
    """Those of the next update; ``loss_scale``: before the step."""
    (part,) = chained.chained_optimizers
    groups = [{key: value for key, value in group.items() if key != "params"} for group in part.optimizer.param_groups]
    return Settings(groups=groups, loss_scale=loss_scale)


class OptimizerMirror:
    """A copy of an optimizer shard, followed by an optimizer of the owner's kind. Implements ``runtime.ports.Mirror``.

    Args:
        layout: Of the shard.
        flat: (3 P + 1,) fp32, filled; its parts are the optimizer's tensors.
        group_of: Parameter group by parameter name.
        kind: Class of the owner's inner optimizer.
        settings: Those of any update.
        clip: Largest norm of the gradients; 0: they are not clipped.
        updating: Makes what an update is made in.
    """

    def __init__(
        self,
        layout: ShardLayout,
        flat: torch.Tensor,
        group_of: Callable[[str], int],
        kind: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        settings: Settings,
        clip: float,
        updating: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._flat = flat
        self._clip = clip
        self._updating = updating
        slots = flat[:-1].view(len(SLOTS), -1)
        groups: list[dict[str, Any]] = [{**options, "params": []} for options in settings.groups]
        self._params: list[torch.Tensor] = []
        self._spans: list[slice] = []
        moments: list[list[torch.Tensor]] = []
        for piece, offset in zip(layout.pieces, layout.offsets(), strict=True):
            span = slice(offset, offset + piece.numel)
            param = slots[0, span]
            groups[group_of(piece.name)]["params"].append(param)
            self._params.append(param)
            self._spans.append(span)
            moments.append([slots[number, span] for number in range(1, len(SLOTS))])
        self._optimizer = kind(groups) if self._params else None
        if self._optimizer is not None:
            for param, parts in zip(self._params, moments, strict=True):
                self._optimizer.state[param] = dict(zip(MOMENTS, parts, strict=True))

    @torch.no_grad()
    def apply(self, gradients: torch.Tensor, update: Update, settings: object) -> None:
        """See ``runtime.ports.Mirror``."""
        assert isinstance(settings, Settings)
        step = float(self._flat[-1])
        if self._optimizer is not None:
            unscale([gradients], settings.loss_scale)
            for group, options in zip(self._optimizer.param_groups, settings.groups, strict=True):
                group.update(options)
                if "step" in group:  # fused optimizers count there
                    group["step"] = int(step)
            for param, span in zip(self._params, self._spans, strict=True):
                param.grad = gradients[span]
                self._optimizer.state[param]["step"] = torch.tensor(step)
            with self._updating():
                clip(self._params, self._clip, update)
                self._optimizer.step()
            self._flat[-1] = step + 1  # an owner of nothing but padding counts no updates either


def clip(params: Sequence[torch.Tensor], limit: float, update: Update) -> None:
    """Scale the gradients as Megatron does for the norm of the whole model."""
    if limit > 0 and params:
        assert update.norm is not None
        clip_grad_by_total_norm_fp32(list(params), max_norm=limit, total_norm=update.norm)


@torch.no_grad()
def finish_update(chained: Any, update: Update, loss_scale: LossScale | None) -> None:
    """Make the update from the gradients in DDP's buffers, without any communication.

    Args:
        chained: Megatron's optimizer, which has not made it. Its loss scaler is left alone.
        update: The step's.
        loss_scale: With which the gradients were computed.
    """
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

    if not update.applies:
        return
    (part,) = chained.chained_optimizers
    timers, part.config.timers = part.config.timers, None  # some of them are barriers
    scaler, part.grad_scaler = part.grad_scaler, None  # or all would be asked whether a gradient is infinite
    try:
        part.prepare_grads()
        unscale([param.grad for param in part.get_parameters()], loss_scale)
        clip(part.get_parameters(), part.config.clip_grad, update)
        # Not the method of the class below, which gathers the parameters too.
        make_update = MixedPrecisionOptimizer.step_with_ready_grads
        getattr(make_update, "__wrapped__", make_update)(part)
    finally:
        part.config.timers, part.grad_scaler = timers, scaler


MOST_LOSSES = 16
"""Losses with different names that all workers are told; further ones only the last stage knows."""
NAME_BYTES = 32
POLLS = 16
"""Numbers near each other that can be voted for at a time; two of these polls are in a row of the board."""


def tell_losses(
    losses: dict[str, torch.Tensor], tells: bool, ballot: tuple[int, int] = (0, 0)
) -> tuple[dict[str, torch.Tensor], tuple[int, int]]:
    """Have all workers know the losses, names included: any of them may come to tell the step's line. And count votes.

    Args:
        losses: Of the step; only looked at where ``tells``.
        tells: True on one worker, of the last stage.
        ballot: Two numbers that this worker votes for; 0: none.

    Returns:
        The losses, and how many have voted for the same; votes for others do not count, as long as their numbers are
        no multiple of ``POLLS`` away.
    """
    # One sum to which all others add zeros, so that it does not change a bit, and the shape is the same in every step.
    board = torch.zeros((MOST_LOSSES + 1, NAME_BYTES + 1), dtype=torch.float32)
    rows, votes = board[:-1], board[-1]
    places = [poll * POLLS + number % POLLS for poll, number in enumerate(ballot)]
    for place, number in zip(places, ballot, strict=True):
        votes[place] = float(number > 0)
    if tells:
        for row, (name, value) in zip(rows, losses.items(), strict=False):
            letters = name.encode()[:NAME_BYTES]
            row[0] = value
            row[1 : 1 + len(letters)] = torch.tensor(list(letters))
    dist.all_reduce(board)
    letters = rows[:, 1:].to(torch.uint8).numpy()
    names = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in letters]
    told = {name: row[0].clone() for name, row in zip(names, rows, strict=True) if name}
    first, second = (int(votes[place]) for place in places)
    return told, (first, second)
