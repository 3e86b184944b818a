"""Checksums that see where a value stands, and that add up.

The checksum of words ``x[s], x[s + 1], ... x[e - 1]`` of a row whose name gives the key ``q`` is, modulo 2**64::

    sum over i of  weight[i mod 4096] * factor(q, i div 4096) * x[i]

Weights are distinct 32-bit numbers, factors are odd: one changed word changes it, and so do two that change places
within a block, always; anything else escapes with a chance of about 2**-64. Checksums of the parts of a row add up to
the row's, however it was cut, so the sum over the owners of a parameter does not depend on who owns which range.

Not made to withstand an adversary.
"""

from __future__ import annotations

import ctypes
import hashlib
from itertools import pairwise
from pathlib import Path

import torch

from megatron_elas import native

BLOCK = 4096
"""Words that share a factor."""
MODULUS = 1 << 64
_CHUNK = 64 * BLOCK
"""Words that are widened at a time where there is no C library."""
_WORDS = {1: (torch.uint8, 0xFF), 2: (torch.int16, 0xFFFF), 4: (torch.int32, 0xFFFFFFFF)}


def key_of(*names: object) -> int:
    """64 bits that stand for a name of several parts."""
    return int.from_bytes(hashlib.blake2b(repr(names).encode(), digest_size=8).digest(), "little")


def checksum(values: torch.Tensor, key: int, start: int = 0) -> int:
    """Of the bits of ``values``.

    Args:
        values: Of 8, 16 or 32 bits each, contiguous, on the CPU. Any shape; counted row by row.
        key: Of the row that they are part of, see ``key_of``.
        start: Where in the row the first one stands.

    Returns:
        At least 0, below 2**64. 0 for zeros.

    Raises:
        ValueError: The elements have another size.
    """
    if values.element_size() not in _WORDS:
        raise ValueError(f"checksums are of elements of 1, 2 or 4 bytes, got {values.dtype}")
    values = values.detach()
    if _library is None or not values.is_contiguous() or values.device.type != "cpu":
        return _checksum_in_python(values, key, start)
    result: int = _library.elas_checksum(
        values.data_ptr(), values.element_size(), values.numel(), WEIGHTS.data_ptr(), key % MODULUS, start
    )
    return result


def range_edges(start: int, count: int, size: int) -> list[int]:
    """Where ``count`` elements from ``start`` on begin, come into another range of ``size`` elements, and end."""
    return [start, *range((start // size + 1) * size, start + count, size), start + count]


def range_sums(values: torch.Tensor, key: int, start: int, size: int) -> list[int]:
    """``checksum`` of every range of the row apart.

    Args:
        values: As for ``checksum``.
        key: Of the row.
        start: Where in the row the first one stands.
        size: Elements of a range; ranges begin at its multiples.

    Returns:
        One number per range that ``values`` has elements of, in order. None for no elements.

    Raises:
        ValueError: The elements have another size.
    """
    values = values.detach()
    count = values.numel()
    if not count:
        return []
    edges = range_edges(start, count, size)
    if _library is None or not values.is_contiguous() or values.device.type != "cpu" or values.element_size() > 4:
        flat = values.reshape(-1)
        return [checksum(flat[low - start : high - start], key, low) for low, high in pairwise(edges)]
    sums = (ctypes.c_uint64 * (len(edges) - 1))()
    _library.elas_range_sums(
        values.data_ptr(), values.element_size(), count, WEIGHTS.data_ptr(), key % MODULUS, start, size, sums
    )
    return list(sums)


def to_row(number: int) -> int:
    """A checksum as the 64-bit integer with sign that workers exchange."""
    number %= MODULUS
    return number - MODULUS if number >> 63 else number


def edge_of(key: int, position: int) -> int:
    """A number for the edge before element ``position`` of a parameter, see ``checks.cover``; or for a block."""
    return _mix(key, position)


def _checksum_in_python(values: torch.Tensor, key: int, start: int) -> int:
    dtype, mask = _WORDS[values.element_size()]
    flat = values.reshape(-1).view(dtype)
    total = 0
    done = 0
    while done < flat.numel():
        within = (start + done) % BLOCK
        room = BLOCK - within if within else _CHUNK
        part = flat[done : done + room].to(torch.int64) & mask
        blocks = torch.nn.functional.pad(part, (within, -(within + part.numel()) % BLOCK)).view(-1, BLOCK)
        sums: list[int] = (blocks * WIDE_WEIGHTS).sum(dim=1).tolist()  # wraps as the C code's does
        first = (start + done) // BLOCK
        total += sum(_mix(key, first + number) * value for number, value in enumerate(sums))
        done += part.numel()
    return total % MODULUS


def _mix(key: int, number: int) -> int:
    """An odd 64-bit number that looks random: splitmix64's output function."""
    x = (key + number * 0x9E3779B97F4A7C15) % MODULUS
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % MODULUS
    return (x ^ (x >> 31)) | 1


def _make_weights() -> torch.Tensor:
    """(BLOCK,) int64: distinct numbers of 32 bits, none 0. Murmur's finalizer maps 32 bits one to one."""
    weights = []
    for number in range(1, BLOCK + 1):
        x = number
        x = (x ^ (x >> 16)) * 0x85EBCA6B % (1 << 32)
        x = (x ^ (x >> 13)) * 0xC2B2AE35 % (1 << 32)
        weights.append(x ^ (x >> 16))
    return torch.tensor(weights, dtype=torch.int64)


WIDE_WEIGHTS = _make_weights()
WEIGHTS = WIDE_WEIGHTS.to(torch.uint32)


def _load() -> ctypes.CDLL | None:
    library = native.load(Path(__file__).parent, "_checksum")
    if library is not None:
        library.elas_checksum.argtypes = [
            ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64,
        ]  # fmt: skip
        library.elas_checksum.restype = ctypes.c_uint64
        library.elas_range_sums.argtypes = [
            *library.elas_checksum.argtypes, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64),
        ]  # fmt: skip
        library.elas_range_sums.restype = None
    return library


_library = _load()
