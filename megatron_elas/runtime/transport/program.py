"""A collective as data: rounds of transfers, and what is computed between them.

Whoever builds a program knows members, sizes and the algorithm; whoever runs it knows links. So the same program runs
in Python or in C, where it needs the interpreter only once per collective, and can be printed and checked without any
process. Programs name places, not addresses: one that was built for a size serves all tensors of that size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

SCRATCH = -1
"""Buffer number of memory that the transport provides; its contents are undefined at the start."""


class Region(NamedTuple):
    """``size`` bytes of one of the buffers that the program is run with, from byte ``start`` on."""

    buffer: int
    start: int
    size: int


class Transfer(NamedTuple):
    """Bytes to or from a peer."""

    peer: int
    """Worker id."""
    region: Region


class Reduce(NamedTuple):
    """``target = reduction of the sources, in their order``. ``target`` may be one of them; all have one size."""

    sources: tuple[Region, ...]
    target: Region


class Copy(NamedTuple):
    """``target = source``; they do not overlap unless they are equal."""

    source: Region
    target: Region


class Round(NamedTuple):
    """Transfers that run at once, full duplex, and what follows when all are done, in order."""

    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()
    then: tuple[Reduce | Copy, ...] = ()


class Reducer(Protocol):
    """How ``Reduce`` computes."""

    @property
    def native(self) -> tuple[int, int] | None:
        """Operation and dtype for the C core (``native_codes``); None: only ``reduce`` can do it."""

    def reduce(self, sources: Sequence[memoryview], target: memoryview) -> None:
        """Reduce bytes to bytes. ``target`` may be one of the sources."""


class Program(NamedTuple):
    """What one worker does in one collective."""

    rounds: tuple[Round, ...]
    scratch_bytes: int = 0
    reducer: Reducer | None = None
    """Needed where a round reduces."""


_OPERATIONS = ("SUM", "AVG", "MAX", "MIN", "PRODUCT")
_DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "int8", "uint8")


def native_codes(operation: str, dtype: str) -> tuple[int, int] | None:
    """What a reducer gives as ``native`` when the C core can compute it.

    The C core computes what ``communicator.reduction.Reduction`` does, to the bit (which NaN a NaN is, and which zero
    is the larger, are not defined): sources one after another in their order, 16-bit floats summed and multiplied in
    fp32 and rounded once, AVG by a division at the end.

    Args:
        operation: Name of a ``ReduceOp``, for example ``SUM``.
        dtype: Name of a torch dtype without ``torch.``, for example ``bfloat16``.

    Returns:
        None where the C core has no such reduction; AVG is for floats only.
    """
    if operation not in _OPERATIONS or dtype not in _DTYPES or (operation == "AVG" and "float" not in dtype):
        return None
    return _OPERATIONS.index(operation), _DTYPES.index(dtype)


def item_bytes(dtype_code: int) -> int:
    """Size of an element of one of ``native_codes``' dtypes."""
    return (4, 8, 2, 2, 8, 4, 1, 1)[dtype_code]
