"""What a step is planned for: who is left, what the layers cost, where they are now."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that a plan follows from. Cells are named by their stage here and their row."""

    job: JobSpec
    cost: JobCost
    cuts: tuple[int, ...]
    """Stage ``s`` has layers ``[cuts[s], cuts[s + 1])`` now."""
    rows: Rows
    """Of the cells that are left. Within a stage all differ."""
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

    def __post_init__(self) -> None:
        if len(self.cuts) != len(self.rows) + 1 or (self.cuts[0], self.cuts[-1]) != (0, self.cost.num_layers):
            raise BadUsage(
                f"boundaries {list(self.cuts)} do not deal {self.cost.num_layers} layers to {len(self.rows)} stages"
            )
        for stage, rows in enumerate(self.rows):
            if len(set(rows)) < len(rows):
                raise BadUsage(f"stage {stage} has two cells of one row: {list(rows)}")
            if not rows:
                raise NoFeasiblePlan(
                    f"stage {stage} lost all its cells: its layers have no live holder. Restart from the newest "
                    f"checkpoint with --load, or run with more data-parallel rows"
                )

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
        """After cells (stage, row) were lost. Raises NoFeasiblePlan when a stage has none left."""
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
        """That are left."""
        return sum(map(len, self.rows))

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


def homes_of(situation: Situation, origins: Sequence[int]) -> tuple[int, ...]:
    """Of every layer: the new stage whose cells have it now, -1 for none.

    Args:
        situation: Before.
        origins: Of every new stage: the stage that most of its cells come from.
    """
    new = {old: stage for stage, old in enumerate(origins)}
    return tuple(
        new.get(stage, -1)
        for stage in range(situation.num_stages)
        for _ in range(situation.cuts[stage], situation.cuts[stage + 1])
    )
