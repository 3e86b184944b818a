"""What a step is planned for: who is left, what the layers cost, where they are now."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import accumulate

from megatron_elas.planner.cost_model import estimate_job
from megatron_elas.spec.cluster import Cluster, Link
from megatron_elas.spec.cost import JobCost
from megatron_elas.spec.device import ClockRange, PowerCurve
from megatron_elas.spec.errors import BadUsage, NoFeasiblePlan
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.job_profile import JobProfile

Rows = tuple[tuple[int, ...], ...]
"""Of every stage: the rows of its cells, ascending."""

SPARE = -1
"""In place of a stage: where cells are that can be made of spare workers. Their rows count from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that a plan follows from. Cells are named by their stage here and their row."""

    job: JobSpec
    cost: JobCost
    cuts: tuple[int, ...]
    """Stage ``s`` has layers ``[cuts[s], cuts[s + 1])`` now."""
    rows: Rows
    """Of the cells that are left. Within a stage all differ; a stage without any is lost."""
    memory_bytes: int
    """Of a device, as far as a plan may fill it."""
    link: Link
    """Between cells of different stages, and between the cells of a stage."""
    clock: ClockRange | None = None
    """None: clocks cannot be set."""
    power: PowerCurve | None = None
    """None: energy is not known."""
    held: Rows | None = None
    """Of the cells that each stage's optimizer state is spread over, lost ones included; None: those that are left."""
    spares: int = 0
    """Cells that can be made of workers without a seat."""

    def __post_init__(self) -> None:
        if len(self.cuts) != len(self.rows) + 1 or (self.cuts[0], self.cuts[-1]) != (0, self.cost.num_layers):
            raise BadUsage(
                f"boundaries {list(self.cuts)} do not deal {self.cost.num_layers} layers to {len(self.rows)} stages"
            )
        for stage, rows in enumerate(self.rows):
            if len(set(rows)) < len(rows):
                raise BadUsage(f"stage {stage} has two cells of one row: {list(rows)}")
        if not self.num_cells:
            raise NoFeasiblePlan("no cell is left: restart on more workers from the newest checkpoint with --load")

    @staticmethod
    def of(job: JobProfile, cluster: Cluster, lost: Collection[tuple[int, int]] = ()) -> Situation:
        """A job of a profile on a cluster, after cells (stage, row) were lost. Raises NoFeasiblePlan."""
        spec, device = job.spec, cluster.device
        return Situation(
            job=spec,
            cost=estimate_job(job, cluster),
            cuts=tuple(accumulate(job.shape.layers, initial=0)),
            rows=((tuple(range(spec.data_parallel)),) * spec.pipeline_parallel),
            memory_bytes=device.usable_bytes,
            link=cluster.between,
            clock=device.clock,
            power=device.power,
        ).without(lost)

    def without(self, lost: Collection[tuple[int, int]]) -> Situation:
        """After cells (stage, row) were lost. Raises NoFeasiblePlan when none is left."""
        gone = set(lost)
        return replace(
            self,
            held=self.held or self.rows,
            rows=tuple(tuple(row for row in rows if (stage, row) not in gone) for stage, rows in enumerate(self.rows)),
        )

    @property
    def num_stages(self) -> int:
        """Pipeline depth now."""
        return len(self.rows)

    @property
    def num_cells(self) -> int:
        """That are left, with those that can be made of spare workers."""
        return sum(map(len, self.rows)) + self.spares

    @property
    def lost_stages(self) -> tuple[int, ...]:
        """Stages without a cell."""
        return tuple(stage for stage, rows in enumerate(self.rows) if not rows)

    def describe_cells(self) -> str:
        """For sentences: cells of every stage, and spare ones."""
        spares = f" and {self.spares} spare" if self.spares else ""
        return f"{list(map(len, self.rows))}{spares} cells"

    @property
    def surviving_share(self) -> float:
        """Of the cells that the job began with."""
        return self.num_cells / (self.job.pipeline_parallel * self.job.data_parallel)

    @property
    def batch_samples(self) -> int:
        """In a global batch."""
        return self.job.num_microbatches * self.job.micro_batch_size

    def home(self, layer: int) -> int:
        """The stage that has a layer now."""
        return next(stage for stage in range(self.num_stages) if layer < self.cuts[stage + 1])


def divided(job: JobSpec, size: int) -> JobSpec:
    """The same batch in micro-batches of fewer samples each. ``size`` divides the micro-batch size."""
    if job.micro_batch_size % size:
        raise BadUsage(f"micro-batches of {job.micro_batch_size} samples cannot be cut into parts of {size}")
    parts = job.micro_batch_size // size
    return replace(job, micro_batch_size=size, num_microbatches=job.num_microbatches * parts)
