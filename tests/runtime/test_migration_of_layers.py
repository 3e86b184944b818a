"""Workers go over to other plans while everybody lives: all state that ends up anywhere is an undisturbed run's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch

from megatron_elas.spec.migration import MIGRATION_PHASES, MigrationMode
from tests.runtime.jobs import Job, ToyWorker, check_end, job_of

BOTH = pytest.mark.parametrize("mode", ["async", "blocking"])


def spans(*counts: int) -> tuple[tuple[int, int], ...]:
    """Layers of every stage, by how many each has."""
    return tuple(pairwise(accumulate(counts, initial=0)))


def order_in(job: Job, step: int, order: Callable[[], object], worker: int = 0) -> None:
    """Have the controller give an order while this worker is in the step."""
    job.workers[worker].hooks["forward", step] = lambda: (order(), None)[1]


def check_copies(job: Job, steps: int) -> None:
    """Every copy is what its owner has, and nobody keeps an older layout."""
    for worker in job.survivors:
        state = job.workers[worker].session._state
        assert state is not None
        assert list(state.stores) == [state.plan.epoch]
        for ward, copies in state.store.wards.items():
            assert torch.equal(copies.get(steps), job.workers[worker].expected_shard(state.plan, steps, ward))


def check_migrated(job: Job, epoch: int, mode: MigrationMode) -> None:
    """All seated workers have told of it, in the same step, with all phases."""
    reports = job.migrated[epoch]
    assert reports.keys() == set(job.plans[epoch].placement.workers)
    assert len({report.step for report in reports.values()}) == 1
    for report in reports.values():
        assert tuple(report.phases_s) == MIGRATION_PHASES
        assert report.blocked_s == pytest.approx(sum(report.phases_s.values()))
        assert bool(report.streamed_steps) == (mode == "async")
        assert not (report.moved_bytes and mode == "async"), "state moved at the switch that was streamed before"


@BOTH
@pytest.mark.parametrize(
    ("launch", "rows", "sequence"),
    [
        ((8, 8, 7, 7), 1, [(7, 8, 8, 7), (9, 7, 7, 7), (1, 13, 15, 1)]),
        ((4, 3), 2, [(3, 4), (6, 1), (1, 6)]),
        ((15, 14, 14), 2, [(14, 15, 14), (10, 16, 17)]),
        ((2, 2), 3, [(1, 3), (2, 2)]),
    ],
    ids=["30-over-4", "7-over-2", "43-over-3", "4-over-2"],
)
def test_layers_move_again_and_again(
    launch: Sequence[int], rows: int, sequence: Sequence[Sequence[int]], mode: MigrationMode, tmp_path: Path
) -> None:
    steps = 4
    with job_of(tmp_path, stages=len(launch), rows=rows, layers=launch, patterned=True, migration=mode) as job:
        for number, counts in enumerate(sequence):
            most = max(abs(a - b) for a, b in zip((launch, *sequence)[number], counts, strict=True))
            order_in(job, steps - 2, lambda counts=counts: job.migrate(spans(*counts)))
            steps += 6 + (most if mode == "async" else 0)
        job.run(steps=steps, between=ToyWorker.log)
        assert not job.lost and job.epoch == 0
        check_end(job, steps)
        check_copies(job, steps)
        for epoch in range(1, len(sequence) + 1):
            check_migrated(job, epoch, mode)
        assert job.in_force.layers == spans(*sequence[-1])
        for worker in job.workers:
            assert worker.steps_run == list(range(steps)), "a step was run again"
            assert worker.prebuilt == list(range(1, len(sequence) + 1))
