"""The interleaved ZeRO layout in Megatron's terms."""

from __future__ import annotations

from typing import Any

from megatron_elas.spec.buckets import layer_buckets


def layer_layout(
    params: Any, bucket_size: Any, data_parallel_world_size: int, ddp_config: Any, param_indices: Any = None
) -> Any:
    """Takes the place of Megatron's bucket layout: a layer is a bucket."""
    from megatron.core.optimizer.param_layout import PerBufferParamLayout

    layout = layer_buckets(params, data_parallel_world_size)
    # Megatron makes buckets as parameters name them and takes the end of the last range as the size of the buffer:
    # the extra range makes room, and no bucket.
    room = (layout.buckets[-1][1], layout.numel)
    return PerBufferParamLayout(
        param_index_map=layout.index,
        bucket_indices=[*layout.buckets, room],
        per_bucket_numel_unpadded=layout.unpadded,
        param_indices=param_indices if param_indices is not None else [],
        num_optimizer_shards=data_parallel_world_size,
    )
