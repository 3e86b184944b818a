"""After a loss the planner looks for better stages, and all go over to them while they train.

Which plans follow from a loss is asked of the planner itself; that layers move in them is not taken from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.migrations import (
    Job,
    assert_layers_once,
    assert_nothing_stale,
    assert_same_training,
    events,
    splits,
)
from tests.fault.runs import Run
from tests.fault.warm_launcher import WarmLauncher

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(700)]

THREE = Job(layers=(4, 4, 4), data=2, per_row=4, steps=20, clip=1.0)
TWO = Job(layers=(4, 4), data=2, per_row=4, steps=20, clip=1.0)
CHAIN = Job(layers=(3, 3, 3, 3), per_row=4, steps=20, clip=1.0)


def kill(worker: int, step: int, phase: str = "backward,microbatch=1") -> str:
    return f"kill:worker={worker}@step={step},phase={phase}"


def lose(
    job: Job,
    faults: Sequence[str],
    undisturbed: Callable[..., Run],
    warm: WarmLauncher,
    folder: Path,
    mode: str = "async",
) -> Run:
    """The run with these faults, compared with the undisturbed one."""
    run = job.run(folder, warm, mode=mode, faults=faults)
    assert sorted(run.fired) == sorted(faults), run.output[-8000:]
    assert_same_training(run, undisturbed(job))
    assert_nothing_stale(run)
    return run


def assert_planned(run: Run, job: Job, *lost: Sequence[int]) -> None:
    """The job's plans are those that the planner makes of these losses, with a migration after each where it pays."""
    plans = job.plans_after(*lost)
    assert splits(run) == [plan for plan in plans if plan is not None]
    for event in events(run, "migration"):
        assert event["moved"], event
        assert event["layers_before"] != event["layers_after"]


@pytest.mark.parametrize("mode", ["async", "blocking"])
@pytest.mark.parametrize("worker", [0, 3, 5])
def test_layers_leave_the_stage_that_has_lost_a_cell(
    worker: int, mode: str, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    run = lose(THREE, [kill(worker, 3)], undisturbed, warm, tmp_path / "run", mode)
    (event,) = events(run, "migration")
    assert_planned(run, THREE, [worker])
    assert_layers_once(run, splits(run)[-1])
    assert event["epoch"] == 2 and event["moved"]
    assert (event["streamed_steps"] > 0) == (mode == "async")


def test_a_second_loss_follows_the_migration(
    undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    run = lose(THREE, [kill(5, 3), kill(1, 13)], undisturbed, warm, tmp_path / "run")
    assert_planned(run, THREE, [5], [1])
    assert [event["epoch"] for event in events(run, "recovery")] == [1, 3]


def test_a_second_loss_comes_before_the_migration_is_over(
    undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    run = lose(THREE, [kill(5, 3), kill(0, 4, "migrate-hand-over")], undisturbed, warm, tmp_path / "run")
    assert set(run.records("final")) == {1, 2, 3, 4}
    assert [event["epoch"] for event in events(run, "recovery")] == [1, 3]
    assert events(run, "migration"), "nothing moved after the second loss"
    assert_layers_once(run, splits(run)[-1])


def test_both_cells_of_a_stage_are_lost_and_layers_move_again(
    undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    job = replace(THREE, more=("--elastic-snapshot-replicas=2",))
    run = lose(job, [kill(2, 3), kill(3, 3)], undisturbed, warm, tmp_path / "run")
    assert set(run.records("final")) == {0, 1, 4, 5}
    assert {event["epoch"] for event in events(run, "recovery")} <= {1, 2}


@pytest.mark.parametrize("worker", [0, 1, 3])
def test_a_stage_of_one_cell_is_lost_and_what_is_asked_for_is_done(
    worker: int, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    """Three stages, or fewer, are left."""
    run = CHAIN.run(tmp_path / "run", warm, "9 rebalance", faults=[kill(worker, 3)])
    assert run.fired == [kill(worker, 3)], run.output[-8000:]
    assert_same_training(run, undisturbed(CHAIN))
    assert_nothing_stale(run)
    assert set(run.records("final")) == {0, 1, 2, 3} - {worker}


def test_measured_times_lead_to_migrations_too(
    undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    """What steps took on this machine says where layers go, which is no matter: training is what it was."""
    job, fault = replace(TWO, steps=40), kill(3, 12)
    run = job.run(tmp_path / "run", warm, "20 rebalance", "28 rebalance 4,4", faults=[fault], launcher_flags=())
    assert run.fired == [fault], run.output[-8000:]
    assert_same_training(run, undisturbed(job))
    assert_nothing_stale(run)


def test_off_leaves_layers_where_they_are(undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path) -> None:
    run = lose(THREE, [kill(5, 3)], undisturbed, warm, tmp_path / "run", "off")
    assert not events(run, "migration")
    assert_layers_once(run, THREE.layers)
