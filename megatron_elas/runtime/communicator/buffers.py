"""Tensors as bytes, without copies."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_EMPTY = memoryview(bytearray())
_scratch = threading.local()


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor. Valid while the tensor lives.

    ``ctypes`` because ``Tensor.numpy`` takes twice as long and knows no bfloat16.
    """
    size = tensor.nbytes
    if not size:
        return _EMPTY
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def flatten(tensor: Tensor) -> Tensor:
    """A one-dimensional, contiguous, detached view of the tensor, or a copy where no such view is possible."""
    return tensor.detach().reshape(-1).contiguous()


def write_back(flat: Tensor, tensor: Tensor) -> None:
    """Bring to ``tensor`` what was written to its ``flatten``, if that was a copy."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def scratch(count: int, dtype: torch.dtype) -> Tensor:
    """``count`` elements that the calling thread may use until it calls this again. Contents are undefined.

    Kept per thread, because fresh memory costs a page fault per 4 KiB, more than moving the bytes.
    """
    size = count * dtype.itemsize
    have: Tensor | None = getattr(_scratch, "bytes", None)
    if have is None or have.numel() < size:
        have = _scratch.bytes = torch.empty(max(size, 1 << 16), dtype=torch.uint8)
    return have[:size].view(dtype)


def nothing() -> None:
    """What one member alone has to do for a collective in place."""


def copy_to(target: Tensor, source: Tensor) -> None:
    """Copy the values, unless they are the same memory."""
    if target.data_ptr() != source.data_ptr():
        target.detach().copy_(source.detach())


def multiply(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """In place."""
    for tensor in tensors:
        tensor.detach().mul_(factor)


def divide(tensors: Sequence[Tensor], count: int) -> None:
    """In place."""
    for tensor in tensors:
        tensor.detach().div_(count)


def bytes_of(tensor: Tensor) -> Tensor:
    """All bytes, one-dimensional; a view where the tensor is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
