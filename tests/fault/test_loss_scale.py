"""fp16: the loss scale and its trackers are state of a step, and updates that are left out count as they would anyway.

Undisturbed, two steps are updated and the scale is doubled, two overflow and it is halved, and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fault.migrations import (
    Job,
    assert_nothing_stale,
    assert_same_training,
)
from tests.fault.runs import Run
from tests.fault.warm_launcher import WarmLauncher

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

LARGEST = 1.375 * 2**20
"""Of the scales with which no gradient of these jobs overflows."""
FP16 = ("--fp16", "--accumulate-allreduce-grads-in-fp32", f"--initial-loss-scale={LARGEST:.0f}")
DYNAMIC = (*FP16, "--loss-scale-window=2", "--hysteresis=2")
EVERY_SECOND = (*FP16, "--loss-scale-window=1", "--hysteresis=1")
"""Every second step overflows."""
JOB = Job(layers=(2, 2), data=2, clip=1.0, steps=12, more=DYNAMIC)
GROWS, OVERFLOWS, SHRINKS = 5, 6, 7
"""Steps: the scale is doubled, an update is left out, and one more, and the scale is halved."""
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")

Undisturbed = Callable[..., Run]


def check_calm(calm: Run) -> None:
    """The undisturbed run does what the steps are named after."""
    assert calm.code == 0, calm.output[-6000:]
    period = [(LARGEST, False), (2 * LARGEST, False), (2 * LARGEST, True), (LARGEST, True)]
    assert calm.loss_scales == period * 3


def assert_same(run: Run, calm: Run) -> None:
    """The same updates were left out, with the same scales; and the rest to rounding of fp16 weights."""
    assert run.loss_scales == calm.loss_scales, run.output[-6000:]
    assert any(skipped for _, skipped in calm.loss_scales)
    assert_same_training(run, calm, relative=1e-4, state_error=5e-2)
    assert_nothing_stale(run)


@pytest.mark.parametrize(
    ("step", "phase", "worker"),
    [
        pytest.param(GROWS, "norm", 3, id="grows-norm"),
        *(
            pytest.param(step, phase, worker, id=f"{name}-{phase}-{worker}", marks=pytest.mark.slow)
            for step, name, phases in (
                (GROWS, "grows", ("backward", "snapshot", "norm", "optimizer", "gather", "commit", "between")),
                (OVERFLOWS, "overflows", ("backward", "reduce", "snapshot", "commit", "between")),
                (SHRINKS, "shrinks", ("forward", "snapshot", "commit", "between")),
            )
            for phase in phases
            for worker in (0, 3)
            if (name, phase, worker) != ("grows", "norm", 3)
        ),
    ],
)
def test_a_loss_around_a_step_that_changes_the_scale(
    step: int, phase: str, worker: int, undisturbed: Undisturbed, warm: WarmLauncher, tmp_path: Path
) -> None:
    fault = f"kill:worker={worker}@step={step},phase={phase}"
    calm = undisturbed(JOB)
    check_calm(calm)
    run = JOB.run(tmp_path / "run", warm, mode="off", faults=[fault])
    assert run.fired == [fault], run.output[-6000:]
    assert_same(run, calm)


@pytest.mark.slow
@pytest.mark.parametrize("deaf", [0, 1, 3])
@pytest.mark.parametrize(("step", "what"), [(GROWS, "norm"), (OVERFLOWS, "found-inf"), (SHRINKS, "found-inf")], ids=str)
def test_one_whom_the_answer_does_not_reach_finishes_the_step_as_the_others(
    step: int, what: str, deaf: int, undisturbed: Undisturbed, warm: WarmLauncher, tmp_path: Path
) -> None:
    environ = {"ELAS_TEST_DEAF": f"{deaf},2@{step},{what}"}
    run = JOB.run(tmp_path / "run", warm, mode="off", environ=environ)
    assert (run.folder / "deaf").exists() and (run.folder / "victim").exists(), run.output[-6000:]
    assert f"resumed  step {step + 1} on 3 of 4 workers" in run.output, "the step is not run again"
    assert_same(run, undisturbed(JOB))
