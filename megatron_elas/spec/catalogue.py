"""What the whole model consists of, so that anybody's shard under any plan can be told without asking.

A model is a row of units: the embedding, its transformer layers, the head (final norm and output layer). A stage holds
units that follow one another. The workers gather what they hold once, before the first step; from then on who owns
what is a function of catalogue and plan, also for stages that nobody is left of.

Names are global: layers are numbered from 0 over the whole model, whichever stage they are on. Workers of one stage
and different lanes hold equally many elements of every parameter, under the same names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from megatron_elas.spec.buckets import layer_buckets, owned_range
from megatron_elas.spec.errors import StateInvalid
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.shards import Piece, ShardLayout

EMBEDDING = 0
"""Number of the unit; layer ``i`` (from 0) is unit ``i + 1``, the head comes after the last layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a unit, as one lane holds it."""

    name: str
    """Global, for example ``decoder.layers.7.mlp.linear_fc1.weight``."""
    count: int
    """Elements in one lane."""
    dtype: str = "float32"
    """In the model. Parameters of one type share a buffer."""
    group: int = 0
    """Index of its optimizer parameter group."""
    tied: bool = False
    """One of the two copies of a tied embedding that a model of several stages has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContents:
    """What one stage holds: said by each of its workers at launch."""

    stage: int
    units: Mapping[int, tuple[Parameter, ...]]
    """By number of the unit, parameters in the order of the model."""

    def to_json(self) -> str:
        """As text that ``from_json`` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> StageContents:
        """What ``to_json`` wrote."""
        read: dict[str, Any] = json.loads(text)
        units = {int(unit): tuple(Parameter(**entry) for entry in entries) for unit, entries in read["units"].items()}
        return StageContents(stage=read["stage"], units=units)


@dataclass(frozen=True, slots=True)
class _Laid:
    """A parameter as the bucket layout sees it; compared by identity."""

    parameter: Parameter = field(compare=False)
    elas_layer: int | None
    shared_embedding: bool
    number: int

    def numel(self) -> int:
        return self.parameter.count


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """The units of the model, from the embedding to the head."""

    units: tuple[tuple[Parameter, ...], ...]
    _layouts: dict[tuple[object, ...], ShardLayout] = field(default_factory=dict, compare=False, repr=False)
    """Made so far."""

    @staticmethod
    def gathered(contents: Sequence[StageContents]) -> Catalogue:
        """Put together from what all workers hold at launch.

        Raises:
            StateInvalid: Two workers say different things of one unit, or a unit is missing.
        """
        units: dict[int, tuple[Parameter, ...]] = {}
        for said in contents:
            for unit, parameters in said.units.items():
                if units.setdefault(unit, parameters) != parameters:
                    raise StateInvalid(
                        f"workers of stage {said.stage} disagree on the parameters of {describe_unit(unit)}: the "
                        f"lanes of a cell must hold shards of equal size"
                    )
        missing = [unit for unit in range(max(units, default=0)) if unit not in units]
        if missing or len(units) < 2:
            raise StateInvalid(
                f"no worker holds {', '.join(map(describe_unit, missing)) or 'any layer'}: the model is not whole"
            )
        return Catalogue(units=tuple(units[unit] for unit in sorted(units)))

    @property
    def num_layers(self) -> int:
        """Transformer layers of the model."""
        return len(self.units) - 2

    @cached_property
    def twins(self) -> dict[str, str]:
        """Of each of the two copies of a tied embedding, the other. Weights and moments of both are equal, bit for bit.

        Empty when nothing is tied, or the job was launched with one stage: then there is one copy.
        """
        tied = [parameter.name for unit in self.units for parameter in unit if parameter.tied]
        return dict(zip(tied, reversed(tied), strict=True)) if len(tied) == 2 else {}

    def parameters(self, plan: ElasticPlan, stage: int) -> tuple[Parameter, ...]:
        """What a worker of the stage holds, in the order of the model."""
        return tuple(laid.parameter for laid in self._held(stage, plan.placement.num_stages, plan.layers[stage]))

    def total_count(self, plan: ElasticPlan, stage: int) -> int:
        """Elements of one lane of the stage."""
        return sum(parameter.count for parameter in self.parameters(plan, stage))

    def layout(self, plan: ElasticPlan, worker: int) -> ShardLayout:
        """The optimizer shard that a seated worker owns under the plan: what DistributedOptimizer makes of it."""
        seat = plan.placement.seat(worker)
        cells = len(plan.placement.stages[seat.stage])
        key = (seat.stage, plan.placement.num_stages, plan.layers[seat.stage], seat.cell, cells)
        if key not in self._layouts:
            self._layouts[key] = _cut(list(self._held(*key[:3])), seat.cell, cells)
        return self._layouts[key]

    def layouts(self, plan: ElasticPlan, lane: int) -> dict[int, ShardLayout]:
        """Of every seated worker of the lane, over all stages."""
        return {
            cell.workers[lane]: self.layout(plan, cell.workers[lane])
            for cells in plan.placement.stages
            for cell in cells
        }

    def _held(self, stage: int, stages: int, layers: tuple[int, int]) -> Iterator[_Laid]:
        first = EMBEDDING if stage == 0 else layers[0] + 1
        last = len(self.units) if stage == stages - 1 else layers[1] + 1
        number = 0
        for unit in range(first, last):
            layer = unit if EMBEDDING < unit <= self.num_layers else None
            for parameter in self.units[unit]:
                if parameter.tied and stages == 1 and unit != EMBEDDING:
                    continue  # the embedding is used in its place
                number += 1
                yield _Laid(parameter, layer, parameter.tied and stages > 1, number)


def _cut(held: Sequence[_Laid], cell: int, cells: int) -> ShardLayout:
    """Follows DistributedOptimizer: buffers by type, of which every bucket is cut into equal ranges, one per cell."""
    buffers: dict[str, list[_Laid]] = {}
    for laid in held:
        buffers.setdefault(laid.parameter.dtype, []).append(laid)
    pieces = []
    for members in buffers.values():
        layout = layer_buckets(members, cells)
        for laid in reversed(members):  # as they lie in the buffer
            start, end, bucket = layout.index[laid]
            low, high = (layout.buckets[bucket][0] + edge for edge in owned_range(cell, cells, layout.unpadded[bucket]))
            first, last = max(start, low), min(end, high)
            if first < last:
                pieces.append(Piece(name=laid.parameter.name, start=first - start, stop=last - start))
    return ShardLayout(pieces=tuple(pieces))


def describe_unit(unit: int) -> str:
    """For people."""
    return "the embedding" if unit == EMBEDDING else f"layer {unit - 1}"
