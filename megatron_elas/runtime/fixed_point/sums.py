"""Adding gradients in fixed point: what is added is an integer, so neither order nor grouping changes a bit.

A gradient ``g`` becomes the integer nearest to ``g * 2**exponent``, ties to even: the product is exact in a double, and
only this one rounding depends on anything, namely on ``g`` and the exponent. Integers are added modulo 2**64, which is
exact while the sum stays below 2**63 (``spec.exponents`` sees to that), and associative in any case. At the end a sum
is rounded to fp32 once, and divided by the power, which is exact.

C code adds on the CPU, torch elsewhere and where there is no C library; both give the same bits.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from megatron_elas import native

_CHUNK = 1 << 20
"""Gradients that are widened at a time where there is no C library."""
_NORMAL = 126
"""Powers of two up to this one, and down to its reciprocal, are normal numbers of fp32."""


def add(gradient: torch.Tensor, total: torch.Tensor, exponent: int, largest: torch.Tensor) -> None:
    """Add a gradient to a total.

    Where ``largest`` comes to say that a term is above 2**51, the total is worth nothing.

    Args:
        gradient: (n,) float32, bfloat16 or float16.
        total: (n,) int64, contiguous, on the same device; changed.
        exponent: Of the power of two that gradients are multiplied with.
        largest: One int32, on the same device: the bits of the largest absolute value so far, as fp32; brought up
            to date. A NaN is larger than anything.
    """
    gradient = gradient.detach()
    if gradient.dtype not in _NATIVE:
        gradient = gradient.float()
    if _library is None or gradient.device.type != "cpu" or not gradient.is_contiguous():
        _add_in_torch(gradient, total, exponent, largest)
        return
    function = getattr(_library, _NATIVE[gradient.dtype])
    function(gradient.data_ptr(), total.data_ptr(), total.numel(), 2.0**exponent, largest.data_ptr())


def to_float(total: torch.Tensor, exponent: int, result: torch.Tensor) -> None:
    """Write what a total stands for to ``result``.

    Args:
        total: (n,) int64, contiguous.
        exponent: That its terms had.
        result: (n,) float32, contiguous, on the same device.
    """
    result.copy_(total)
    if abs(exponent) <= _NORMAL:
        result.mul_(2.0**-exponent)
    else:
        result.copy_(result.double().mul_(2.0**-exponent))


def _add_in_torch(gradient: torch.Tensor, total: torch.Tensor, exponent: int, largest: torch.Tensor) -> None:
    for part, sums in zip(gradient.split(_CHUNK), total.split(_CHUNK), strict=True):
        values = part.float()
        magnitudes = values.view(torch.int32) & 0x7FFFFFFF
        torch.maximum(largest, magnitudes.max() if magnitudes.numel() else largest, out=largest)
        sums.add_(values.double().mul_(2.0**exponent).round_().to(torch.int64))


_NATIVE = {torch.float32: "elas_add_float32", torch.bfloat16: "elas_add_bfloat16"}


def _load() -> ctypes.CDLL | None:
    library = native.load(Path(__file__).parent, "_sums")
    if library is not None:
        pointer = ctypes.c_void_p
        for name in _NATIVE.values():
            function = getattr(library, name)
            function.argtypes = [pointer, pointer, ctypes.c_int64, ctypes.c_double, pointer]
            function.restype = None
    return library


_library = _load()
