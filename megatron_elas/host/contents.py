"""What a stage of Megatron's model consists of, unit by unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_elas.host.model import named_parameters
from megatron_elas.spec.buckets import LAYER_ATTRIBUTE
from megatron_elas.spec.catalogue import EMBEDDING, Parameter, StageContents


def describe_parameters(model: Sequence[Any], groups: Mapping[Any, int], stage: int, num_layers: int) -> StageContents:
    """The stage's part of the catalogue.

    Args:
        model: Chunks, wrapped in DDP.
        groups: Of every parameter, the index of its optimizer group.
        stage: The worker's.
        num_layers: Of the whole model.
    """
    units: dict[int, list[Parameter]] = {}
    for name, param in named_parameters(model):
        layer = getattr(param, LAYER_ATTRIBUTE, None)
        unit = layer if layer is not None else EMBEDDING if name.startswith("embedding.") else num_layers + 1
        units.setdefault(unit, []).append(
            Parameter(
                name=name,
                count=param.numel(),
                dtype=str(param.dtype).removeprefix("torch."),
                group=groups[param],
                tied=bool(getattr(param, "shared_embedding", False)),
            )
        )
    return StageContents(stage=stage, units={unit: tuple(entries) for unit, entries in units.items()})
