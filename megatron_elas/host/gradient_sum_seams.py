"""Wrappers that have gradients summed in fixed point, where the job is to be equal to the last bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_elas.host.attachment import attachment
from megatron_elas.host.gradient_sums import GradientSums

SAVED_EXPONENTS = "elas_gradient_exponents"
"""Attribute of the arguments in a checkpoint, see ``GradientSums.to_save``."""


def wrap_gradient_hook(original: Any) -> Any:
    """What takes a parameter's gradient when a micro-batch's backward pass has made it."""

    @functools.wraps(original)
    def _make_backward_post_hook(self: Any, param: torch.nn.Parameter) -> Callable[..., None]:
        sums = attachment().sums
        return original(self, param) if sums is None else _make_hook(self, param, sums)  # type: ignore[no-any-return]

    return _make_backward_post_hook


def _make_hook(ddp: Any, param: torch.nn.Parameter, sums: GradientSums) -> Callable[..., None]:
    def hook(*unused: object) -> None:
        if param not in ddp.param_to_bucket_group:
            return
        if param.grad is not None:
            sums.add(param, param.grad)
            param.grad = None
        if ddp.ddp_config.overlap_grad_reduce:
            ddp.param_to_bucket_group[param].register_grad_ready(param, ddp.force_all_reduce)

    return hook


def wrap_zero_gradients(original: Any) -> Any:
    """The begin of a step's sums."""

    @functools.wraps(original)
    def zero_grad_buffer(self: Any) -> None:
        original(self)
        if (sums := attachment().sums) is not None:
            sums.clear(self)

    return zero_grad_buffer


def wrap_start_reduction(original: Any) -> Any:
    """The begin of the reduction of a group of buckets."""

    @functools.wraps(original)
    def start_grad_sync(self: Any, force_all_reduce: Any = False) -> None:
        if (sums := attachment().sums) is None:
            original(self, force_all_reduce)
        else:
            assert not force_all_reduce, "sums in fixed point are reduced and scattered"
            sums.reduce(self)

    return start_grad_sync


def wrap_finish_reduction(original: Any) -> Any:
    """The end of the reduction of a group of buckets."""

    @functools.wraps(original)
    def finish_grad_sync(self: Any, force_all_reduce: Any = False) -> None:
        finished = self.grad_reduce_finished
        original(self, force_all_reduce)
        if not finished and (sums := attachment().sums) is not None:
            sums.convert(self)

    return finish_grad_sync


class _SecondUse(torch.autograd.Function):
    """A parameter, for a use whose gradient is summed apart from that of its other use."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, hidden: tuple[torch.nn.Parameter], sums: GradientSums) -> torch.Tensor:
        """``hidden`` has the parameter itself."""
        ctx.parameter, ctx.sums = hidden[0], sums
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        """Nothing for autograd to add."""
        ctx.sums.add(ctx.parameter, gradient)
        return None, None, None


def wrap_tied_output(original: Any) -> Any:
    """A linear layer, which may be an output layer without a weight of its own: it is given the embedding's."""

    @functools.wraps(original)
    def forward(self: Any, input_: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None) -> Any:
        borrows = self.weight is None and isinstance(weight, torch.nn.Parameter) and hasattr(weight, "main_grad")
        if borrows and torch.is_grad_enabled() and (sums := attachment().sums) is not None:
            weight = _SecondUse.apply(weight, (weight,), sums)
        return original(self, input_, weight, runtime_gather_output)

    return forward


def wrap_loaded_arguments(original: Any) -> Any:
    """The check of a checkpoint's arguments, when it is loaded to go on from."""

    @functools.wraps(original)
    def check_checkpoint_args(checkpoint_args: Any, *args: Any, **kwargs: Any) -> None:
        original(checkpoint_args, *args, **kwargs)
        if (sums := attachment().sums) is not None:
            sums.load(getattr(checkpoint_args, SAVED_EXPONENTS, None))

    return check_checkpoint_args
