"""What only a whole job with Megatron's own loop and schedule runs into; docs/known-traps.md has the list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fault.runs import Run, assert_nothing_stale, assert_same_training, run_job

pytestmark = [pytest.mark.process, pytest.mark.timeout(500)]

OVERLAP = ("--pipeline-model-parallel-size=2", "--overlap-grad-reduce", "--overlap-param-gather")
MEASURED = ("--timing-log-level=2", "--log-params-norm", "--log-timers-to-tensorboard")
WARMUP = ("--lr-warmup-iters=12",)
"""A learning rate of the wrong step differs by a tenth or more."""


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The undisturbed run."""
    return run_job(tmp_path_factory.mktemp("calm") / "run", (*OVERLAP, *MEASURED, *WARMUP), workers=4)


@pytest.mark.parametrize(
    "faults",
    [
        # The first loss takes back a step that is committed, with its learning rate, and cuts off the measurements
        # after it. In the second one worker 2 is in a gather inside a forward pass, with timers running.
        ["kill:worker=0@step=3,phase=between", "kill:worker=3@step=7,phase=forward,microbatch=0"],
        # Worker 1 has started to reduce its gradients.
        pytest.param(["kill:worker=0@step=5,phase=backward,microbatch=3"], marks=pytest.mark.slow),
    ],
    ids=["in-a-log-and-a-gather", "in-a-reduction"],
)
def test_overlapped_communication_timers_and_logs_are_cut_short(faults: list[str], calm: Run, tmp_path: Path) -> None:
    run = run_job(tmp_path / "run", (*OVERLAP, *MEASURED, *WARMUP), workers=4, faults=faults)
    assert run.fired == faults, run.output[-6000:]
    assert_same_training(run, calm)
    assert "Traceback" not in run.output
    assert_nothing_stale(run)


@pytest.mark.slow
@pytest.mark.parametrize("worker", [0, 3])
def test_a_worker_killed_inside_its_update_has_nobody_make_it_twice(worker: int, calm: Run, tmp_path: Path) -> None:
    # Timers of this level begin with barriers, also right behind the update.
    run = run_job(
        tmp_path / "run", (*OVERLAP, *MEASURED, *WARMUP), workers=4,
        environ={"ELAS_TEST_KILL_IN_UPDATE": f"{worker}@5"},
    )  # fmt: skip
    assert (run.folder / "killed_in_update").exists(), run.output[-6000:]
    assert "resumed  step 6 on 3 of 4 workers" in run.output, "the step was not finished"
    assert_same_training(run, calm)


@pytest.mark.slow
def test_a_step_whose_gradient_norm_is_not_a_number_is_finished_by_the_survivors(tmp_path: Path) -> None:
    # Unchecked, Megatron clips by the norm, NaN or not, and trains on.
    flags = (*OVERLAP, "--no-check-for-nan-in-loss-and-grad", "--lr=1e30", "--min-lr=1e29")
    fault = "kill:worker=1@step=3,phase=optimizer"
    calm = run_job(tmp_path / "calm", flags, workers=4, steps=6)
    run = run_job(tmp_path / "run", flags, workers=4, steps=6, faults=[fault])
    assert run.fired == [fault] and run.code == calm.code == 0, run.output[-6000:]
    assert "resumed  step 4 on 3 of 4 workers" in run.output, "the step was not finished"
    for job in (run, calm):
        norms = re.findall(r"iteration +(\d+)/.*? grad norm: (\S+)", job.output)
        assert [number for number, _ in norms] == list("123456") and norms[3] == ("4", "nan"), norms


def test_a_narrow_stage_feeds_a_wider_one_whose_gathers_are_overlapped(tmp_path: Path) -> None:
    # Three cells wait for each other in their first forward pass; the one in front must have fed them all by then.
    calm = run_job(tmp_path / "calm", OVERLAP, workers=6, steps=7, batch=12)
    faults = ["kill:worker=0@step=2,phase=forward,microbatch=1", "kill:worker=1@step=4,phase=backward,microbatch=1"]
    run = run_job(tmp_path / "run", OVERLAP, workers=6, steps=7, batch=12, faults=faults)
    assert run.fired == faults
    assert "now      stage 0: [2] | stage 1: [3] [4] [5]" in run.output
    assert_same_training(run, calm)
