"""Audits of a small made-up job, written as its workers would write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch

from megatron_elas.host.audit import Audit
from megatron_elas.runtime.random_streams import Draw
from megatron_elas.spec.audit import GRADIENTS, KINDS, STATES
from megatron_elas.spec.layout import Cell, Placement
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.shards import Piece

COUNTS = {
    "embedding.word_embeddings.weight": 3000,
    "decoder.layers.0.mlp.weight": 5000,
    "decoder.layers.1.mlp.weight": 5000,
    "output_layer.weight": 3000,
}
"""Elements by parameter."""
LAYERS = 2
BATCH = 4
Grid = tuple[tuple[tuple[int, ...], ...], ...]
"""Workers by stage, cell and lane."""
TWO_BY_TWO: Grid = (((0,), (1,)), ((2,), (3,)))
WITHOUT_THREE: Grid = (((0,), (1,)), ((2,),))
ONE_STAGE: Grid = (((0,), (2,), (1,)),)


@dataclass(kw_only=True)
class AuditedJob:
    """Writes lines into ``folder``."""

    folder: Path
    lanes: int = 1
    tied: bool = False
    every: int = 1
    run: str = "job"
    kinds: Sequence[str] = KINDS
    level: str = ""
    dropout: bool = True
    planted: dict[tuple[int, str, str, int], float] = field(default_factory=dict)
    """What is added to an element: by step, kind, name and its index."""
    flipped: set[tuple[int, int, int]] = field(default_factory=set)
    """Masks of which an element is flipped: (step, sample, layer)."""
    data: Mapping[int, int] = field(default_factory=dict)
    """Samples that are read in the place of others."""
    losses: Mapping[int, float] = field(default_factory=dict)
    """What is added to the loss of a step."""
    audits: dict[int, Audit] = field(default_factory=dict)

    def run_steps(
        self, steps: Sequence[int], grid: Grid = TWO_BY_TWO, epoch: int = 0, absent: Sequence[int] = ()
    ) -> None:
        """All workers of the grid but the absent tell of these steps."""
        plan = make_plan(grid, epoch)
        for step in steps:
            for worker in plan.placement.workers:
                if worker not in absent:
                    self._tell(plan, worker, step)

    def end(self, step: int, grid: Grid = TWO_BY_TWO, epoch: int = 0) -> None:
        """Training ends before the step."""
        plan = make_plan(grid, epoch)
        for worker in plan.placement.workers:
            self._audit(worker).write_end(plan, step, self._shard(plan, worker, step), self._tied(plan, worker))
        for audit in self.audits.values():
            audit.close()

    def _audit(self, worker: int) -> Audit:
        self.folder.mkdir(exist_ok=True)
        return self.audits.setdefault(worker, Audit(self.folder, worker, self.every, self.run, self.kinds, self.level))

    def _tell(self, plan: ElasticPlan, worker: int, step: int) -> None:
        audit, seat = self._audit(worker), plan.placement.seat(worker)
        cells = len(plan.placement.stages[seat.stage])
        mine = [BATCH * step + sample for sample in range(BATCH) if sample % cells == seat.cell]
        audit.begin_step(step)
        if seat.lane == 0 and seat.stage in (0, plan.placement.num_stages - 1):
            for sample in mine:
                read = self.data.get(sample, sample)
                audit.observe_batch([sample], {"tokens": torch.full((1, 8), read), "mask": torch.ones(1, 1, 8, 8)})
        for layer in range(plan.layers[seat.stage][0] + 1, plan.layers[seat.stage][1] + 1):
            for sample in mine if self.dropout else ():
                mask = _random("mask", step, sample, layer, seat.lane, count=64) > 0
                mask[5] ^= (step, sample, layer) in self.flipped
                for recomputing in (False, True):
                    draw = Draw(step, sample, layer, 0, seat.lane)
                    audit.observe_mask(draw, mask.view(8, 8), recomputing)
        losses = {"lm loss": torch.tensor(5.0 - step / 64 + self.losses.get(step, 0.0))}
        audit.write(plan, step, self._shard(plan, worker, step), losses, self._tied(plan, worker))

    def _tied(self, plan: ElasticPlan, worker: int) -> list[str]:
        is_last = plan.placement.seat(worker).stage == plan.placement.num_stages - 1
        return ["output_layer.weight"] if self.tied and is_last and plan.placement.num_stages > 1 else []

    def _shard(self, plan: ElasticPlan, worker: int, step: int) -> list[tuple[Piece, int, dict[str, torch.Tensor]]]:
        seat = plan.placement.seat(worker)
        cells, last = len(plan.placement.stages[seat.stage]), plan.placement.num_stages - 1
        start, stop = plan.layers[seat.stage]
        names = [f"decoder.layers.{layer}.mlp.weight" for layer in range(start, stop)]
        names += ["embedding.word_embeddings.weight"] if seat.stage == 0 else []
        names += ["output_layer.weight"] if seat.stage == last and not (self.tied and last == 0) else []
        shard = []
        for name in names:
            count = COUNTS[name]
            low, high = (count * edge // cells for edge in (seat.cell, seat.cell + 1))
            values = {}
            for kind in (*STATES, GRADIENTS):
                same = "embedding.word_embeddings.weight" if self.tied and name == "output_layer.weight" else name
                whole = _random(kind, step, same, seat.lane, count=count)
                for (at, what, where, index), change in self.planted.items():
                    if (at, what, where) == (step, kind, name):
                        whole[index] += change
                values[kind] = whole[low:high]
            shard.append((Piece(name=name, start=low, stop=high), count, values))
        return shard


def make_plan(grid: Grid, epoch: int) -> ElasticPlan:
    """With the layers cut evenly."""
    stages = len(grid)
    edges = [LAYERS * stage // stages for stage in range(stages + 1)]
    return ElasticPlan(
        epoch=epoch,
        placement=Placement(
            stages=tuple(tuple(Cell(row=row, workers=workers) for row, workers in enumerate(cells)) for cells in grid)
        ),
        layers=tuple(pairwise(edges)),
        items=(),
        backups=(),
    )


def _random(*key: object, count: int) -> torch.Tensor:
    seed = sum(ord(letter) * 31**place for place, letter in enumerate(repr(key))) % (1 << 60)
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))
