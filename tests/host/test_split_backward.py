"""A linear layer's backward pass in two has the bits of the one that Megatron runs in one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_elas.host.split_backward import Deferred, deferred, deferring, forget, wrap_grad_ready, wrap_linear

OUT, IN = 5, 7


@pytest.fixture(autouse=True)
def _nothing_under_way() -> Iterator[None]:
    yield
    assert deferred() is None
    forget()


@pytest.fixture(scope="module")
def linear() -> Any:
    """Megatron's function, and the same that can put gradients off."""
    from megatron.core.tensor_parallel import layers

    original = layers.linear_with_grad_accumulation_and_async_allreduce
    return original, wrap_linear(original)


def make(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)


class Layer:
    """A layer with its parameters, and what it is given."""

    def __init__(self, function: Any, shape: tuple[int, ...], dtype: torch.dtype, *, bias: bool) -> None:
        self.function = function
        self.weight = torch.nn.Parameter(make((OUT, IN), dtype, 1))
        self.weight.main_grad = torch.zeros((OUT, IN))  # type: ignore[attr-defined]
        self.bias = torch.nn.Parameter(make((OUT,), dtype, 2)) if bias else None
        self.entry = make((*shape, IN), dtype, 3).requires_grad_()
        self.item = Deferred(lambda parameter, gradient: parameter.main_grad.add_(gradient))  # type: ignore[attr-defined]

    def forward(self, *, fused: bool = False, buffer: Any = None) -> torch.Tensor:
        output: torch.Tensor = self.function(
            self.entry, self.weight, self.bias, fused, False, False, grad_output_buffer=buffer, tp_group="none"
        )
        return output


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 2), (4,)])
def test_gradients_are_those_of_the_pass_in_one(
    linear: Any, shape: tuple[int, ...], dtype: torch.dtype, bias: bool
) -> None:
    whole, split = (Layer(function, shape, dtype, bias=bias) for function in linear)
    gradient = make((*shape, OUT), dtype, 4)
    output = whole.forward()
    output.backward(gradient)
    with deferring(split.item):
        again = split.forward()
        again.backward(gradient)
    assert torch.equal(again, output) and torch.equal(split.entry.grad, whole.entry.grad)
    if bias:
        assert torch.equal(split.bias.grad, whole.bias.grad)
    assert split.weight.grad is None and not split.weight.main_grad.any() and len(split.item) == 1
    split.item.run()
    assert len(split.item) == 0 and whole.weight.grad.any()
    assert torch.equal(split.weight.main_grad, whole.weight.grad.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_with_several_uses_has_one_gradient_with_the_bits_of_the_pass_in_one(
    linear: Any, dtype: torch.dtype
) -> None:
    totals = []
    for function in linear:
        layer = Layer(function, (4, 2), dtype, bias=False)
        handed: list[torch.Tensor] = []
        layer.item.accumulate = lambda parameter, gradient, handed=handed: handed.append(gradient)
        with deferring(layer.item):
            parts = []
            for chunk in make((3, 4, 2, IN), dtype, 5).sub(0.5):
                layer.entry = chunk.requires_grad_()
                parts.append(layer.forward())
            torch.cat(parts).backward(make((12, 2, OUT), dtype, 6).sub(0.5))
        layer.item.run()
        totals.append(handed or [layer.weight.grad])
    (whole,), (split,) = totals
    assert torch.equal(whole, split)


@pytest.mark.parametrize("out", [24, 48, 64])
def test_an_input_that_looks_transposed_is_multiplied_as_in_the_pass_in_one(linear: Any, out: int) -> None:
    """One sample of 32 tokens, as an embedding gives it: strides of a batch of one."""
    found = []
    for function, item in zip(linear, (None, Deferred(lambda parameter, gradient: None)), strict=True):
        weight = torch.nn.Parameter(make((out, 16), torch.float32, 1) - 0.5)
        weight.main_grad = torch.zeros((out, 16))  # type: ignore[attr-defined]
        entry = (make((1, 32, 16), torch.float32, 2) - 0.5).requires_grad_()
        with deferring(item):
            output = function(entry.transpose(0, 1), weight, None, False, False, False, tp_group="none")
            output.backward((make((1, 32, out), torch.float32, 3) - 0.5).transpose(0, 1))
        assert item is None or len(item) == 1
        found.append((output, entry.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_what_waits_for_w_is_freed_by_it_and_by_a_cancel(linear: Any) -> None:
    for end in (Deferred.run, Deferred.clear):
        layer = Layer(linear[1], (3, 2), torch.float32, bias=False)
        with deferring(layer.item):
            layer.forward().sum().backward()
        entry = weakref.ref(layer.entry)
        layer.entry = None  # type: ignore[assignment]
        gc.collect()
        assert entry() is not None, "W needs it"
        end(layer.item)
        gc.collect()
        assert entry() is None


def test_a_pass_without_gradients_and_one_of_another_kind_are_left_as_they_are(linear: Any) -> None:
    layer = Layer(linear[1], (3, 2), torch.float32, bias=False)
    with deferring(layer.item):
        with torch.no_grad():
            layer.forward()
        output = layer.forward(buffer=[])  # Megatron puts it off itself
        assert "LinearWithGradAccumulation" in type(output.grad_fn).__name__
        layer.item.whole = frozenset([id(layer.weight)])
        output = layer.forward()
        output.sum().backward()
    assert len(layer.item) == 0 and layer.weight.grad is not None
    layer.item.whole = frozenset()
    with deferring(None):
        layer.forward().sum().backward()
    assert len(layer.item) == 0
    frozen = Layer(linear[1], (3, 2), torch.float32, bias=False)
    frozen.entry.requires_grad_(False)
    with deferring(frozen.item):
        frozen.forward().sum().backward()
    assert len(frozen.item) == 0 and frozen.weight.grad is not None, "no gradient would come by to put it off"


def test_an_item_is_under_way_until_its_pass_ends_however_it_ends() -> None:
    item = Deferred(lambda parameter, gradient: None)
    with pytest.raises(KeyError), deferring(item):
        assert deferred() is item
        raise KeyError
    assert deferred() is None


def test_gradients_are_told_to_be_ready_in_w_and_in_the_order_of_the_pass(linear: Any) -> None:
    told: list[str] = []
    ready = wrap_grad_ready(lambda bucket, param, force_all_reduce: told.append(param))
    ready("bucket", "before", True)
    item = Deferred(lambda parameter, gradient: None)
    with deferring(item):
        ready("bucket", "norm")
        item.later(lambda: ready("bucket", "linear"))
        ready("bucket", "bias")
    assert told == ["before"]
    item.run()
    assert told == ["before", "norm", "linear", "bias"]
