"""Whole stages are lost, one worker at a time or at once: the sessions of those who are left go on, down to one."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_elas.runtime.snapshots import SnapshotMode
from megatron_elas.spec.errors import StateInvalid
from tests.runtime.jobs import ToyWorker, check_end, job_of

STEPS = 8

both_modes = pytest.mark.parametrize("mode", list(SnapshotMode))


@both_modes
@pytest.mark.parametrize("phase", ["forward", "reduce", "norm", "optimizer", "gather", "stepped"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_stage_of_one_cell_is_lost_in_any_phase(victim: int, phase: str, mode: SnapshotMode, tmp_path: Path) -> None:
    with job_of(tmp_path, stages=4, rows=1, mode=mode) as job:
        job.workers[victim].hooks[phase, 4] = job.workers[victim].vanish
        job.run(steps=STEPS)
        check_end(job, STEPS)
        plan = job.plans[1]
        assert plan.placement.num_stages == 3
        held = [job.workers[worker].session.plan.layers_of(worker) for worker in plan.placement.workers]
        assert sum(stop - start for start, stop in held) == 4


def test_one_after_the_other_is_lost_until_one_worker_has_all_layers(tmp_path: Path) -> None:
    with job_of(tmp_path, stages=4, rows=1) as job:
        for step, victim in ((2, 1), (4, 3), (6, 0)):
            job.workers[victim].hooks["forward", step] = job.workers[victim].vanish
        job.run(steps=STEPS)
        check_end(job, STEPS)
        assert job.survivors == [2]
        assert job.workers[2].session.plan.layers == ((0, 4),)


def test_both_cells_of_a_stage_are_lost_at_once_and_one_of_another_stage_takes_it_over(tmp_path: Path) -> None:
    with job_of(tmp_path, stages=2, rows=2, copies=2) as job:

        def both() -> None:
            job.workers[2].fall_silent()
            job.workers[3].vanish()

        job.workers[3].hooks["optimizer", 4] = both
        job.run(steps=STEPS)
        check_end(job, STEPS)
        assert job.plans[job.epoch].placement.describe() == "stage 0: [0] | stage 1: [1]"


def test_a_second_stage_is_lost_while_the_first_one_is_put_together(tmp_path: Path) -> None:
    with job_of(tmp_path, stages=4, rows=1, copies=2) as job:
        job.workers[1].hooks["forward", 4] = job.workers[1].vanish
        for step in (3, 4):  # worker 3 may be in the end of step 3 still
            job.workers[3].hooks["recovery-rebuild", step] = job.workers[3].vanish
        job.run(steps=STEPS)
        check_end(job, STEPS)
        assert job.survivors == [0, 2]
        assert job.plans[job.epoch].placement.num_stages == 2


def test_owner_and_only_backup_in_two_stages_are_more_than_copies_can_bear(tmp_path: Path) -> None:
    with job_of(tmp_path, stages=4, rows=1) as job:

        def both() -> None:
            job.workers[2].fall_silent()
            job.workers[1].vanish()

        job.workers[1].hooks["forward", 4] = both
        with pytest.raises(StateInvalid, match="the shard of worker 1"):
            job.run(steps=STEPS)


def test_a_spare_that_was_idle_for_steps_gets_a_seat_and_its_loop_catches_up(tmp_path: Path) -> None:
    """Worker 1 is lost in step 1 and leaves 0 without a mate; worker 4 in step 5, and its mate 5 joins 0."""
    with job_of(tmp_path, stages=1, rows=3, lanes=2) as job:
        job.workers[1].hooks["forward", 1] = job.workers[1].vanish
        job.workers[4].hooks["optimizer", 5] = job.workers[4].vanish

        def between(worker: ToyWorker, step: int) -> None:
            worker.log(step)
            if step in (2, 6):
                worker.evaluate(step)
            if step in (3, 5):
                worker.save(step)

        job.run(steps=STEPS, between=between)
        check_end(job, STEPS)
        assert job.plans[2].placement.describe() == "stage 0: [0,5] [2,3]"
        idle = job.workers[0]
        assert idle.steps_missed == [1, 2, 3, 4] or idle.steps_missed == [1, 2, 3, 4, 5]
        assert idle.told == [idle.steps_missed[-1] + 1], "how the steps went that it has missed"
        assert [job.workers[worker].told for worker in (2, 3, 5)] == [[], [], []], "these have run them all"
        assert idle.steps_run[-2:] == [6, 7] and idle.unsaved == []
        assert dict(idle.evaluated).keys() == {6}, "the evaluation of step 2 was over when it came back"
        assert dict(job.workers[2].evaluated).keys() == {2, 6} and job.workers[2].saved == [3, 5]


@both_modes
@pytest.mark.parametrize("place", ["recovery", "recovery-restore", "recovery-rebuild", "recovery-verify"])
def test_a_worker_that_a_recovery_left_without_a_seat_has_one_again_when_that_is_cut_short(
    place: str, mode: SnapshotMode, tmp_path: Path
) -> None:
    """Worker 2 is lost, so its mate 3 has no seat, until worker 1 is lost too: then it joins 0, after the same step."""
    with job_of(tmp_path, stages=1, rows=3, lanes=2, mode=mode) as job:
        job.workers[2].hooks["optimizer", 4] = job.workers[2].vanish
        for step in (3, 4, 5):  # or the next one, where all have come to it
            job.workers[1].hooks[place, step] = job.workers[1].vanish
        job.run(steps=STEPS)
        check_end(job, STEPS)
        assert job.plans[1].placement.spares == (3,)
        assert job.plans[2].placement.describe() == "stage 0: [0,3] [4,5]"
        assert [worker.told for worker in job.workers] == [[]] * 6
        assert {job.workers[worker].tally for worker in job.survivors} == {STEPS}
