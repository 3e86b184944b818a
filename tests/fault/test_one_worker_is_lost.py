"""Any one worker of a PP2 x DP2 grid is lost at a scripted moment; training goes on as if nothing had happened."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fault.conftest import GRID
from tests.fault.runs import Run, assert_nothing_stale, assert_same_training, run_job, run_stock

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

AT = 5
"""Step in which the fault strikes; 10 more follow."""


def lose(tmp_path: Path, *faults: str) -> Run:
    """A run with these faults, all of which must have struck."""
    run = run_job(tmp_path / "run", GRID, workers=4, faults=faults)
    assert sorted(run.fired) == sorted(faults), run.output[-6000:]
    return run


def assert_phases_add_up(run: Run) -> None:
    """The printed table has the phases of a recovery, and their sum."""
    header, values = re.search(r"ms +(detect .*total)\n +([0-9. ]+)  \(worker", run.output).groups()  # type: ignore[union-attr]
    assert header.split() == [
        "detect", "quiesce", "settle", "plan", "groups", "restore", "rebuild", "verify", "first_step", "total",
    ]  # fmt: skip
    *phases, total = map(float, values.split())
    assert sum(phases) == pytest.approx(total, abs=0.05)
    assert total > 0 and phases[-1] > 0


def assert_survivors(run: Run, survivors: set[int]) -> None:
    """These have a seat at the end, every group of theirs works, and nothing was stale after any recovery."""
    assert run.records("final").keys() == survivors
    assert_nothing_stale(run)


def test_without_a_fault_elastic_training_has_the_losses_of_stock_megatron(calm: Run, tmp_path: Path) -> None:
    stock = run_stock(tmp_path / "stock", GRID, workers=4)
    assert stock.code == 0, stock.output[-6000:]
    assert (stock.iterations, stock.consumed) == (calm.iterations, calm.consumed)
    assert stock.losses == pytest.approx(calm.losses, rel=1e-6), "more than the last printed digit"
    assert stock.gradient_norms == pytest.approx(calm.gradient_norms, abs=1.1e-3), "more than the last printed digit"


@pytest.mark.parametrize(
    ("worker", "phase"),
    [
        pytest.param(0, "forward", id="first-worker-forward"),
        pytest.param(0, "backward", id="first-worker-backward", marks=pytest.mark.slow),
        pytest.param(1, "forward", id="first-stage-forward", marks=pytest.mark.slow),
        pytest.param(1, "backward", id="first-stage-backward", marks=pytest.mark.slow),
        pytest.param(3, "forward", id="last-stage-and-logging-forward", marks=pytest.mark.slow),
        pytest.param(3, "backward", id="last-stage-and-logging-backward"),
    ],
)
def test_a_killed_worker_changes_neither_losses_nor_samples_nor_the_log(
    worker: int, phase: str, calm: Run, tmp_path: Path
) -> None:
    run = lose(tmp_path, f"kill:worker={worker}@step={AT},phase={phase},microbatch=2")
    assert_same_training(run, calm)
    assert_survivors(run, {0, 1, 2, 3} - {worker})
    assert run.output.count("---- recovered: epoch 1 ") == 1
    assert f"lost     worker {worker} " in run.output
    assert_phases_add_up(run)


@pytest.mark.parametrize(
    "kind", ["exit", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("stop", "exception"))]
)
def test_other_ways_to_go_end_in_the_same_recovery(kind: str, calm: Run, tmp_path: Path) -> None:
    run = lose(tmp_path, f"{kind}:worker=2@step={AT},phase=backward,microbatch=1")
    assert_same_training(run, calm)
    assert_survivors(run, {0, 1, 3})


@pytest.mark.parametrize(
    "phase",
    [
        "between",
        *(
            pytest.param(phase, marks=pytest.mark.slow)
            for phase in ("reduce", "norm", "optimizer", "snapshot", "gather", "commit")
        ),
    ],
)
def test_a_worker_lost_around_the_ends_of_a_step_loses_no_step(phase: str, calm: Run, tmp_path: Path) -> None:
    run = lose(tmp_path, f"kill:worker=0@step={AT},phase={phase}")
    assert_same_training(run, calm)
    assert_survivors(run, {1, 2, 3})


@pytest.mark.parametrize("phase", [pytest.param("forward", marks=pytest.mark.slow), "backward"])
def test_a_worker_lost_in_the_very_first_step_is_recovered_from(phase: str, calm: Run, tmp_path: Path) -> None:
    run = lose(tmp_path, f"kill:worker=2@step=0,phase={phase},microbatch=1")
    assert_same_training(run, calm)
    assert_survivors(run, {0, 1, 3})


def test_survivors_keep_their_processes(tmp_path: Path) -> None:
    fault = f"kill:worker=1@step={AT},phase=forward"
    run = run_job(tmp_path / "run", GRID, workers=4, faults=[fault], versions=[AT - 1])
    assert run.fired == [fault] and run.code == 0, run.output[-6000:]
    before, after = run.records(f"version.{AT - 1}.epoch.0"), run.records("final")
    assert before.keys() == {0, 1, 2, 3} and after.keys() == {0, 2, 3}
    assert {w: record["pid"] for w, record in after.items()} == {w: before[w]["pid"] for w in after}


def test_a_lost_worker_takes_its_tensor_parallel_cell_along_and_its_mate_becomes_a_spare(tmp_path: Path) -> None:
    flags = ("--tensor-model-parallel-size=2",)
    calm = run_job(tmp_path / "calm", flags, workers=4, steps=10)
    fault = "kill:worker=1@step=4,phase=backward,microbatch=1"
    run = run_job(tmp_path / "run", flags, workers=4, steps=10, faults=[fault])
    assert run.fired == [fault]
    assert_same_training(run, calm)
    assert_survivors(run, {2, 3})
    assert "now      stage 0: [2,3] | spare: 0" in run.output


@pytest.mark.slow
def test_two_workers_of_different_stages_are_lost_one_after_the_other(calm: Run, tmp_path: Path) -> None:
    run = lose(
        tmp_path,
        "kill:worker=0@step=3,phase=forward,microbatch=1",
        "kill:worker=3@step=6,phase=backward,microbatch=1",
    )
    assert_same_training(run, calm)
    assert_survivors(run, {1, 2})
    assert "---- recovered: epoch 2 " in run.output


def test_a_second_worker_lost_during_the_recovery_is_recovered_from_too(calm: Run, tmp_path: Path) -> None:
    run = lose(tmp_path, "kill:worker=1@step=4,phase=forward,microbatch=1", "kill:worker=2@step=4,phase=recovery")
    assert_same_training(run, calm)
    assert_survivors(run, {0, 3})


def test_fewer_workers_than_a_cell_takes_end_the_job_with_its_own_code_and_a_sentence(tmp_path: Path) -> None:
    fault = "kill:worker=1@step=4,phase=forward,microbatch=1"
    run = run_job(tmp_path / "run", ("--tensor-model-parallel-size=2",), workers=2, faults=[fault])
    assert run.fired == [fault] and run.code == 3, run.output[-6000:]
    assert "too few workers are left (1), a cell takes 2" in run.output and "--load" in run.output
