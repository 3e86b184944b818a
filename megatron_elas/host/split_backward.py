"""Backward passes in two: ``B`` gives the gradients of inputs, ``W`` those of weights, later.

While an item with a split backward is in its forward or backward pass, linear layers of megatron-core's local spec are
computed by a function whose backward pass leaves out the weight's gradient, and notes what that needs: the layer's
input, which is there anyway, and its output's gradient. ``W`` computes from these what the layer would have computed,
and hands it to the hook of DistributedDataParallel that autograd would have called.

What else the hooks are told in ``B``, of norms, biases and embeddings, is added at once, but said to be ready for the
reduction in ``W``: so all that happens in the cell's last ``W`` happens in the order in which it would in a backward
pass that is not split, on every cell of the stage.

A weight that an item uses several times (``--mlp-chunks-for-training``) has one gradient, as in a pass that is not
split: those of its uses are added as autograd adds them. Layers of other kinds, and an embedding that is tied on one
stage, whose other use is no linear layer, get their weight's gradient in ``B``.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.utils import get_tensor_model_parallel_group_if_none

Accumulate = Callable[[torch.nn.Parameter, torch.Tensor], None]


class Deferred:
    """What the split backward pass of one item leaves for later, in the order in which autograd came to it."""

    def __init__(self, accumulate: Accumulate, whole: frozenset[int] = frozenset()) -> None:
        """Nothing yet.

        Args:
            accumulate: Takes a parameter and its gradient, as autograd's accumulation with its hooks does.
            whole: ``id`` of parameters whose gradients are not put off.
        """
        self.accumulate = accumulate
        self.whole = whole
        self._tasks: deque[Callable[[], object]] = deque()
        self._uses: Counter[torch.nn.Parameter] = Counter()
        """Of every weight: how many wait for their gradient."""
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        """Gradients of weights of which more uses wait."""

    def __len__(self) -> int:
        return len(self._tasks)

    def later(self, task: Callable[[], object]) -> None:
        """Do this in ``run``, after what was given before."""
        self._tasks.append(task)

    def weigh_later(self, parameter: torch.nn.Parameter, gradient: Callable[[], torch.Tensor]) -> None:
        """Compute the gradient of this use of a weight in ``run``; with the last use, accumulate their sum."""
        self._uses[parameter] += 1
        self.later(functools.partial(self._add, parameter, gradient))

    def _add(self, parameter: torch.nn.Parameter, gradient: Callable[[], torch.Tensor]) -> None:
        total = gradient()
        if (before := self._sums.pop(parameter, None)) is not None:
            total = before.add_(total)
        self._uses[parameter] -= 1
        if self._uses[parameter]:
            self._sums[parameter] = total
        else:
            del self._uses[parameter]
            self.accumulate(parameter, total)

    def run(self) -> None:
        """Do all of it; each is forgotten when it is done."""
        with torch.no_grad():
            while self._tasks:
                self._tasks.popleft()()

    def clear(self) -> None:
        """Forget it."""
        self._tasks.clear()
        self._uses.clear()
        self._sums.clear()


_under_way: list[Deferred] = []
"""Of the item whose passes run now; none where its backward pass is not split. Autograd may look from other threads."""


def deferred() -> Deferred | None:
    """Where the item that is under way puts off what can be; None: nowhere."""
    return _under_way[-1] if _under_way else None


@contextlib.contextmanager
def deferring(item: Deferred | None) -> Iterator[None]:
    """Inside is the forward or backward pass of this item."""
    forget()
    if item is not None:
        _under_way.append(item)
    try:
        yield
    finally:
        forget()


def forget() -> None:
    """No item is under way."""
    _under_way.clear()


class LinearInputGradient(torch.autograd.Function):
    """A linear layer as Megatron's ``LinearWithGradAccumulationAndAsyncCommunication``, but for its weight's gradient.

    # S sequence, B samples, I and O features in and out on this lane: input (S, B, I), weight (O, I), output (S, B, O).
    """

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, bias: torch.Tensor | None, hidden: tuple[torch.nn.Parameter], item: Deferred,
        allreduce_dgrad: bool, sequence_parallel: bool, tp_group: Any,
    ) -> torch.Tensor:  # fmt: skip
        """``hidden`` has the weight where autograd does not see it, and so calls none of its hooks in ``B``."""
        (parameter,) = hidden
        # matmul of an operand that needs a gradient is one product of matrices, of another a batch of products, where
        # the input's strides look transposed (a batch of one): they round differently. Megatron's layer has the first.
        weight = parameter.detach().requires_grad_()
        ctx.save_for_backward(input, weight)
        ctx.use_bias, ctx.parameter, ctx.item = bias is not None, parameter, item
        ctx.allreduce_dgrad, ctx.sequence_parallel, ctx.tp_group = allreduce_dgrad, sequence_parallel, tp_group
        total_input = _gather(input, tp_group) if sequence_parallel else input
        output = torch.matmul(total_input, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of input and bias; that of the weight is put off."""
        input, weight = ctx.saved_tensors
        grad_input = grad_output.matmul(weight)
        if ctx.allreduce_dgrad:
            torch.distributed.all_reduce(grad_input, group=ctx.tp_group)
        elif ctx.sequence_parallel:
            grad_input, total = torch.empty_like(input), grad_input
            layers.dist_reduce_scatter_func(grad_input, total, group=ctx.tp_group)
        grad_output = grad_output.contiguous()
        if grad_output.dim() == 3:
            grad_output = grad_output.view(-1, grad_output.shape[2])
        grad_bias = grad_output.sum(dim=0) if ctx.use_bias else None
        tp_group = ctx.tp_group if ctx.sequence_parallel else None
        ctx.item.weigh_later(ctx.parameter, functools.partial(_weight_gradient, input, grad_output, tp_group))
        return grad_input, grad_bias, None, None, None, None, None


def _gather(input: torch.Tensor, tp_group: Any) -> torch.Tensor:
    """All lanes' parts of the sequence, in Megatron's buffer for that: until the next one is gathered."""
    size = [input.shape[0] * tp_group.size(), *input.shape[1:]]
    buffer = layers.get_global_memory_buffer().get_tensor(size, input.dtype, "mpu")
    layers.dist_all_gather_func(buffer, input, group=tp_group)
    return buffer


def _weight_gradient(input: torch.Tensor, grad_output: torch.Tensor, tp_group: Any) -> torch.Tensor:
    """From a layer's input, and its output's gradient, (S B, O). With a group, the input is this lane's part."""
    total_input = (input if tp_group is None else _gather(input, tp_group)).contiguous()
    if total_input.dim() == 3:
        total_input = total_input.view(-1, total_input.shape[2])
    return grad_output.t().matmul(total_input)


def wrap_linear(original: Any) -> Any:
    """Megatron's linear layer, whose weight's gradient is put off where the item under way says so."""

    @functools.wraps(original)
    def linear_with_grad_accumulation_and_async_allreduce(
        input: Any, weight: Any, bias: Any, gradient_accumulation_fusion: bool, allreduce_dgrad: bool,
        sequence_parallel: bool, grad_output_buffer: Any = None, wgrad_deferral_limit: Any = 0, tp_group: Any = None,
        gtp_remat_size: int = 1,
    ) -> Any:  # fmt: skip
        item = deferred()
        if (
            item is None
            or not _can_defer(input, weight, item)
            or gradient_accumulation_fusion
            or grad_output_buffer is not None
            or gtp_remat_size > 1
        ):
            return original(
                input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel,
                grad_output_buffer, wgrad_deferral_limit, tp_group, gtp_remat_size,
            )  # fmt: skip
        tp_group = get_tensor_model_parallel_group_if_none(tp_group)
        return LinearInputGradient.apply(input, bias, (weight,), item, allreduce_dgrad, sequence_parallel, tp_group)

    return linear_with_grad_accumulation_and_async_allreduce


def _can_defer(input: torch.Tensor, weight: Any, item: Deferred) -> bool:
    """Whether a layer of this weight has a backward pass here, and its gradient is that of one use of a parameter."""
    return (
        torch.is_grad_enabled()
        and input.requires_grad
        and isinstance(weight, torch.nn.Parameter)
        and weight.requires_grad
        and hasattr(weight, "main_grad")
        and id(weight) not in item.whole
        and not torch.is_autocast_enabled(input.device.type)
    )


def wrap_grad_ready(original: Any) -> Any:
    """What tells a bucket that a gradient is complete: in a split backward pass it is not before the ``W``."""

    @functools.wraps(original)
    def register_grad_ready(self: Any, param: Any, force_all_reduce: Any = False) -> None:
        item = deferred()
        if item is None:
            original(self, param, force_all_reduce)
        else:
            item.later(functools.partial(original, self, param, force_all_reduce))

    return register_grad_ready
