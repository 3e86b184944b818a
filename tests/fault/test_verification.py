"""Faults planted in the state during a recovery: one check finds each, and the job goes on from elsewhere or stops."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fault.runs import Run, assert_nothing_stale, assert_same_training, run_job

pytestmark = [pytest.mark.process, pytest.mark.timeout(500)]

GRID = ("--pipeline-model-parallel-size=2",)
CHECKPOINTS = ("--ckpt-format=torch_dist", "--save-interval=4")
FAULT = "kill:worker=3@step=6,phase=backward,microbatch=1"
STEPS = 8
PLANTS = {
    "missing_parameter": ("parameters", "the model of worker 1 holds"),
    "dropped_name": ("parameters", "the model of worker 1 holds"),
    "permuted_values": ("replicas", "the weights of stage 0 lane 0 differ"),
    "diverged_replica": ("replicas", "the weights of stage 0 lane 0 differ"),
    "double_owner": ("owners", "an element has no owner, or two"),
    "stale_moment": ("contents", "exp_avg in use on worker 1 is not what it got"),
    "bf16_desync": ("cast", "1 weights on worker 1 are not their masters, cast"),
    "step_counter_reset": ("counters", "the optimizer of worker 1, or a copy of it, has counted 0 updates"),
}
"""The check that finds each, and part of what it says."""
NAMED = re.compile(r", first in (decoder|embedding)\.[\w.]+")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Undisturbed runs, by precision."""
    folder = tmp_path_factory.mktemp("calm")
    return {
        name: run_job(folder / name, (*GRID, *flags), workers=4, steps=STEPS)
        for name, flags in {"fp32": (), "bf16": ("--bf16",)}.items()
    }


def flags_of(plant: str) -> tuple[str, ...]:
    return (*GRID, "--bf16") if plant == "bf16_desync" else GRID


def failed_checks(run: Run) -> list[str]:
    """Which failed, as the controller printed it; the other workers say the same."""
    found = re.findall(r"elasrun: epoch \d+: the check of (\w+) failed before step \d+", run.output)
    assert "; also, " not in run.output, "a second check found it too"
    return found


@pytest.mark.parametrize(
    "plant", [pytest.param(name, marks=() if name == "stale_moment" else pytest.mark.slow) for name in PLANTS]
)
def test_each_fault_is_found_by_its_check_alone_and_training_goes_on_from_the_checkpoint(
    plant: str, calm: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, says = PLANTS[plant]
    monkeypatch.setenv("ELAS_TEST_SPOIL", f"{plant}@1")
    flags = (*flags_of(plant), *CHECKPOINTS, f"--save={tmp_path / 'checkpoints'}")
    run = run_job(tmp_path / "run", flags, workers=4, faults=[FAULT], steps=STEPS)
    assert run.fired == [FAULT] and f"planted: {plant} on worker 1" in run.output
    assert failed_checks(run) == [check]
    assert says in run.output
    assert check == "counters" or NAMED.search(run.output), "the parameter is named"
    assert "state    from the checkpoint of iteration 4" in run.output
    # An optimizer cannot be made anew for a model that lacks a parameter: that worker is lost, and the others go on.
    assert ("worker 1 is lost" in run.output) == (check == "parameters")
    assert_same_training(run, calm["bf16" if "--bf16" in flags else "fp32"])


@pytest.mark.slow
def test_without_a_checkpoint_the_job_ends_with_the_sentence_of_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELAS_TEST_SPOIL", "stale_moment@1")
    run = run_job(tmp_path / "run", GRID, workers=4, faults=[FAULT], steps=STEPS)
    assert run.fired == [FAULT] and "planted: stale_moment on worker 1" in run.output
    assert run.code == 4, run.output[-6000:]
    assert "exp_avg in use on worker 1 is not what it got" in run.output.split("elasrun: ")[-1]
    assert "saved no checkpoint to go on from" in run.output


@pytest.mark.slow
def test_a_fault_that_comes_again_from_the_same_checkpoint_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELAS_TEST_SPOIL", "step_counter_reset@1*")
    flags = (*GRID, *CHECKPOINTS, f"--save={tmp_path / 'checkpoints'}")
    run = run_job(tmp_path / "run", flags, workers=4, faults=[FAULT], steps=STEPS)
    assert run.fired == [FAULT] and run.output.count("planted: step_counter_reset on worker 1") == 3
    assert run.code == 4, run.output[-6000:]
    assert "The same check failed before the same step already" in run.output
    assert re.findall(r"counters failed before step (\d+)", run.output.split("elasrun: ")[-1]) == ["4"]


@pytest.mark.slow
def test_a_bad_copy_beside_a_sound_owner_is_made_anew(
    calm: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELAS_TEST_SPOIL", "diverged_backup@1")
    run = run_job(tmp_path / "run", GRID, workers=4, faults=[FAULT], steps=STEPS)
    assert run.fired == [FAULT] and "planted: diverged_backup on worker 1" in run.output
    assert failed_checks(run) == ["contents"] and "other copies are to take its place" in run.output
    assert_same_training(run, calm["fp32"])


def kill(*workers: int, step: int, phase: str = "forward,microbatch=0") -> list[str]:
    return [f"kill:worker={worker}@step={step},phase={phase}" for worker in workers]


@pytest.mark.slow
def test_owner_and_backup_lost_together_lead_back_to_the_checkpoint_in_place(tmp_path: Path) -> None:
    grid = ("--pipeline-model-parallel-size=2",)
    undisturbed = run_job(tmp_path / "calm", grid, workers=6, batch=12, steps=STEPS)
    faults = [*kill(1, step=6), *kill(2, step=6, phase="recovery")]  # before its copies have gone anywhere
    flags = (*grid, *CHECKPOINTS, f"--save={tmp_path / 'checkpoints'}")
    run = run_job(tmp_path / "run", flags, workers=6, batch=12, faults=faults, steps=STEPS)
    assert sorted(run.fired) == faults
    assert "go on from the checkpoint of iteration 4" in run.output
    assert_same_training(run, undisturbed)
    assert_nothing_stale(run)


@pytest.mark.slow
def test_a_checkpoint_that_was_cut_short_is_not_taken(tmp_path: Path) -> None:
    undisturbed = run_job(tmp_path / "calm", (), workers=3, batch=12, steps=STEPS)
    faults = kill(1, 2, step=7, phase="save,microbatch=0")
    flags = (*CHECKPOINTS, f"--save={tmp_path / 'checkpoints'}")
    run = run_job(tmp_path / "run", flags, workers=3, batch=12, faults=faults, steps=STEPS)
    assert sorted(run.fired) == faults
    assert "go on from the checkpoint of iteration 4" in run.output
    assert_same_training(run, undisturbed)
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "8"


@pytest.mark.slow
def test_a_spare_that_has_seen_later_steps_gets_a_seat_after_the_return_to_a_checkpoint(tmp_path: Path) -> None:
    flags = ("--tensor-model-parallel-size=2",)
    calm = run_job(tmp_path / "calm", flags, workers=6, steps=12, batch=12)
    # Two cells are gone with all copies of their shards; worker 2 is left over. It had begun step 9 like all others.
    faults = [f"kill:worker={worker}@step=9,phase=forward,microbatch=0" for worker in (0, 1, 3)]
    faults.append("kill:worker=4@step=9,phase=norm")
    saving = (*CHECKPOINTS, f"--save={tmp_path / 'checkpoints'}")
    run = run_job(tmp_path / "run", (*flags, *saving), workers=6, steps=12, batch=12, faults=faults)
    assert sorted(run.fired) == sorted(faults), run.output[-6000:]
    assert "state    from the checkpoint of iteration 8" in run.output
    assert run.records("final").keys() == {2, 5}
    assert_same_training(run, calm)
