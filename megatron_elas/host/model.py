"""Megatron's DistributedDataParallel, fitted to another number of replicas without being rebuilt.

Its buffers hold the whole stage, so only what says "how many replicas and which am I" is rewritten:
under 0.1 ms, no parameter moves, and nothing that holds a reference to the model notices.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from megatron_elas.spec.buckets import LAYER_ATTRIBUTE, bucket_size

_WRAPPERS = re.compile(r"^(module\.)+")
_LAYER = re.compile(r"^decoder\.layers\.\d+\.")


def buffers_of(model: Sequence[Any]) -> Iterator[Any]:
    """Every parameter-and-gradient buffer of the model chunks."""
    for ddp in model:
        yield from ddp.buffers
        yield from ddp.expert_parallel_buffers


def bucket_groups_of(model: Sequence[Any]) -> Iterator[Any]:
    """Every bucket group of the model chunks."""
    for ddp in model:
        yield from ddp.bucket_groups
        yield from ddp.expert_parallel_bucket_groups


def sum_gradients(model: Sequence[Any]) -> None:
    """Make gradient reduction a plain sum; the weights are in the losses (see host.schedule)."""
    for buffer in buffers_of(model):
        buffer.gradient_scaling_factor = 1.0
        for bucket in buffer.buckets:
            bucket.gradient_scaling_factor = 1.0


def fit_buffers(model: Sequence[Any]) -> None:
    """Bring buffers and bucket groups in line with the size and rank of their edited groups."""
    for buffer in buffers_of(model):
        replicas = buffer.data_parallel_group.size()
        for bucket in buffer.buckets:
            span = slice(bucket.offset, bucket.offset + bucket_size(bucket.numel_unpadded, replicas))
            bucket.grad_data = buffer.grad_data[span]
            bucket.param_data = buffer.param_data[span]
        buffer.data_parallel_world_size = replicas
        if buffer.num_optimizer_shards is not None:
            buffer.num_optimizer_shards = replicas
    for ddp in model:
        if ddp.full_param_layout is not None:
            for layout in ddp.full_param_layout.layouts.values():
                layout.num_optimizer_shards = ddp.intra_dp_cp_group.size()
    for bucket_group in bucket_groups_of(model):
        group = bucket_group.intra_distributed_optimizer_instance_group
        bucket_group.intra_distributed_optimizer_instance_size = group.size()
        bucket_group.intra_distributed_optimizer_instance_rank = group.rank()
        bucket_group.cached_param_buffer_shard_list = [None] * len(bucket_group.buckets)
        bucket_group.cached_grad_buffer_shard_list = [None] * len(bucket_group.buckets)


def clear_communication(model: Sequence[Any]) -> None:
    """Forget handles and counts that a cancelled step left in the bucket groups; later asserts trip over them."""
    for bucket_group in bucket_groups_of(model):
        bucket_group.grad_reduce_handle = None
        bucket_group.grad_reduce_finished = False
        bucket_group.param_gather_handle = None
        bucket_group.param_gather_dispatched = False
        bucket_group.is_last_microbatch = True
        bucket_group.per_param_grad_ready_counts = {}


def gather_parameters(model: Sequence[Any], names: Collection[str]) -> None:
    """All-gather the buckets in which parameters of these global names are, and wait for them."""
    wanted = {param for name, param in named_parameters(model) if name in names}
    for ddp in model:
        for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups):
            if any(param in wanted for bucket in group.buckets for param in bucket.params_list):
                ddp._start_bucket_group_param_sync(group, force_sync=True)


def named_parameters(model: Sequence[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters by global name: layers are numbered from 0 over the whole model, and wrappers leave no trace.

    Chunks are told apart by a prefix when there are several.
    """
    for number, ddp in enumerate(model):
        prefix = f"chunk{number}." if len(model) > 1 else ""
        for name, param in ddp.module.named_parameters():
            if param.requires_grad:
                yield prefix + global_name(name, getattr(param, LAYER_ATTRIBUTE, None)), param


def global_name(name: str, layer: int | None) -> str:
    """The name of a parameter, whichever stage it is on.

    Args:
        name: In its stage's model, wrappers included.
        layer: Megatron's number of its layer, from 1; None for what is in no layer.
    """
    name = _WRAPPERS.sub("", name)
    return name if layer is None else _LAYER.sub(f"decoder.layers.{layer - 1}.", name)
