"""Who sits where: cells, stages, seats.

A placement is a value. Removing workers gives a new one; nothing here knows of processes.

Invariants: a worker has at most one seat; every cell has the same number of lanes; the order of
cells inside a stage is the order of their original rows. Global ranks follow seats, so the last rank is on the last
stage, wherever workers have moved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from megatron_elas.spec.job import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The TP group that holds one stage for some of the samples."""

    row: int
    """Original data-parallel index; fixed for the run."""
    workers: tuple[int, ...]
    """Worker ids by TP lane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A worker's place in one epoch."""

    stage: int
    cell: int
    """Index inside the stage, dense."""
    lane: int
    """TP rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Stages of cells, plus the living workers that have no seat."""

    stages: tuple[tuple[Cell, ...], ...]
    spares: tuple[int, ...] = ()

    @staticmethod
    def initial(job: JobSpec) -> Placement:
        """Megatron's own order, tp-cp-ep-dp-pp: worker = (stage * D + row) * T + lane.

        Example: T=1, P=2, D=2 gives stage 0 = workers 0, 1 and stage 1 = workers 2, 3.
        """
        tp, dp = job.tensor_parallel, job.data_parallel
        return Placement(
            stages=tuple(
                tuple(
                    Cell(row=row, workers=tuple((stage * dp + row) * tp + lane for lane in range(tp)))
                    for row in range(dp)
                )
                for stage in range(job.pipeline_parallel)
            )
        )

    @property
    def num_stages(self) -> int:
        """Pipeline depth."""
        return len(self.stages)

    @property
    def tensor_parallel(self) -> int:
        """Lanes per cell."""
        return len(self.stages[0][0].workers)

    @property
    def workers(self) -> tuple[int, ...]:
        """Workers with a seat in the order of their global ranks: by stage, cell and lane, Megatron's own order.

        Ascending as long as nobody has come to another stage.
        """
        return tuple(self._seated())

    def _seated(self) -> Iterator[int]:
        for stage in self.stages:
            for cell in stage:
                yield from cell.workers

    def find_seat(self, worker: int) -> Seat | None:
        """The worker's seat, or None for a spare or a stranger."""
        for s, stage in enumerate(self.stages):
            for c, cell in enumerate(stage):
                if worker in cell.workers:
                    return Seat(stage=s, cell=c, lane=cell.workers.index(worker))
        return None

    def seat(self, worker: int) -> Seat:
        """The worker's seat. Raises KeyError when it has none."""
        found = self.find_seat(worker)
        if found is None:
            raise KeyError(f"worker {worker} has no seat in {self}")
        return found

    def replicas(self, stage: int, lane: int) -> tuple[int, ...]:
        """Workers that hold the same parameters: one per cell of the stage, in cell order."""
        return tuple(cell.workers[lane] for cell in self.stages[stage])

    def chain(self, worker: int) -> tuple[int, ...]:
        """The worker's own view of its pipeline, one worker per stage, itself included.

        Cell ``c`` sees cell ``c mod D_t`` of stage ``t``. Stages with different numbers of cells
        give views that differ between workers, so no collective may run on a chain.
        """
        me = self.seat(worker)
        return tuple(
            worker if t == me.stage else stage[me.cell % len(stage)].workers[me.lane]
            for t, stage in enumerate(self.stages)
        )

    def without(self, lost: Collection[int]) -> Placement:
        """The placement after ``lost`` are gone: their cells dissolve, cell mates become spares.

        Stages may come out empty; whether that is feasible is the planner's business.
        """
        gone = set(lost)
        spares = [w for w in self.spares if w not in gone]
        stages = []
        for stage in self.stages:
            kept = []
            for cell in stage:
                if gone.isdisjoint(cell.workers):
                    kept.append(cell)
                else:
                    spares.extend(w for w in cell.workers if w not in gone)
            stages.append(tuple(kept))
        return Placement(stages=tuple(stages), spares=tuple(sorted(spares)))

    def describe(self, layers: Sequence[tuple[int, int]] = ()) -> str:
        """One line for logs: ``stage 0: [0] [1] | stage 1: [3]``; with the layers ``[start, stop)`` of every stage
        ``stage 0 (layers 0-2): [0] [1] | stage 1 (layer 3): [3]``.
        """
        names = [f"stage {stage}" for stage in range(len(self.stages))]
        if layers:
            names = [f"{name} ({describe_layers(*own)})" for name, own in zip(names, layers, strict=True)]
        text = " | ".join(
            f"{name}: " + " ".join("[" + ",".join(map(str, cell.workers)) + "]" for cell in stage)
            for name, stage in zip(names, self.stages, strict=True)
        )
        return text + (f" | spare: {','.join(map(str, self.spares))}" if self.spares else "")


def describe_layers(start: int, stop: int) -> str:
    """``layer 3``, ``layers 3-5``."""
    return f"layer {start}" if stop == start + 1 else f"layers {start}-{stop - 1}"
