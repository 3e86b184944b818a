"""The interleaved ZeRO layout: every transformer layer is a bucket of its own.

Each bucket is shared evenly by all replicas of the stage, so every replica owns a slice of every layer
and moving a layer is a set of disjoint rank-to-rank transfers. Buckets have room at their end, so
that they can be cut evenly for every number of replicas the stage can come to have; buffers then stay
as they are when replicas leave.

However many replicas there are, a parameter is cut only at multiples of ``CUT`` elements from its start. So blocks of
so many elements, counted from there, are never cut, and vectorised kernels, which may round the elements that are left
over at the end of a tensor differently, find those elements at the end of the parameter and nowhere else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

LAYER_ATTRIBUTE = "elas_layer"
"""Set on parameters of transformer layers: the layer's number."""

CUT = 64
"""Elements: parameters start, and are cut, at multiples of it. Twice 32 fp32, what unrolled kernels take at a time."""
SHARE = 128
"""Elements: what a replica owns of a bucket is a multiple of it."""


class FlatParameter(Protocol):
    """What the layout needs to know of a parameter."""

    def numel(self) -> int:
        """Elements."""


def bucket_size(numel: int, replicas: int) -> int:
    """Elements of a bucket that ``replicas`` share evenly, each a multiple of ``SHARE``.

    Example: 1000 elements take 1024 with 1, 2 or 4 replicas, 1152 with 3 and 1280 with 5.
    """
    quantum = SHARE * replicas
    return math.ceil(numel / quantum) * quantum


def owned_range(index: int, replicas: int, numel: int) -> tuple[int, int]:
    """Start and end, from the bucket's, of what replica ``index`` of ``replicas`` owns of a bucket, padding included.

    Args:
        index: From 0.
        replicas: Who share the bucket.
        numel: What its parameters take.
    """
    size = bucket_size(numel, replicas) // replicas
    return index * size, (index + 1) * size


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """Where everything lies in the flat buffer, in elements."""

    index: dict[Any, tuple[int, int, int]]
    """(start, end, bucket) of every parameter."""
    buckets: list[tuple[int, int]]
    """(start, end) of every bucket, as the first number of replicas shares it."""
    unpadded: list[int]
    """What each bucket's parameters take, without the padding at its end."""
    numel: int
    """The whole buffer, with the room after the last bucket."""


def layer_buckets(params: Sequence[FlatParameter], replicas: int) -> BucketLayout:
    """Lay parameters out in reverse order (the order in which gradients become ready), a layer per bucket.

    What comes before the layers (embeddings) is a bucket, and so is what comes after them (final norm, head); a
    tied embedding is always alone, as in Megatron. After each bucket, the last one too, there is room for it to be
    cut for any smaller number of replicas: at most ``SHARE`` elements per replica, and what alignment takes.

    Args:
        params: In the order of ``named_parameters()``.
        replicas: How many share the buckets at first.
    """
    index: dict[Any, tuple[int, int, int]] = {}
    buckets: list[tuple[int, int]] = []
    unpadded: list[int] = []
    start = end = 0
    previous: Any = None
    for number, param in enumerate(reversed(params)):
        key = number if getattr(param, "shared_embedding", False) else ("layer", getattr(param, LAYER_ATTRIBUTE, None))
        if number and key != previous:
            start = end = _close(buckets, unpadded, start, end, replicas)
        previous = key
        position = math.ceil(end / CUT) * CUT
        end = position + param.numel()
        index[param] = (position, end, len(buckets))
    end = _close(buckets, unpadded, start, end, replicas) if params else 0
    return BucketLayout(index=index, buckets=buckets, unpadded=unpadded, numel=end)


def compact_index(
    index: Mapping[Any, tuple[int, int, int]], starts: Sequence[int], unpadded: Sequence[int]
) -> dict[Any, tuple[int, int, int]]:
    """The index as if buckets followed one another without padding and room.

    Args:
        index: (start, end, bucket) by parameter.
        starts: Start of every bucket.
        unpadded: What each bucket's parameters take.
    """
    compact = [0, *itertools.accumulate(unpadded)]
    return {
        param: (start - starts[bucket] + compact[bucket], end - starts[bucket] + compact[bucket], bucket)
        for param, (start, end, bucket) in index.items()
    }


def _close(buckets: list[tuple[int, int]], unpadded: list[int], start: int, end: int, replicas: int) -> int:
    """End a bucket; gives where the next one may start."""
    numel = end - start
    unpadded.append(numel)
    buckets.append((start, start + bucket_size(numel, replicas)))
    # For fewer replicas a bucket takes less than SHARE elements per replica beyond numel. Megatron wants buckets to
    # start, and the buffer to end, at multiples of the replicas.
    quantum = math.lcm(SHARE, replicas)
    return start + math.ceil((numel + SHARE * replicas) / quantum) * quantum
