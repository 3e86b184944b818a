"""What the job is, fixed for its whole life and independent of who is alive."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from megatron_elas.spec.consistency import ConsistencyLevel
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.migration import MigrationMode


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """The original grid and batch. Every worker reports the same one when it joins."""

    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    micro_batch_size: int
    """Samples in one micro-batch."""
    num_microbatches: int
    """Micro-batches in one global batch, over all rows."""
    stage_layers: tuple[int, ...] = ()
    """Transformer layers of every stage at launch; empty: one each."""
    snapshot_replicas: int = 1
    """Workers that keep a copy of each optimizer shard; 0: a loss needs the checkpoint."""
    migration: MigrationMode = "off"
    """Whether, and how, layers move to other stages while the job runs."""
    split_backward: bool = False
    """Workers can run the two halves of a backward pass apart, and passes in any order: plans may have orders."""
    consistency: ConsistencyLevel = "numerical"
    """How closely the job follows the undisturbed one; at ``bitwise`` plans give cells whole micro-batches only."""
    fp16: bool = False
    """Gradients of a pass are fp16, and a step in which one overflows is left out: at ``numerical`` too, plans give
    cells whole micro-batches only."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "pipeline_parallel", "data_parallel", "micro_batch_size", "num_microbatches"):
            value = getattr(self, name)
            if value < 1:
                raise BadUsage(f"{name} must be at least 1, got {value}")
        layers = self.stage_layers
        if layers and (len(layers) != self.pipeline_parallel or min(layers) < 0 or not any(layers)):
            raise BadUsage(
                f"stage_layers must be {self.pipeline_parallel} numbers of layers, one per stage, got {list(layers)}"
            )
        if self.snapshot_replicas < 0:
            raise BadUsage(f"snapshot_replicas must be at least 0, got {self.snapshot_replicas}")
        if self.num_microbatches % self.data_parallel:
            raise BadUsage(
                f"{self.num_microbatches} micro-batches do not divide by {self.data_parallel} data-parallel rows: "
                f"choose a global batch that is a multiple of micro_batch_size * data_parallel = "
                f"{self.micro_batch_size * self.data_parallel}"
            )

    @property
    def most_passes(self) -> int:
        """Forward passes that one worker makes in a step at most, whatever the plan: an item has a sample at least."""
        return self.num_microbatches * (1 if self.keeps_micro_batches else self.micro_batch_size)

    @property
    def keeps_micro_batches(self) -> bool:
        """Plans neither cut nor join micro-batches: passes of other sizes round, and overflow, in another way."""
        return self.consistency == "bitwise" or (self.fp16 and self.consistency == "numerical")

    @property
    def summed_rows(self) -> int:
        """What gradients are divided by when they are summed, and not before, in the losses: with fp16 the rows, as in
        Megatron, so that gradients overflow at the same loss scale. A checkpoint may say otherwise.
        """
        return self.data_parallel if self.fp16 else 1

    @property
    def num_layers(self) -> int:
        """Transformer layers of the whole model."""
        return sum(self.stage_layers) or self.pipeline_parallel

    @property
    def launch_layers(self) -> tuple[tuple[int, int], ...]:
        """Layers ``[start, stop)`` of every stage at launch."""
        return tuple(pairwise(accumulate(self.stage_layers or (1,) * self.pipeline_parallel, initial=0)))

    @property
    def world_size(self) -> int:
        """Workers the job starts with."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel
