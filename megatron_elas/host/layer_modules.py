"""Transformer layers that a model takes over when it is made anew: where Megatron would make layers, it gets those.

A layer's module knows its number in the whole model, its configuration and its groups, and none of these depends on the
stage that holds it. Its parameters are made anew over the same memory: gradient hooks, main gradients and masters
belong to the old ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.transformer import transformer_block, transformer_layer
from megatron.core.transformer.spec_utils import build_module, get_module
from megatron.core.utils import get_pg_rank

_SET_IN_USE = frozenset(
    ("main_grad", "main_grad_copy_in_grad_buffer", "grad_added_to_main_grad", "main_param", "main_param_sharded")
)
"""Attributes of parameters that DDP and optimizer set."""


def keeps_layers(model: Sequence[Any]) -> bool:
    """Whether layers that stay keep their parameters' values when others come and go."""
    return all(
        any(isinstance(child, transformer_block.TransformerBlock) for child in _unwrap(ddp).children()) for ddp in model
    ) and all(_are_movable(block) for block in _blocks(model))


def layers_of(model: Sequence[Any]) -> dict[int, torch.nn.Module]:
    """The layers by number, from 1; none if those of a block may be tied to their place."""
    blocks = list(_blocks(model))
    if not all(_are_movable(block) for block in blocks):
        return {}
    return {layer.layer_number: layer for block in blocks for layer in block.layers}


def make_layer(model: Sequence[Any], number: int) -> torch.nn.Module | None:
    """Layer ``number``, counted from 1, as the model's block would make it; None where layers are not all alike."""
    block = block_of(model[0])
    if block is None:
        return None
    made: torch.nn.Module = build_module(
        block.submodules.layer_specs[0],
        config=block.config,
        layer_number=number - _offset(block.config, block.pg_collection, block.vp_stage),
        pg_collection=block.pg_collection,
        vp_stage=block.vp_stage,
    )
    return made


def block_of(ddp: Any) -> Any | None:
    """The block of a chunk whose layers are all alike and can be on any stage; None where there is no such."""
    blocks = list(_blocks([ddp]))
    if len(blocks) != 1 or not _are_movable(blocks[0]):
        return None
    return blocks[0] if len({id(spec) for spec in blocks[0].submodules.layer_specs}) == 1 else None


def renew_parameters(layers: Iterable[torch.nn.Module]) -> None:
    """Give the layers new parameters over the memory of the old ones."""
    for layer in layers:
        renewed: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        for module in layer.modules():
            for name, old in module._parameters.items():
                if old is None:
                    continue
                if old not in renewed:
                    new = torch.nn.Parameter(old.data, requires_grad=old.requires_grad)
                    vars(new).update({key: value for key, value in vars(old).items() if key not in _SET_IN_USE})
                    renewed[old] = new
                module._parameters[name] = renewed[old]


@contextlib.contextmanager
def taken_over(layers: Mapping[int, torch.nn.Module]) -> Iterator[None]:
    """Inside, Megatron's blocks get these layers, by number, where they would make new ones."""
    original = transformer_block.build_module
    left = dict(layers)

    def build(spec: Any, *args: Any, **kwargs: Any) -> Any:
        if "layer_number" not in kwargs:
            return original(spec, *args, **kwargs)
        offset = _offset(kwargs["config"], kwargs["pg_collection"], kwargs["vp_stage"])
        layer = left.pop(kwargs["layer_number"] + offset, None)
        if layer is None or type(layer) is not get_module(spec):
            return original(spec, *args, **kwargs)
        return layer

    transformer_block.build_module = build
    try:
        yield
    finally:
        transformer_block.build_module = original


def values_outside_layers(model: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Those of embedding, final norm and head, by global name."""
    return {name: param.data for ddp in model for name, param in _outside_layers(ddp)}


def set_values(module: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Have the parameters of these names stand on the memory of the values, where they are alike."""
    for name, param in _outside_layers(module):
        value = values.get(name)
        if value is not None and value.shape == param.shape and value.dtype == param.dtype:
            param.data = value


def _outside_layers(module: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(global name, parameter) of all that is in no layer, without a walk through the layers."""
    inner = _unwrap(module)
    for name, child in inner.named_children():
        if not isinstance(child, transformer_block.TransformerBlock):
            yield from child.named_parameters(prefix=name)
            continue
        for part, beside in child.named_children():
            if beside is not child.layers:
                yield from beside.named_parameters(prefix=f"{name}.{part}")


def _offset(config: Any, pg_collection: Any, vp_stage: int | None) -> int:
    """Layers on the stages before, as Megatron counts them now."""
    offset: int = transformer_layer.get_transformer_layer_offset(config, vp_stage, get_pg_rank(pg_collection.pp))
    return offset


def _blocks(model: Sequence[Any]) -> Iterator[Any]:
    for ddp in model:
        children = _unwrap(ddp).children()
        yield from (child for child in children if isinstance(child, transformer_block.TransformerBlock))


def _unwrap(module: Any) -> Any:
    """What is inside of DDP and of the wrapper of 16-bit models."""
    while hasattr(module, "module"):
        module = module.module
    return module


def _are_movable(block: Any) -> bool:
    """Whether the block's layers depend on nothing but their number and configuration."""
    config = block.config
    return (
        config.fp8 is None
        and config.fp4 is None
        and not config.heterogeneous_block_specs
        and config.cuda_graph_impl == "none"
    )
