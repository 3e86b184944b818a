"""Runs the stock schedule, or the plan's orders, over the plan's items, with weights that keep the gradient exact.

Megatron divides a micro-batch's loss by the tokens that count in it, then by the number of micro-batches that *its own
rank* runs, and the gradient by the data-parallel size. With other items per cell that would weigh samples differently.
Here it is told the micro-batches of the whole batch in that place (``host.training_step.wrap_forward_step``), so every
logical micro-batch weighs 1 / that, wherever and in whatever company its samples run, and gradients are summed (with
fp16 the factor of the data-parallel size is left to the sum, as in Megatron: it decides on what overflows):

* A whole micro-batch's loss is left as it is. Its weight is the same number as Megatron's, bit for bit when counts are
  powers of two, and the same bits on every cell, however many it runs.
* The loss of any other item is the sum over the micro-batches it has samples of, each divided by the tokens that count
  in that *whole* micro-batch. These are counted in the samples themselves, also those that run elsewhere.
* A loss function that gives a mean and no tokens says nothing of its parts. It is taken for the mean of the item's
  samples, which it is where the same number of tokens counts in each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_elas.host.pipeline import Route, RoutedPipeline
from megatron_elas.runtime.ports import FaultPoint
from megatron_elas.spec.items import CellItems, Item

LossFunction = Callable[..., tuple[Any, ...]]
ShareLosses = Callable[[Any, CellItems, int], tuple[Any, Any]]
"""From losses of a cell's items, these items, and micro-batches of the batch: the losses of all micro-batches, and what
Megatron is to add over the cells."""


class PassCounter:
    """Numbers the forward and backward passes of a training step or an evaluation, for fault scripts."""

    def __init__(self, strike: FaultPoint) -> None:
        self._strike = strike
        self.begin(-1)

    def begin(self, step: int) -> None:
        """A training step starts; -1: what follows is not training and is not counted."""
        self.step = step
        self._evaluated = -1
        self._forward = self._backward = 0

    def begin_evaluation(self, step: int) -> None:
        """An evaluation after this step starts."""
        self.begin(-1)
        self._evaluated = step

    def forward_only(self) -> None:
        """A forward pass is about to run that no backward pass follows."""
        if self._evaluated >= 0:
            self._strike(self._evaluated, "evaluate", self._forward)
            self._forward += 1

    def forward(self) -> None:
        """A forward pass of training is about to run."""
        if self.step >= 0:
            self._strike(self.step, "forward", self._forward)
            self._forward += 1

    def backward(self) -> None:
        """A backward pass is about to run."""
        if self.step >= 0:
            self._strike(self.step, "backward", self._backward)
            self._backward += 1


class Part(NamedTuple):
    """What an item has of one logical micro-batch."""

    start: int
    """Of the item's own samples, counted from 0."""
    stop: int
    tokens: int
    """That count in the whole micro-batch."""


def weigh_parts(loss_function: LossFunction, parts: Sequence[Part], size: int) -> LossFunction:
    """The loss function of an item whose parts are divided by their own micro-batches' tokens.

    Args:
        loss_function: Gives (sum over tokens, tokens of the item, report), linear in the losses per token, [b, s], that
            it is given; Megatron divides the sum by these tokens. Or (mean, report), as of old.
        parts: Of the item.
        size: Samples of a micro-batch.
    """

    def weighed(output: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        loss, *others = loss_function(output, *args, **kwargs)
        if len(others) == 1:
            return (loss * (parts[-1].stop / size), *others)
        tokens, *rest = others
        total = 0.0
        for part in parts:
            chosen = output if len(parts) == 1 else _keep_samples(output, part.start, part.stop)
            total = total + loss_function(chosen, *args, **kwargs)[0] / max(part.tokens, 1)
        return (total * tokens.clamp(min=1), tokens, *rest)

    return weighed


def _keep_samples(output: Any, start: int, stop: int) -> Any:
    """Losses per token, [b, s], without those of other samples than [start, stop)."""
    import torch

    kept = torch.zeros_like(output)
    kept[start:stop] = output[start:stop]
    return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """How losses are weighed."""

    micro_batch_size: int
    count_tokens: Callable[[int], int]
    """Tokens that count in a logical micro-batch of the step under way."""

    def apply(self, loss_function: LossFunction, item: Item) -> LossFunction:
        """The loss function of an item, for Megatron to divide by tokens and by the micro-batches of the batch."""
        if item.is_whole(self.micro_batch_size):
            return loss_function
        parts = [
            Part(start, stop, self.count_tokens(number)) for number, start, stop in item.parts(self.micro_batch_size)
        ]
        return weigh_parts(loss_function, parts, self.micro_batch_size)


def route_schedule(
    schedule: Callable[..., Any],
    route: Route,
    pipeline: RoutedPipeline,
    counter: PassCounter,
    num_rows: int,
    weights: Weights | None,
    sized: Callable[[int], AbstractContextManager[None]],
    keep_losses: Callable[[Any], None],
    run_order: Callable[..., Any] | None = None,
    drawing: Callable[[Item], AbstractContextManager[None]] = lambda item: nullcontext(),
    share_losses: ShareLosses | None = None,
) -> Callable[..., Any]:
    """Wrap a forward-backward function of Megatron.

    Args:
        schedule: What ``get_forward_backward_func`` gave.
        route: Which items run here.
        pipeline: Transfers to reset for every pass.
        counter: Told of every forward pass.
        num_rows: Data-parallel rows of the job; Megatron passes micro-batches per row.
        weights: Of losses; None: Megatron divides by the global token count itself.
        sized: Makes Megatron take a micro-batch for so many samples.
        keep_losses: Takes what a training pass gave, one dictionary of losses per item; with ``share_losses`` what
            that gave.
        run_order: ``host.orders.run_order`` but for what ``schedule`` does not take: runs training passes that the plan
            gives an order for.
        drawing: Around the forward pass of an item in training: what it draws is for the item's samples.
        share_losses: Puts the losses of all cells together, where their sum must not depend on who ran what.
    """

    def run(
        *, forward_step_func: Any, num_microbatches: int, micro_batch_size: int, forward_only: bool = False, **more: Any
    ) -> Any:
        items = (
            route.begin_evaluation(num_microbatches * num_rows, micro_batch_size)
            if forward_only
            else route.begin_step()
        )
        pipeline.reset()
        coming = iter(items)

        def forward_step(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            if forward_only:
                counter.forward_only()
            else:
                counter.forward()
            item = next(coming)
            with sized(item.samples), nullcontext() if forward_only else drawing(item):
                output, loss_function = forward_step_func(*args, **kwargs)
            if forward_only or weights is None or not pipeline.is_pp_last_stage:
                return output, loss_function
            return output, weights.apply(loss_function, item)

        run_passes = schedule
        if route.order is not None:
            assert run_order is not None
            run_passes = functools.partial(run_order, route.order, items, pipeline)
        losses = run_passes(
            forward_step_func=forward_step,
            num_microbatches=len(items),
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
            **more,
        )
        kept = losses
        if share_losses is not None and pipeline.is_pp_last_stage and not more.get("collect_non_loss_data"):
            kept, losses = share_losses(losses, items, num_microbatches * num_rows)
        if not forward_only:
            keep_losses(kept)
        return losses

    return run
