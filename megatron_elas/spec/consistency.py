"""How closely a job that loses workers, or moves layers, follows the run in which nothing happened."""

from __future__ import annotations

from typing import Literal, get_args

ConsistencyLevel = Literal["statistical", "numerical", "bitwise"]
"""``statistical``: the same samples, weights and masks; sums may be made in any order, in low precision too.
``numerical``: and gradients are accumulated and reduced in fp32, so that runs differ by rounding.
``bitwise``: and micro-batches keep their shape, and every sum is the same in any order, so that losses, norms,
parameters and optimizer states are equal to the last bit."""

RandomStreams = Literal["resharded", "megatron"]
"""``resharded``: every draw depends on seed, step, sample, layer, site and lane, and not on who makes it. ``megatron``:
on what its worker has drawn before, as upstream."""

CONSISTENCY_LEVELS: tuple[ConsistencyLevel, ...] = get_args(ConsistencyLevel)
RANDOM_STREAMS: tuple[RandomStreams, ...] = get_args(RandomStreams)

PROMISES: dict[ConsistencyLevel, str] = {
    "statistical": "events change the order of sums, in low precision too",
    "numerical": "events change losses by rounding",
    "bitwise": "events change no bit",
}
STREAMS: dict[RandomStreams, str] = {
    "resharded": "masks stay with their samples",
    "megatron": "masks are drawn from upstream's streams",
}
"""For people."""


def sum_bytes(level: ConsistencyLevel) -> int:
    """Of a sum of gradients in fixed point, per parameter: at ``bitwise`` such sums are kept beside the gradients."""
    return 8 if level == "bitwise" else 0
