"""Layers exchanged inside a model and its DDP object, when all else of a worker's part stays.

What DDP's constructor does for all parameters is done for those that come; the ones that stay keep their hooks. Buffers
are cut anew, since layers lie in them one after the other. Where the setting is not one of those below, the model is
made anew as a whole (host.restage).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed.param_and_grad_buffer import BufferType, partition_buckets
from megatron.core.optimizer.param_layout import FullParamLayout
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes

from megatron_elas.host.bucket_layout import layer_layout
from megatron_elas.host.layer_modules import block_of


def can_exchange(model: Sequence[Any]) -> bool:
    """Whether this model's layers can be exchanged: one chunk, one buffer, nothing that knows parameters beside it."""
    if len(model) != 1 or len(model[0].buffers) != 1 or model[0].expert_parallel_buffers or block_of(model[0]) is None:
        return False
    (ddp,), (buffer,) = model, model[0].buffers
    settings = ddp.ddp_config
    return (
        settings.use_distributed_optimizer
        and settings.num_distributed_optimizer_instances == 1
        and not settings.nccl_ub
        and not settings.param_name_patterns_for_fp32_local_accumulation
        and not settings.reduce_scatter_with_fp32_accumulation
        and not settings.delay_wgrad_compute
        and not ddp.overlap_param_gather_with_optimizer_step
        and not buffer.has_nvfp4_params
    )


def exchange_layers(ddp: Any, layers: Mapping[int, torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Have the model consist of these layers.

    Args:
        ddp: One for which ``can_exchange`` is true.
        layers: By number, from 1, all that the stage has from now on; its own where they stay.

    Returns:
        The parameters that came, under the names that they have in the model now.
    """
    block = block_of(ddp)
    before = {layer.layer_number: layer for layer in block.layers}
    going = [layer for number, layer in before.items() if layers.get(number) is not layer]
    coming = [layer for number, layer in layers.items() if before.get(number) is not layer]
    unhooked = ddp.use_forward_hook and not ddp.remove_forward_pre_hook_handles
    grad_accs = dict(zip(ddp.params_with_grad, ddp.grad_accs, strict=True))
    for module in _modules(going):
        if module in ddp.remove_forward_pre_hook_handles:
            ddp.remove_forward_pre_hook_handles.pop(module).remove()
    for layer in coming:
        _make_ready(layer, ddp.config, block.training)
    ordered = [layers[number] for number in sorted(layers)]
    block.layers._modules.clear()
    block.layers.extend(ordered)
    block.num_layers_per_pipeline_rank = len(ordered)
    block.submodules = dataclasses.replace(
        block.submodules, layer_specs=[block.submodules.layer_specs[0]] * len(ordered)
    )
    named = {name: param for name, param in ddp.module.named_parameters() if param.requires_grad}
    params = list(named.values())
    _cut_anew(ddp, params)
    for param in params:
        param.grad_added_to_main_grad = False
        if param not in grad_accs:
            grad_accs[param] = param.expand_as(param).grad_fn.next_functions[0][0]
            grad_accs[param].register_hook(ddp._make_backward_post_hook(param))
    ddp.params_with_grad = params
    ddp.grad_accs = [grad_accs[param] for param in params]
    if ddp.use_forward_hook and not unhooked:
        for module in _modules(coming):
            ddp.remove_forward_pre_hook_handles[module] = module.register_forward_pre_hook(ddp._make_forward_pre_hook())
    arrived = {param for layer in coming for param in layer.parameters()}
    return {name: param for name, param in named.items() if param in arrived}


def _make_ready(layer: torch.nn.Module, config: Any, training: bool) -> None:
    """What Megatron does to a model before it is wrapped in DDP."""
    for param in layer.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    if not config.use_cpu_initialization:
        layer.cuda(torch.cuda.current_device())
    if config.fp16:
        layer.half()
    elif config.bf16:
        layer.bfloat16()
    layer.train(training)


def _cut_anew(ddp: Any, params: list[torch.nn.Parameter]) -> None:
    """New buffers, with the values of the parameters, and buckets of them. The old gradients are let go before."""
    (buffer,) = ddp.buffers
    (key,) = ddp.full_param_layout.layouts
    assert all(param.dtype == buffer.param_dtype for param in params), "a layer of another type came"
    for param in buffer.params:
        del param.main_grad
    buffer.buckets, buffer.param_to_bucket, buffer.grad_data = [], {}, None
    ddp.bucket_groups, ddp.param_to_bucket_group = [], {}
    replicas = buffer.data_parallel_group.size()
    layout = layer_layout(params, None, replicas, ddp.ddp_config, list(range(len(params))))
    ddp.full_param_layout = FullParamLayout(layouts={key: layout})
    buffer.params = params
    buffer.param_indices = layout.param_indices
    buffer.param_index_map = layout.param_index_map
    buffer.bucket_indices = layout.bucket_indices
    buffer.num_optimizer_shards = layout.num_optimizer_shards
    buffer.data_parallel_world_size = replicas
    buffer.numel = layout.bucket_indices[-1][1]
    buffer.numel_unpadded = sum(layout.per_bucket_numel_unpadded)
    buffer.param_data = torch.zeros(buffer.numel, dtype=buffer.param_dtype, device=buffer.param_data.device)
    buffer.grad_data = torch.zeros(buffer.numel, dtype=buffer.grad_dtype, device=buffer.param_data.device)
    _place(buffer, params)
    members: list[list[torch.nn.Parameter]] = [[] for _ in layout.per_bucket_numel_unpadded]
    for param in reversed(params):
        members[layout.param_index_map[param][2]].append(param)
    for number, inside in enumerate(members):
        start, stop = layout.bucket_indices[number]
        buffer.buckets.append(
            buffer._new_bucket(inside, start, stop, layout.per_bucket_numel_unpadded[number], number, [])
        )
    ddp.bucket_groups = groups = partition_buckets(ddp.buffers)
    if ddp.ddp_config.overlap_param_gather:
        for following, group in itertools.pairwise(groups):
            group.next_param_gather_bucket_group = following
    ddp.param_to_bucket_group = {
        param: group for group in groups for bucket in group.buckets for param in bucket.params_list
    }


@torch.no_grad()
def _place(buffer: Any, params: list[torch.nn.Parameter]) -> None:
    """Move the parameters into the buffer, with their values."""
    places = [
        buffer._get(param.shape, buffer.param_index_map[param][0], buffer_type=BufferType.PARAM) for param in params
    ]
    torch._foreach_copy_(places, [param.data for param in params])
    for param, place in zip(params, places, strict=True):
        param.data = place
        param.main_grad = buffer._get(param.shape, buffer.param_index_map[param][0], buffer_type=BufferType.GRAD)


def _modules(layers: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    for layer in layers:
        yield from layer.modules()
