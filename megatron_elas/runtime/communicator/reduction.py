"""Reductions of tensors in a fixed order.

The order is that of the sources in the program, and 16-bit floats are summed in fp32 and rounded once per step of the
program. So the result has the same bits whoever computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron_elas.runtime.communicator.buffers import scratch
from megatron_elas.runtime.communicator.signatures import REDUCE_OPS
from megatron_elas.runtime.transport.program import native_codes

_Combine = Callable[..., Tensor]

SUM, AVG, PREMUL_SUM = (REDUCE_OPS.index(name) for name in ("SUM", "AVG", "PREMUL_SUM"))
"""torch's codes of operations that are asked for by name."""

_COMBINE: dict[str, _Combine] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "PRODUCT": torch.mul,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_LOW_PRECISION = (torch.bfloat16, torch.float16)
_BITWISE = ("BAND", "BOR", "BXOR")


def code_of(op: ReduceOp | ReduceOp.RedOpType | int) -> int:
    """Torch's code of an operation, an index of ``REDUCE_OPS``."""
    try:
        return int(op.op)  # type: ignore[union-attr]
    except AttributeError:  # torch says that a RedOpType is an instance of ReduceOp, too
        return int(op)  # type: ignore[arg-type]


class Reduction:
    """One of torch's reduce operations, for one dtype. Implements ``transport.program.Reducer``."""

    __slots__ = ("_average", "_combine", "_dtype", "_native", "_widen")

    def __init__(self, op: ReduceOp | ReduceOp.RedOpType | int, dtype: torch.dtype) -> None:
        """Look the operation up, by torch's object or its code.

        Raises:
            NotImplementedError: It is not one of SUM, AVG, MAX, MIN, PRODUCT, BAND, BOR, BXOR.
            TypeError: It cannot reduce this dtype.
        """
        code = code_of(op)
        name = REDUCE_OPS[code] if code < len(REDUCE_OPS) else str(op)
        if name not in _COMBINE:
            raise NotImplementedError(
                f"the elastic backend has no reduction {name}; it has SUM, AVG, MAX, MIN, PRODUCT, BAND, BOR and BXOR"
            )
        floating = dtype.is_floating_point
        if name == "AVG" and not floating:
            raise TypeError(f"ReduceOp.AVG needs a floating-point tensor, got {dtype}")
        if floating and name in _BITWISE:
            raise TypeError(f"ReduceOp.{name} needs an integer or bool tensor, got {dtype}")
        if dtype.is_complex and name in ("MAX", "MIN", *_BITWISE):
            raise TypeError(f"ReduceOp.{name} needs a real tensor, got {dtype}")
        if floating and dtype.itemsize == 1:
            raise TypeError(f"{dtype} cannot be reduced; cast it, or gather it")
        self._dtype = dtype
        self._combine = _COMBINE[name]
        self._average = name == "AVG"
        self._widen = dtype in _LOW_PRECISION and name in ("SUM", "AVG", "PRODUCT")
        self._native = native_codes(name, str(dtype).removeprefix("torch."))

    @property
    def native(self) -> tuple[int, int] | None:
        """Codes for the C core; None: it has no such reduction."""
        return self._native

    def reduce(self, sources: Sequence[memoryview], target: memoryview) -> None:
        """Write the reduction of the sources, at least two, in their order, to ``target``, which may be one of them."""
        first, *rest = (torch.frombuffer(source, dtype=self._dtype) for source in sources)
        out = torch.frombuffer(target, dtype=self._dtype)
        if self._widen:
            total = first.float()
            for shard in rest:
                self._combine(total, shard, out=total)
            if self._average:
                total /= len(sources)
            out.copy_(total)
            return
        read_later = {shard.data_ptr() for shard in rest[1:]}
        total = scratch(out.numel(), out.dtype) if out.data_ptr() in read_later else out
        self._combine(first, rest[0], out=total)
        for shard in rest[1:]:
            self._combine(total, shard, out=total)
        if total is not out:
            out.copy_(total)
        if self._average:
            out /= len(sources)
