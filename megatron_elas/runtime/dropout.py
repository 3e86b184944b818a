"""Dropout whose mask is a function of a key.

Element ``i`` of a mask of key ``k`` stays where the 32 bits ``mix(mix(i + low) ^ high)`` are at least ``p * 2^32``,
with ``low`` and ``high`` the halves of ``k``, sums and products modulo 2^32, and

    mix(x):  x = (x ^ x >> 16) * 0x85EBCA6B;  x = (x ^ x >> 13) * 0xC2B2AE35;  x ^ x >> 16

So a mask has the same bits on every processor, from the C library and from torch, and in any order of its elements.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

from megatron_elas import native

_WORD = 0xFFFFFFFF


def _load() -> Any:
    library = native.load(Path(__file__).parent, "_dropout")
    if library is None:
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.elas_draw_mask.argtypes = (ctypes.c_uint64, ctypes.c_uint32, pointer, count)
    for name in ("elas_apply_mask_fp32", "elas_apply_mask_bf16"):
        getattr(library, name).argtypes = (pointer, pointer, ctypes.c_float, pointer, count)
    for name in ("elas_draw_mask", "elas_apply_mask_fp32", "elas_apply_mask_bf16"):
        getattr(library, name).restype = None
    return library


_LIBRARY = _load()


def draw_mask(mask: torch.Tensor, key: int, probability: float) -> None:
    """Fill a contiguous bool tensor: true, with probability ``1 - probability``, where an element stays.

    Args:
        mask: Of at most 2^32 elements.
        key: 64 bits.
        probability: Of dropping an element, in [0, 1].
    """
    if probability >= 1:
        mask.zero_()
        return
    threshold = min(round(probability * 2**32), _WORD)
    if _LIBRARY is not None and mask.device.type == "cpu":
        _LIBRARY.elas_draw_mask(key, threshold, mask.data_ptr(), mask.numel())
        return
    words = torch.arange(mask.numel(), dtype=torch.int64, device=mask.device)
    words = _mix((words + (key & _WORD)) & _WORD)
    mask.view(-1).copy_(_mix(words ^ (key >> 32)) >= threshold)


def _mix(words: torch.Tensor) -> torch.Tensor:
    """Of 32-bit words in int64, whose products wrap around."""
    words = ((words ^ (words >> 16)) * 0x85EBCA6B) & _WORD
    words = ((words ^ (words >> 13)) * 0xC2B2AE35) & _WORD
    return words ^ (words >> 16)


def apply_mask(values: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """``values`` times ``scale`` where the mask is true, times 0 elsewhere; in fp32 at least, rounded once.

    Args:
        values: Floating point.
        mask: Bool, of the same shape.
        scale: Rounded to fp32 first.
    """
    native_function = _function_for(values)
    if native_function is not None and values.is_contiguous() and mask.is_contiguous():
        products = torch.empty_like(values)
        native_function(values.data_ptr(), mask.data_ptr(), scale, products.data_ptr(), values.numel())
        return products
    wide = torch.float64 if values.dtype is torch.float64 else torch.float32
    factors = mask.to(torch.float32).mul_(scale).to(wide)
    return factors.mul_(values).to(values.dtype) if values.dtype is not wide else factors.mul_(values)


def _function_for(values: torch.Tensor) -> Any:
    if _LIBRARY is None or values.device.type != "cpu":
        return None
    if values.dtype is torch.float32:
        return _LIBRARY.elas_apply_mask_fp32
    return _LIBRARY.elas_apply_mask_bf16 if values.dtype is torch.bfloat16 else None


class Masked(torch.autograd.Function):
    """``apply_mask`` with its gradient. Keeps one byte per element."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        """``values`` and ``mask`` of one shape."""
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return apply_mask(values.contiguous(), mask, scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Of the values only."""
        (mask,) = ctx.saved_tensors
        return Masked.apply(gradient, mask, ctx.scale), None, None
