"""Reductions of tensors in a fixed order.

The order is that of the members, whoever computes it, and 16-bit floats are summed in fp32 and rounded once. So the
result has the same bits on every member and does not depend on which member reduced which part. (Rings of large groups
are the exception: ``accumulate`` sums in the order of the ring and in the tensor's own dtype.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

_Combine = Callable[..., Tensor]

_COMBINE: tuple[tuple[ReduceOp.RedOpType, _Combine], ...] = (
    (ReduceOp.SUM, torch.add),
    (ReduceOp.AVG, torch.add),
    (ReduceOp.MAX, torch.maximum),
    (ReduceOp.MIN, torch.minimum),
    (ReduceOp.PRODUCT, torch.mul),
    (ReduceOp.BAND, torch.bitwise_and),
    (ReduceOp.BOR, torch.bitwise_or),
    (ReduceOp.BXOR, torch.bitwise_xor),
)
_LOW_PRECISION = (torch.bfloat16, torch.float16)


class Reduction:
    """One of torch's reduce operations, for one dtype."""

    __slots__ = ("_average", "_combine", "_widen")

    def __init__(self, op: ReduceOp | ReduceOp.RedOpType, dtype: torch.dtype) -> None:
        """Look the operation up.

        Raises:
            NotImplementedError: It is not one of SUM, AVG, MAX, MIN, PRODUCT, BAND, BOR, BXOR.
            TypeError: It cannot reduce this dtype.
        """
        for known, combine in _COMBINE:  # a ReduceOp equals its type, but does not hash like it
            if op == known:
                self._combine = combine
                break
        else:
            raise NotImplementedError(
                f"the elastic backend has no reduction {op}; it has SUM, AVG, MAX, MIN, PRODUCT, BAND, BOR and BXOR"
            )
        floating = dtype.is_floating_point
        self._average = op == ReduceOp.AVG
        if self._average and not floating:
            raise TypeError(f"ReduceOp.AVG needs a floating-point tensor, got {dtype}")
        if floating and combine in (torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor):
            raise TypeError(f"{op} needs an integer or bool tensor, got {dtype}")
        self._widen = dtype in _LOW_PRECISION and combine in (torch.add, torch.mul)

    def reduce(self, shards: Sequence[Tensor], out: Tensor, own: int) -> None:
        """Write the reduction of ``shards``, in their order, to ``out``.

        Args:
            shards: At least two, of one shape and dtype. All but ``shards[own]`` may be overwritten.
            out: May be one of them.
            own: Index of the caller's shard.
        """
        combine = self._combine
        if self._widen:
            total = shards[0].float()
            for shard in shards[1:]:
                combine(total, shard, out=total)
            if self._average:
                total /= len(shards)
            out.copy_(total)
            return
        total = shards[0]
        place = shards[1] if own == 0 else total
        for shard in shards[1:-1]:
            total = combine(total, shard, out=place)
        combine(total, shards[-1], out=out)
        if self._average:
            out /= len(shards)

    def accumulate(self, total: Tensor, shard: Tensor) -> None:
        """Reduce ``shard`` into ``total``; for rings, where partial results travel."""
        self._combine(total, shard, out=total)

    def finish(self, total: Tensor, count: int) -> None:
        """Turn the reduction of ``count`` shards by ``accumulate`` into the result."""
        if self._average:
            total /= count
