"""The sum of squares over tensors that workers hold parts of, equal to the last bit for any cut, order and membership.

A parameter is taken in blocks of ``spec.buckets.CUT`` elements from its start; no cut of it goes through a block.

* A block's sum is made in double precision, in one fixed order. Squares of single precision are exact in it.
* Sums of blocks are added as integers: a double is an integer times a power of two, so the sum of any number of them
  is exact in fixed point, and integers can be added in any order. The point is where no square of a number of single
  precision has bits below it.

A sum is kept as a row of int64: 32 bits of the number in each, from 2**-320 up, then how many blocks were no numbers,
and how many infinite. Rows add up, element by element: over tensors, and by an all-reduce over workers.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from pathlib import Path

import torch

from megatron_elas import native
from megatron_elas.spec.buckets import CUT

LIMBS = 20
ROW = LIMBS + 2
"""Numbers in a row."""
_LIMB_BITS = 32
_LOWEST = -320
_LANES = 8
_CHUNK = 1 << 20
"""Elements that are widened at a time where there is no C library. A multiple of ``CUT``."""


def sum_squares(tensors: Iterable[torch.Tensor], device: torch.device | str = "cpu") -> torch.Tensor:
    """The row of the sum of the squares of all elements.

    Args:
        tensors: Of fp32 or narrower types, 2**36 elements at most. Each begins at the start of a parameter or a
            multiple of ``CUT`` elements from it, and ends at the parameter's end or at such a multiple.
        device: Where they are, and the row is to be.

    Returns:
        int64, (ROW,); carried, so that rows of 2**31 workers can be added.
    """
    row = torch.zeros(ROW, dtype=torch.int64, device=device)
    for tensor in tensors:
        _add_squares(tensor.detach().reshape(-1).float(), row)
    return torch.tensor(_carry(row.tolist()), dtype=torch.int64, device=device)


def read_sum(row: torch.Tensor) -> float:
    """The number that a row, or a sum of rows, stands for, correctly rounded. NaN and infinity are not lost."""
    *limbs, nans, infinities = row.tolist()
    if nans:
        return math.nan
    if infinities:
        return math.inf
    return _whole(limbs) / (1 << -_LOWEST)  # a division of integers is rounded once


def _whole(limbs: Iterable[int]) -> int:
    return sum(limb << _LIMB_BITS * number for number, limb in enumerate(limbs))


def _carry(numbers: list[int]) -> list[int]:
    """The same row with 32 bits in every limb but the last."""
    total = _whole(numbers[:LIMBS])
    mask = (1 << _LIMB_BITS) - 1
    limbs = [total >> _LIMB_BITS * number & mask for number in range(LIMBS - 1)]
    return [*limbs, total >> _LIMB_BITS * (LIMBS - 1), *numbers[LIMBS:]]


def _add_squares(values: torch.Tensor, row: torch.Tensor) -> None:
    """Add one tensor's, fp32, flat."""
    if _library is not None and values.device.type == "cpu":
        values = values.contiguous()
        _library.elas_add_squares(values.data_ptr(), values.numel(), row.data_ptr())
        return
    for chunk in values.split(_CHUNK):
        _add_blocks(_sum_blocks(chunk), row)


def _sum_blocks(values: torch.Tensor) -> torch.Tensor:
    """Sum of the squares of every block, double; in the order of _exact_sums.c."""
    missing = -values.numel() % CUT
    if missing:
        values = torch.nn.functional.pad(values, (0, missing))
    squares = values.double().square_().view(-1, CUT // _LANES, _LANES)
    lanes = squares[:, 0]
    for number in range(1, CUT // _LANES):
        lanes = lanes + squares[:, number]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _add_blocks(sums: torch.Tensor, row: torch.Tensor) -> None:
    row[LIMBS] += sums.isnan().sum()
    row[LIMBS + 1] += sums.isinf().sum()
    fraction, exponent = torch.frexp(torch.where(sums.isfinite(), sums, 0.0))
    mantissa = (fraction * 2.0**53).long()
    position = exponent.long() - 53 - _LOWEST
    mantissa = mantissa >> (-position).clamp(min=0)  # only zeros go
    position = position.clamp(min=0)
    shift, limb = position % _LIMB_BITS, position // _LIMB_BITS
    mask = (1 << _LIMB_BITS) - 1
    low, high = (mantissa & mask) << shift, (mantissa >> _LIMB_BITS) << shift
    row.index_add_(0, limb, low & mask)
    row.index_add_(0, limb + 1, (low >> _LIMB_BITS) + (high & mask))
    row.index_add_(0, limb + 2, high >> _LIMB_BITS)


def _load() -> ctypes.CDLL | None:
    library = native.load(Path(__file__).parent, "_exact_sums")
    if library is not None:
        library.elas_add_squares.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        library.elas_add_squares.restype = None
    return library


_library = _load()
