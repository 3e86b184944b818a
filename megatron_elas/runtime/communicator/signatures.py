"""What the members of a group must agree on in an operation, as the tag of its frames.

====== ==== =======================================================================
bits   size meaning
====== ==== =======================================================================
0-15   16   number of the collective in its group and epoch, from 1 on, modulo 2^16
16-20  5    kind, an index of ``KINDS``
21-25  5    dtype, an index of ``DTYPES``
26-29  4    reduce operation, an index of ``REDUCE_OPS``; 15: none
30-38  9    root's group rank + 1, modulo 2^9; 0: none
39-61  23   elements of all tensors, where members must agree on it
62     1    there are more elements than fit; bits 39-61 have a remainder
63     1    0
====== ==== =======================================================================

So a worker that receives a frame of another operation notices it at the header, and the tag tells what was called.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

KINDS = (
    "point-to-point",
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
    "monitored_barrier",
)

DTYPES = (
    "uint8", "int8", "int16", "int32", "int64", "bool", "float16", "bfloat16", "float32", "float64", "complex32",
    "complex64", "complex128", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip

REDUCE_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
"""In the order of torch's codes."""

NO_OP = 15
_NO_DTYPE = 31
_ROOTS = 1 << 9
_COUNTS = 1 << 23
_REMAINDER = _COUNTS - 15
"""A prime, so that most different counts above it still have different tags."""
SEQUENCES = 1 << 16

_DTYPE_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, name in enumerate(DTYPES) if hasattr(torch, name)
}
_TAG_TEXT = re.compile(r"tag (0x[0-9a-f]+)")


def pack(kind: str, dtype: torch.dtype | None = None, op: int = NO_OP, root: int = -1, count: int = 0) -> int:
    """The tag without its number.

    Args:
        kind: One of ``KINDS``.
        dtype: Of the tensors.
        op: torch's code of the reduce operation.
        root: Group rank.
        count: Elements.
    """
    code = _NO_DTYPE if dtype is None else _DTYPE_CODES.get(dtype, _NO_DTYPE)
    elements = count if count < _COUNTS else _COUNTS | count % _REMAINDER
    return KINDS.index(kind) << 16 | code << 21 | op << 26 | (root + 1) % _ROOTS << 30 | elements << 39


class Signature(NamedTuple):
    """A tag taken apart."""

    number: int
    kind: str
    dtype: str
    op: str
    root: int
    """Group rank; -1: none."""
    count: int
    exact: bool
    """False: ``count`` is only a remainder."""

    def __str__(self) -> str:
        """For messages."""
        if self.kind == "point-to-point":
            return "a send or recv"
        words = [f"{self.kind} number {self.number}"]
        if self.dtype:
            words.append(f"of {self.count} x {self.dtype}" if self.exact else f"of a large {self.dtype} tensor")
        if self.op:
            words.append(f"with {self.op}")
        if self.root >= 0:
            words.append(f"from or to rank {self.root}")
        return " ".join(words)


def unpack(tag: int) -> Signature | None:
    """Take a tag apart; None where it is none of a group's."""
    kind, dtype, op = tag >> 16 & 31, tag >> 21 & 31, tag >> 26 & 15
    if tag >> 63 or kind >= len(KINDS):
        return None
    return Signature(
        number=tag & SEQUENCES - 1,
        kind=KINDS[kind],
        dtype=DTYPES[dtype] if dtype < len(DTYPES) else "",
        op=REDUCE_OPS[op] if op < len(REDUCE_OPS) else "",
        root=(tag >> 30 & _ROOTS - 1) - 1,
        count=tag >> 39 & _COUNTS - 1,
        exact=not tag >> 62 & 1,
    )


def explain(text: str) -> str:
    """Replace the tags in a transport's message by what they mean."""

    def meaning(match: re.Match[str]) -> str:
        signature = unpack(int(match[1], 16))
        return match[0] if signature is None else f"<{signature}>"

    return _TAG_TEXT.sub(meaning, text)
