"""A worker is lost while layers are on their way to other stages, in every part of it; training goes on as ever.

A layer moves from the first stage to the second. In ``CHAIN``, three stages of one cell, worker 0 gives it, worker 1
gets it, worker 2 has no part in it; the loss takes a whole stage. In ``GRID`` either stage has another cell.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_elas.spec.faults import MIGRATION_PHASES
from tests.fault.migrations import (
    Job,
    answers,
    assert_nothing_stale,
    assert_same_training,
    events,
)
from tests.fault.runs import Run
from tests.fault.warm_launcher import WarmLauncher

pytestmark = [pytest.mark.process, pytest.mark.timeout(700)]

CHAIN = Job(layers=(3, 2, 2), clip=1.0)
GRID = Job(layers=(4, 3), data=2)
ASK, AT = {CHAIN: "3 rebalance 2,3,2", GRID: "3 rebalance 3,4"}, 3
CHAIN_ROLES = {"source": 0, "target": 1, "bystander": 2}
GRID_ROLES = {"source": 1, "target": 2}
SWITCH = tuple(phase for phase in MIGRATION_PHASES if phase not in ("migrate-stream", "migrate-hand-over"))
"""Phases that a migration has which sends nothing ahead."""


def lose(job: Job, mode: str, faults: list[str], calm: Run, warm: WarmLauncher, folder: Path, **more: object) -> Run:
    """The run with these faults, all of which must have struck, while the job was going over, and as ``calm``."""
    run = job.run(folder, warm, ASK[job], mode=mode, faults=faults, **more)  # type: ignore[arg-type]
    assert sorted(run.fired) == sorted(faults), run.output[-8000:]
    assert [answer.partition(":")[0] for answer in answers(run)] == ["yes"], answers(run)
    assert_same_training(run, calm)
    lost = {int(worker) for fault in faults for worker in re.findall(r"worker=(\d+)", fault)}
    assert set(run.records("final")) == set(range(job.workers)) - lost
    assert_nothing_stale(run)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("role", CHAIN_ROLES)
@pytest.mark.parametrize("phase", MIGRATION_PHASES)
def test_a_stage_is_lost_in_a_part_of_a_migration(
    phase: str, role: str, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    fault = f"kill:worker={CHAIN_ROLES[role]}@step={AT},phase={phase}"
    lose(CHAIN, "async", [fault], undisturbed(CHAIN), warm, tmp_path / "run")


@pytest.mark.parametrize("role", [pytest.param(role, marks=pytest.mark.slow) for role in GRID_ROLES])
@pytest.mark.parametrize("phase", MIGRATION_PHASES)
def test_a_replica_is_lost_in_a_part_of_a_migration(
    phase: str, role: str, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    fault = f"kill:worker={GRID_ROLES[role]}@step={AT},phase={phase}"
    lose(GRID, "async", [fault], undisturbed(GRID), warm, tmp_path / "run")


def test_a_replica_is_lost_while_its_layer_is_sent(
    undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    fault = f"kill:worker=0@step={AT},phase=migrate-stream"
    lose(GRID, "async", [fault], undisturbed(GRID), warm, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("role", GRID_ROLES)
@pytest.mark.parametrize("phase", SWITCH)
def test_a_replica_is_lost_in_a_part_of_a_blocking_migration(
    phase: str, role: str, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    fault = f"kill:worker={GRID_ROLES[role]}@step={AT},phase={phase}"
    lose(GRID, "blocking", [fault], undisturbed(GRID), warm, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["exit", "stop", "exception"])
@pytest.mark.parametrize("phase", ["migrate-stream", "migrate-enter", "migrate-verify"])
def test_other_ways_to_go_during_a_migration(
    phase: str, kind: str, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    fault = f"{kind}:worker=3@step={AT},phase={phase}"
    lose(GRID, "async", [fault], undisturbed(GRID), warm, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward,microbatch=1", "reduce", "norm", "optimizer", "commit", "between"])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_replica_is_lost_in_a_part_of_a_step_around_a_migration(
    after: int, phase: str, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    """The steps in which all learn of it, in which its state is sent, and after which it is over."""
    fault = f"kill:worker=2@step={AT + after},phase={phase}"
    lose(GRID, "async", [fault], undisturbed(GRID), warm, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("second", ["recovery", "recovery-quiesce", "recovery-restore", "recovery-verify"])
@pytest.mark.parametrize("first", ["migrate-hand-over", "migrate-rebuild", "migrate-verify"])
def test_a_second_worker_is_lost_in_the_recovery_from_the_first(
    first: str, second: str, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    # The step of the first fault is one of those around the switch; a fault of a recovery takes its neighbours too.
    step = AT + (1 if first == "migrate-hand-over" else 2)
    faults = [f"kill:worker=0@step={AT},phase={first}", f"kill:worker=3@step={step},phase={second}"]
    run = lose(GRID, "async", faults, undisturbed(GRID), warm, tmp_path / "run")
    assert set(run.records("final")) == {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("before", range(AT, AT + 5))
@pytest.mark.parametrize("mode", ["async", "blocking"])
def test_the_controller_is_killed_in_the_middle_of_a_migration(
    mode: str, before: int, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    run = GRID.run(tmp_path / "run", warm, ASK[GRID], mode=mode, environ={"ELAS_TEST_KILL_CONTROLLER": f"1@{before}"})
    assert f"controller killed: 1@{before}" in run.output, run.output[-8000:]
    assert_same_training(run, undisturbed(GRID))
    assert set(run.records("final")) == {0, 1, 2, 3}
    assert [event["layers_after"] for event in events(run, "migration")] == [[[0, 3], [3, 7]]]
    assert not events(run, "recovery")
    assert_nothing_stale(run)


@pytest.mark.slow
def test_the_controller_is_killed_and_then_a_worker(
    undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    faults = [f"kill:worker=2@step={AT},phase=migrate-rebuild"]
    run = lose(
        GRID, "async", faults, undisturbed(GRID), warm, tmp_path / "run",
        environ={"ELAS_TEST_KILL_CONTROLLER": f"1@{AT + 1},settling"},
    )  # fmt: skip
    assert f"controller killed: 1@{AT + 1}" in run.output and "controller killed: settling" in run.output
