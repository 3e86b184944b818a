"""A worker whose main thread hangs, though it lives and beats; and one that wakes up after it was taken for lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fault.conftest import GRID
from tests.fault.runs import Run, assert_nothing_stale, assert_same_training, run_job

pytestmark = [pytest.mark.process, pytest.mark.timeout(500)]

IMPATIENT = ("--progress-timeout-s=2",)
"""And ten times the longest step, on a busy machine."""
AT = 5


def assert_lost(run: Run, worker: int, reason: str) -> None:
    """That one and no other, for this reason."""
    assert re.findall(r"^lost     worker (\d)", run.output, re.MULTILINE) == [str(worker)], run.output[-6000:]
    assert re.search(rf"^lost     worker {worker} .*: silent, {reason}", run.output, re.MULTILINE), run.output[-6000:]
    assert run.records("final").keys() == {0, 1, 2, 3} - {worker}
    assert_nothing_stale(run)


@pytest.mark.parametrize(
    ("worker", "phase"),
    [
        pytest.param(2, "backward", id="last-stage-backward"),
        pytest.param(0, "forward", id="first-worker-forward", marks=pytest.mark.slow),
        pytest.param(1, "optimizer", id="optimizer", marks=pytest.mark.slow),
    ],
)
def test_the_worker_whose_main_thread_hangs_is_lost_and_not_those_who_wait_for_it(
    worker: int, phase: str, calm: Run, tmp_path: Path
) -> None:
    fault = f"hang:worker={worker}@step={AT},phase={phase}"
    run = run_job(tmp_path / "run", GRID, workers=4, faults=[fault], launcher_flags=IMPATIENT, timeout_s=200)
    assert run.fired == [fault]
    assert_lost(run, worker, rf"its main thread made no progress for [0-9.]+ s in step {AT}, at wait \(threading.py:")
    assert_same_training(run, calm)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        pytest.param("thread", "its main thread made no progress", id="main-thread-sleeps"),
        pytest.param("stop", "its process is stopped", id="process-is-stopped"),
    ],
)
@pytest.mark.slow
def test_a_lost_worker_that_wakes_up_before_it_is_killed_harms_nobody(
    how: str, reason: str, calm: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELAS_TEST_SLEEPER", f"{how}:1@{AT}")
    run = run_job(tmp_path / "run", GRID, workers=4, launcher_flags=IMPATIENT, timeout_s=200)
    assert f"worker 1 falls asleep in step {AT}" in run.output and "worker 1 wakes up" in run.output
    assert "the sleeper is told to end: it was taken for lost" in run.output
    assert_lost(run, 1, reason)
    assert_same_training(run, calm)


@pytest.mark.slow
def test_compiling_evaluation_and_saves_are_no_hangs(tmp_path: Path) -> None:
    flags = (*GRID, "--eval-interval=2", "--eval-iters=2", f"--save={tmp_path / 'saved'}", "--save-interval=3")
    run = run_job(tmp_path / "run", flags, workers=4, launcher_flags=("--progress-timeout-s=0.3",), timeout_s=200)
    assert run.code == 0 and "is lost" not in run.output, run.output[-6000:]
