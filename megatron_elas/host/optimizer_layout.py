"""Wrappers around how Megatron lays optimizer state out, builds the optimizer and saves it."""

from __future__ import annotations

import functools
from typing import Any

from megatron_elas.host.attachment import attachment
from megatron_elas.host.optimizer import OptimizerFactory
from megatron_elas.spec.buckets import LAYER_ATTRIBUTE, compact_index


def wrap_optimizer_part(original: Any) -> Any:
    """The builder of one optimizer of the chain, remembered."""

    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> Any:
        attached = attachment()
        if attached.factory is None:
            attached.factory = OptimizerFactory(original)
        return attached.factory.record(*args, **kwargs)

    return build


def wrap_layer_init(original: Any) -> Any:
    """A layer that marks its parameters with its number."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for param in self.parameters():
            setattr(param, LAYER_ATTRIBUTE, self.layer_number)

    return __init__


def wrap_reshardable_state(original: Any) -> Any:
    """The fully reshardable state, cut at the right offsets."""

    @functools.wraps(original)
    def sharded_param_state_fully_reshardable(self: Any, *args: Any, **kwargs: Any) -> Any:
        laid_out = [buffer.param_index_map for buffer in self.buffers]
        for buffer in self.buffers:
            starts = [bucket.offset for bucket in buffer.buckets]
            unpadded = [bucket.numel_unpadded for bucket in buffer.buckets]
            buffer.param_index_map = compact_index(buffer.param_index_map, starts, unpadded)
        try:
            return original(self, *args, **kwargs)
        finally:
            for buffer, index in zip(self.buffers, laid_out, strict=True):
                buffer.param_index_map = index

    return sharded_param_state_fully_reshardable
