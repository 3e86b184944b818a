"""Runs the stock schedule over the plan's micro-batches, with weights that keep the gradient exact.

Megatron divides a micro-batch's loss by the number of micro-batches that *its own rank* runs, and the
gradient by the data-parallel size. With different counts per cell that would weigh samples
differently. Here the loss is multiplied by (items of this cell / items of the batch) and gradients are
summed, so every micro-batch weighs 1 / items of the batch wherever it runs. For the original grid this is
the same number as Megatron's, bit for bit when counts are powers of two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_elas.host.pipeline import Route, RoutedPipeline
from megatron_elas.runtime.ports import FaultPoint

LossFunction = Callable[..., tuple[Any, ...]]


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


def weigh_loss(loss_function: LossFunction, weight: float) -> LossFunction:
    """The same loss function with its first result (the loss that is differentiated) times ``weight``."""

    def weighed(output: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        loss, *rest = loss_function(output, *args, **kwargs)
        return (loss * weight, *rest)

    return weighed


def route_schedule(
    schedule: Callable[..., Any],
    route: Route,
    pipeline: RoutedPipeline,
    counter: PassCounter,
    num_rows: int,
    per_token_loss: bool,
    keep_losses: Callable[[Any], None],
) -> Callable[..., Any]:
    """Wrap a forward-backward function of Megatron.

    Args:
        schedule: What ``get_forward_backward_func`` gave.
        route: Which micro-batches run here.
        pipeline: Transfers to reset for every pass.
        counter: Told of every forward pass.
        num_rows: Data-parallel rows of the job; Megatron passes micro-batches per row.
        per_token_loss: Megatron divides by the global token count itself, so losses are not weighed.
        keep_losses: Takes what a training pass gave, one dictionary of losses per micro-batch.
    """

    def run(*, forward_step_func: Any, num_microbatches: int, forward_only: bool = False, **kwargs: Any) -> Any:
        items = route.begin(num_microbatches * num_rows)
        pipeline.reset()
        weight = len(items) / route.num_items

        def forward_step(*args: Any, **more: Any) -> tuple[Any, Any]:
            if forward_only:
                counter.forward_only()
            else:
                counter.forward()
            output, loss_function = forward_step_func(*args, **more)
            if forward_only or per_token_loss:
                return output, loss_function
            return output, weigh_loss(loss_function, weight)

        losses = schedule(
            forward_step_func=forward_step, num_microbatches=len(items), forward_only=forward_only, **kwargs
        )
        if not forward_only:
            keep_losses(losses)
        return losses

    return run
