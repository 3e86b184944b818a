"""Steps that are run again behind the training loop, which has counted their samples already, change no bit.

The loop is ahead where an owner and its backups are lost together, so that all return to a checkpoint, and where copies
are kept whole and a worker is lost before that of the newest state has left it. With dropout: a step that is run again
draws the masks of its own samples, and counts their tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.bitwise import assert_equal
from tests.fault.bitwise_cases import DROPOUT, EVALUATIONS, MASKED, PRECISIONS
from tests.fault.masks import merge
from tests.fault.migrations import Job
from tests.fault.runs import Run, assert_same_training
from tests.fault.traces import read_trace
from tests.fault.warm_launcher import WarmLauncher

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS, EVERY, AT = 13, 4, 10
"""In each run, from one checkpoint to the next, and before the step in which workers are lost together."""
LAST = 9
"""The step that is run again where copies are kept whole; an evaluation follows."""
BITWISE = ("--elastic-consistency=bitwise", *DROPOUT)
CHECKPOINTS = ("--ckpt-format=torch_dist", f"--save-interval={EVERY}")
COPY = ("--elastic-snapshot=copy", *EVALUATIONS)
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
FORWARD = "forward,microbatch=0"
HALF = PRECISIONS[-1]
ROWS = Job(layers=(2,), data=3, steps=STEPS, clip=0.1)
STAGES = Job(layers=(1, 1), data=2, steps=STEPS, clip=0.1)


def train(job: Job, folder: Path, warm: WarmLauncher, flags: Sequence[str], faults: Sequence[str] = ()) -> Run:
    """Run the job to its end, traced; all faults have struck."""
    environ = {"ELAS_TEST_TRACE": "1", "ELAS_TEST_MASKS": "1"}
    run = job.run(folder, warm, mode="off", faults=faults, flags=(*BITWISE, *flags), environ=environ, timeout_s=200)
    assert sorted(run.fired) == sorted(faults), run.output[-8000:]
    return run


def run_behind(run: Run, steps: Iterable[int]) -> set[int]:
    """Workers that ran any of these steps again after their loops had come past it. Each was begun in two epochs."""
    trace = read_trace(run.folder)
    begun = {(each.version, each.epoch) for each in trace.versions}
    steps = set(steps)
    assert all(len([epoch for version, epoch in begun if version == step]) > 1 for step in steps), sorted(begun)
    told = {(each.worker, each.step): each.epoch for each in trace.steps}
    return {
        each.worker
        for each in trace.versions
        if each.version in steps and told.get((each.worker, each.version), each.epoch) < each.epoch
    }


def assert_same_masks(run: Run, calm: Run, steps: Iterable[int]) -> None:
    """Survivors drew masks of the undisturbed run only, and all of them in these steps."""
    ours, theirs = merge(run.records("masks")), merge(calm.records("masks"))
    strange = sorted(ours.keys() - theirs.keys())
    assert strange == [], f"{len(strange)} masks of other samples, first {strange[0]}"
    different = sorted(draw for draw, mask in ours.items() if theirs[draw] != mask)
    assert different == [], f"{len(different)} masks differ, first {different[0]}"
    steps = set(steps)
    missing = sorted(draw for draw in theirs.keys() - ours.keys() if draw[0] in steps)
    assert missing == [], f"{len(missing)} masks were not drawn again, first {missing[0]}"


@pytest.mark.parametrize(
    ("job", "lost", "phase", "survivors", "flags"),
    [
        pytest.param(ROWS, (1, 2), FORWARD, {0}, (), id="one-is-left"),
        pytest.param(ROWS, (1, 2), FORWARD, {0}, (*HALF, *OVERLAP), id="one-is-left-fp16-overlap"),
        pytest.param(STAGES, (0, 1), FORWARD, {2, 3}, ("--bf16",), id="first-stage-is-lost"),
        # Nobody who knows the loss of the step before is left, nor has told it.
        pytest.param(STAGES, (3, 2), "between", {0, 1}, (), id="last-stage-is-lost-before-its-line"),
    ],
)
def test_steps_after_the_checkpoint_are_run_again_with_their_own_masks(
    job: Job,
    lost: tuple[int, int],
    phase: str,
    survivors: set[int],
    flags: tuple[str, ...],
    warm: WarmLauncher,
    tmp_path: Path,
) -> None:
    one, other = lost
    at = AT - 1 if phase == "between" else AT
    faults = [
        f"kill:worker={one}@step={at},phase={phase}",
        f"kill:worker={other}@step={at},phase=recovery",  # before its copies have gone anywhere
    ]
    calm = train(job, tmp_path / "calm", warm, (*CHECKPOINTS, f"--save={tmp_path / 'a'}", *flags))
    run = train(job, tmp_path / "run", warm, (*CHECKPOINTS, f"--save={tmp_path / 'b'}", *flags), faults)
    assert "from the checkpoint of iteration 8" in run.output
    assert run_behind(run, range(8, AT)) == survivors
    assert_equal(run, calm)
    assert_same_masks(run, calm, range(8, STEPS))


@pytest.mark.parametrize(
    ("job", "worker", "phase", "behind", "flags"),
    [
        pytest.param(ROWS, 1, "evaluate,microbatch=0", {0, 2}, (), id="evaluation"),
        pytest.param(STAGES, 3, "evaluate,microbatch=0", {0, 1, 2}, ("--bf16",), id="evaluation-last-stage"),
        pytest.param(STAGES, 0, "evaluate,microbatch=1", {1}, OVERLAP, id="evaluation-first-stage-overlap"),
        # The line of the step has not been printed, and the others may or may not have left the step.
        pytest.param(ROWS, 2, "between", set(), (), id="before-its-line"),
        pytest.param(STAGES, 3, "between", set(), (), id="before-its-line-last-stage"),
    ],
)
def test_a_step_whose_state_was_not_copied_is_run_again_with_its_own_masks(
    job: Job, worker: int, phase: str, behind: set[int], flags: tuple[str, ...], warm: WarmLauncher, tmp_path: Path
) -> None:
    fault = f"kill:worker={worker}@step={LAST},phase={phase}"
    calm = train(job, tmp_path / "calm", warm, (*COPY, *flags))
    run = train(job, tmp_path / "run", warm, (*COPY, *flags), [fault])
    assert behind <= run_behind(run, [LAST])
    assert_equal(run, calm)
    assert_same_masks(run, calm, range(LAST, STEPS))


def test_a_part_of_a_micro_batch_that_is_run_again_weighs_by_the_tokens_of_its_own_step(
    documents: Path, warm: WarmLauncher, tmp_path: Path
) -> None:
    """Three micro-batches of four samples; after the loss two cells have six samples each."""
    data = tuple(flag.replace("DOCUMENTS", str(documents)) for flag in MASKED)
    flags = ("--elastic-consistency=numerical", "--micro-batch-size=4", *COPY)
    job = replace(ROWS, per_row=4, data_flags=data, more=flags)
    fault = f"kill:worker=1@step={LAST},phase=evaluate,microbatch=0"
    calm = job.run(tmp_path / "calm", warm, mode="off")
    run = job.run(tmp_path / "run", warm, mode="off", faults=[fault], environ={"ELAS_TEST_TRACE": "1"})
    assert run.fired == [fault]
    assert {worker: record["items"] for worker, record in run.records("final").items()} == {0: [6], 2: [6]}
    assert run_behind(run, [LAST]) == {0, 2}
    assert_same_training(run, calm)
