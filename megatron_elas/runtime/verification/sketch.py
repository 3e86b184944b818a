"""Sums of values under random signs: what two runs wrote of a tensor tells how far apart they are.

The signed sum of a range is ``sum over i of sign(q, i) * x[i]``, with signs that follow from the place ``i`` in the
row and the row's key ``q``. It is linear: the signed sums of two tensors differ by that of their difference, whose
square is, in the mean over signs, the square of the difference's norm. Those of parts of a range add up to the range's.
Sums are made in double precision, so they show relative differences of 1e-12. One sum is right to a factor of a few;
the root of the squares of a tensor's 16, to about a quarter.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise
from pathlib import Path

import torch

from megatron_elas import native
from megatron_elas.runtime.verification.checksum import BLOCK, MODULUS, WEIGHTS, WIDE_WEIGHTS, edge_of, range_edges

_SIGNS = 1.0 - 2.0 * (WIDE_WEIGHTS >> 31).to(torch.float64)
"""(BLOCK,) of 1 and -1."""


def signed_sums(values: torch.Tensor, key: int, start: int, size: int) -> list[float]:
    """Of every range of the row.

    Args:
        values: Floating-point, on the CPU; counted row by row.
        key: Of the row.
        start: Where in the row the first one stands.
        size: Elements of a range; ranges begin at its multiples.

    Returns:
        One number per range that ``values`` has elements of, in order. NaN where they are not finite, or infinite.
    """
    flat = values.detach().to(torch.float32).reshape(-1).contiguous()
    count = flat.numel()
    if not count:
        return []
    edges = range_edges(start, count, size)
    if _library is None or flat.device.type != "cpu":
        return [_add_signed(flat[low - start : high - start], key, low) for low, high in pairwise(edges)]
    sums = (ctypes.c_double * (len(edges) - 1))()
    _library.elas_signed_sums(flat.data_ptr(), count, WEIGHTS.data_ptr(), key % MODULUS, start, size, sums)
    return list(sums)


def _add_signed(flat: torch.Tensor, key: int, start: int) -> float:
    total, done = 0.0, 0
    while done < flat.numel():
        block, within = divmod(start + done, BLOCK)
        part = flat[done : done + BLOCK - within].to(torch.float64)
        signed = float(part @ _SIGNS[within : within + part.numel()])
        total += -signed if edge_of(key, block) >> 63 else signed
        done += part.numel()
    return total


def _load() -> ctypes.CDLL | None:
    library = native.load(Path(__file__).parent, "_sketch")
    if library is not None:
        library.elas_signed_sums.argtypes = [
            ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64,
            ctypes.POINTER(ctypes.c_double),
        ]  # fmt: skip
        library.elas_signed_sums.restype = None
    return library


_library = _load()
