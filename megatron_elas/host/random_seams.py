"""Wrappers around what draws random numbers, in Megatron and in torch, for streams that are resharded.

Where a pass of ``runtime.random_streams`` is under way, dropout and Megatron's tracker ask the streams; elsewhere, with
``--elastic-rng megatron`` and in evaluations, they do what they always did.

Recomputation of all kinds keeps the states of Megatron's tracker and comes back to them. So the place of a pass travels
as one of these states. It is only there while a pass is under way: no checkpoint, and no other reader, sees it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as megatron_random

from megatron_elas.host.attachment import find_streams
from megatron_elas.runtime.random_streams import RandomStreams

PLACE = "megatron_elas-place"
"""Name of the place among the tracker's states."""


class DeviceGenerator:
    """What Megatron's tracker switches: the device's default generator. Implements ``random_streams.Generator``."""

    def get_state(self) -> torch.Tensor:
        """A copy."""
        return torch.cuda.get_rng_state()

    def set_state(self, state: torch.Tensor) -> None:
        """Go on from there."""
        megatron_random._set_cuda_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        """Begin anew."""
        torch.cuda.manual_seed(seed)


def make_streams(args: Any) -> RandomStreams | None:
    """As Megatron's arguments say. They say from now on what the streams' seed is, and checkpoints have them."""
    if args.elastic_rng == "megatron":
        return None
    args.elastic_streams_seed = int(args.seed)
    return RandomStreams(args.elastic_streams_seed, int(args.num_layers), DeviceGenerator())


def _drawing() -> RandomStreams | None:
    """The streams, if a pass is under way."""
    streams = find_streams()
    return streams if streams is not None and streams.place is not None else None


def wrap_checkpoint_args(original: Any) -> Any:
    """What looks at the arguments of a checkpoint that is loaded: its streams go on, whatever ``--seed`` says now."""

    @functools.wraps(original)
    def check_checkpoint_args(checkpoint_args: Any, skip_args: Any = None) -> None:
        from megatron.training import get_args
        from megatron.training.utils import print_rank_0

        original(checkpoint_args, skip_args)
        streams, args = find_streams(), get_args()
        if streams is None:
            return
        seed = getattr(checkpoint_args, "elastic_streams_seed", None)
        if seed is None:
            print_rank_0(
                f"megatron_elas: the checkpoint has no resharded random streams: those of --seed {streams.seed} begin"
            )
        elif seed != streams.seed:
            print_rank_0(
                f"megatron_elas: the random streams of the checkpoint go on, of seed {seed}, not {streams.seed}"
            )
            streams.seed = args.elastic_streams_seed = int(seed)

    return check_checkpoint_args


def wrap_dropout(original: Any) -> Any:
    """``torch.nn.functional.dropout`` with the masks of the samples."""

    @functools.wraps(original)
    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        streams = _drawing()
        if streams is None or not training or not 0 < p <= 1:
            return original(input, p, training, inplace)
        dropped = streams.dropout(input, p)
        return input.copy_(dropped) if inplace else dropped

    return dropout


def wrap_fused_dropout(original: Any) -> Any:
    """The compiled sum of bias, dropout and residual: what is compiled asks nobody for its mask."""
    from megatron.core.fusions import fused_bias_dropout

    def bias_dropout_add_fused_train(x_with_bias: Any, residual: Any, prob: float) -> Any:
        if _drawing() is None:
            return original(x_with_bias, residual, prob)
        return fused_bias_dropout._bias_dropout_add_func(x_with_bias, residual, prob, True)

    return bias_dropout_add_fused_train


def wrap_layer_call(original: Any) -> Any:
    """A transformer layer's pass, whose draws count for it."""

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        streams = _drawing()
        if streams is None:
            return original(self, *args, **kwargs)
        with streams.layer(self.layer_number):
            return original(self, *args, **kwargs)

    return __call__


def wrap_fork(original: Any) -> Any:
    """The inside of Megatron's tracker, where lanes draw differently (but for its data-parallel stream)."""

    @functools.wraps(original)
    @contextlib.contextmanager
    def fork(self: Any, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        streams = _drawing()
        if streams is None or name not in self.states_:
            with original(self, name):
                yield
            return
        alike = name == megatron_random.get_data_parallel_rng_tracker_name()
        with streams.fork(None if alike else parallel_state.get_tensor_model_parallel_rank()):
            yield

    return fork


def wrap_get_states(original: Any) -> Any:
    """The tracker's states, with the place of the pass under way."""

    @functools.wraps(original)
    def get_states(self: Any) -> Any:
        states = original(self)
        streams = _drawing()
        return states if streams is None else {**states, PLACE: streams.place}

    return get_states


def wrap_set_states(original: Any) -> Any:
    """The tracker comes back to states, and the pass to its place."""

    @functools.wraps(original)
    def set_states(self: Any, states: Any) -> None:
        streams = find_streams()
        if streams is not None:
            # Where a pass is under way it is not a recomputation that comes back, but whoever let nothing be drawn.
            streams.restore(states.get(PLACE), recomputing=streams.place is None or streams.recomputing)
        original(self, {name: state for name, state in states.items() if name != PLACE})

    return set_states


def wrap_torch_checkpoint(original: Any) -> Any:
    """Recomputation of torch itself, which knows nothing of Megatron's tracker."""

    @functools.wraps(original)
    def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
        streams = _drawing()
        if streams is None:
            return original(function, *args, **kwargs)
        place = streams.place

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if streams.place is not None:
                return function(*args, **kwargs)
            with streams.at(place):
                return function(*args, **kwargs)

        return original(run, *args, **kwargs)

    return checkpoint
