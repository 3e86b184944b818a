"""fp16: the loss scale and its trackers are state of a step, and updates that are left out count as they would anyway.

Undisturbed, two steps are updated and the scale is doubled, two overflow and it is halved, and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.bitwise import assert_lives_equal
from tests.fault.migrations import (
    Job,
    assert_nothing_stale,
    assert_same_bits,
    assert_same_training,
    events,
    splits,
    whole_state,
)
from tests.fault.runs import Run, assert_same_norms, run_stock
from tests.fault.warm_launcher import WarmLauncher

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

LARGEST = 1.375 * 2**19
"""Of the scales with which no gradient of these jobs overflows."""
FP16 = ("--fp16", "--accumulate-allreduce-grads-in-fp32", f"--initial-loss-scale={LARGEST:.0f}")
DYNAMIC = (*FP16, "--loss-scale-window=2", "--hysteresis=2")
EVERY_SECOND = (*FP16, "--loss-scale-window=1", "--hysteresis=1")
"""Every second step overflows."""
JOB = Job(layers=(2, 2), data=2, clip=1.0, steps=12, more=DYNAMIC)
GROWS, OVERFLOWS, SHRINKS = 5, 6, 7
"""Steps: the scale is doubled, an update is left out, and one more, and the scale is halved."""
SAVING = ("--ckpt-format=torch_dist", f"--save-interval={SHRINKS}")

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


@pytest.mark.slow
def test_without_a_fault_scales_and_losses_are_those_of_stock_megatron(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    calm = undisturbed(JOB)
    check_calm(calm)
    stock = run_stock(tmp_path / "stock", JOB.flags, workers=4, model=JOB.model, steps=JOB.steps, batch=JOB.batch)
    assert stock.code == 0, stock.output[-6000:]
    assert stock.loss_scales == calm.loss_scales
    assert stock.losses == pytest.approx(calm.losses, rel=1e-5)
    assert stock.gradient_norms == pytest.approx(calm.gradient_norms, abs=1.1e-3), "more than the last printed digit"


@pytest.mark.slow
@pytest.mark.parametrize("worker", [0, 3])
@pytest.mark.parametrize(
    ("step", "phase"),
    [
        *((GROWS, phase) for phase in ("backward", "snapshot", "norm", "optimizer", "gather", "commit", "between")),
        *((OVERFLOWS, phase) for phase in ("backward", "reduce", "snapshot", "commit", "between")),
        *((SHRINKS, phase) for phase in ("forward", "snapshot", "commit", "between")),
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


def test_a_loss_when_the_scale_has_grown_and_the_norm_is_unknown(
    undisturbed: Undisturbed, warm: WarmLauncher, tmp_path: Path
) -> None:
    job = Job(layers=(2,), data=2, clip=1.0, steps=4, more=EVERY_SECOND)
    calm = undisturbed(job)
    assert calm.loss_scales == [(2 * LARGEST, False), (LARGEST, True)] * 2
    fault = "kill:worker=1@step=2,phase=norm"
    run = job.run(tmp_path / "run", warm, mode="off", faults=[fault])
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


@pytest.mark.slow
def test_a_loss_before_the_first_update_while_all_steps_overflow(
    undisturbed: Undisturbed, warm: WarmLauncher, tmp_path: Path
) -> None:
    job = replace(JOB, more=(*JOB.more, f"--initial-loss-scale={8 * LARGEST:.0f}", "--hysteresis=1"))
    calm = undisturbed(job)
    assert [skipped for _, skipped in calm.loss_scales[:5]] == [True, True, True, False, False]
    fault = "kill:worker=3@step=1,phase=snapshot"
    run = job.run(tmp_path / "run", warm, mode="off", faults=[fault])
    assert run.fired == [fault] and (run.code, calm.code) == (0, 0), run.output[-6000:]
    assert run.loss_scales == calm.loss_scales and run.samples == calm.samples
    assert run.losses == pytest.approx(calm.losses, rel=1e-4)
    assert_same_norms(run.gradient_norms, calm.gradient_norms)
    ours, theirs = whole_state(run), whole_state(calm)
    assert ours.keys() == theirs.keys()
    for key, want in theirs.items():
        scale = want.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
        assert float(((ours[key] - want).abs() / scale).amax()) < 5e-2, key


FEATURES = {
    "tied-overlap": replace(JOB, tied=True, more=(*EVERY_SECOND, "--overlap-grad-reduce", "--overlap-param-gather")),
    "sequence-parallel": replace(JOB, tensor=2, data=1, more=(*EVERY_SECOND, "--sequence-parallel")),
    "per-token": replace(
        JOB, more=(*EVERY_SECOND, "--calculate-per-token-loss", f"--initial-loss-scale={LARGEST / 64:.0f}")
    ),
    "whole-copies": replace(JOB, more=(*DYNAMIC, "--elastic-snapshot=copy")),
    "two-backups": replace(JOB, more=(*DYNAMIC, "--elastic-snapshot-replicas=2", "--log-num-zeros-in-grad")),
    "sums-in-fp16": replace(
        JOB,
        more=(
            *(flag for flag in EVERY_SECOND if "accumulate" not in flag),
            f"--initial-loss-scale={LARGEST / 2:.0f}",
            "--elastic-consistency=statistical",
            "--elastic-rng=megatron",
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["norm", "snapshot"])
@pytest.mark.parametrize("name", FEATURES)
def test_a_loss_with_every_feature(
    name: str, phase: str, undisturbed: Undisturbed, warm: WarmLauncher, tmp_path: Path
) -> None:
    job = FEATURES[name]
    calm = undisturbed(job)
    skipped = [step for step, (_, skipped) in enumerate(calm.loss_scales) if skipped]
    updated = [step for step, (_, skipped) in enumerate(calm.loss_scales) if not skipped]
    assert skipped and updated, "both kinds of steps are there"
    step = next(step for step in (updated if phase == "norm" else skipped) if step > 2)
    worker = job.workers - 1
    fault = f"kill:worker={worker}@step={step},phase={phase}"
    run = job.run(tmp_path / "run", warm, mode="off", faults=[fault])
    assert run.fired == [fault], run.output[-6000:]
    assert_same(run, calm)


@pytest.mark.slow
def test_a_loss_with_a_fixed_scale(undisturbed: Undisturbed, warm: WarmLauncher, tmp_path: Path) -> None:
    job = replace(JOB, more=(*FP16, "--loss-scale=777"))
    calm = undisturbed(job)
    fault = f"kill:worker=3@step={GROWS},phase=norm"
    run = job.run(tmp_path / "run", warm, mode="off", faults=[fault])
    assert run.fired == [fault], run.output[-6000:]
    assert run.loss_scales == calm.loss_scales == [(777.0, False)] * job.steps
    assert_same_training(run, calm, relative=1e-4, state_error=5e-2)
    assert_nothing_stale(run)


@pytest.mark.slow
def test_state_that_migrates_follows_steps_that_are_left_out(
    undisturbed: Undisturbed, warm: WarmLauncher, tmp_path: Path
) -> None:
    job = replace(JOB, layers=(3, 2), clip=0.0, steps=16, more=EVERY_SECOND)
    calm = undisturbed(job)
    run = job.run(tmp_path / "run", warm, "1 rebalance 2,3", "6 rebalance 3,2", "11 rebalance 2,3")
    assert splits(run) == [(2, 3), (3, 2), (2, 3)]
    streamed = {
        step
        for event in events(run, "migration")
        for step in range(event["resume_step"] - event["streamed_steps"], event["resume_step"])
    }
    assert any(calm.loss_scales[step][1] for step in streamed), f"no step of {streamed} was left out"
    assert run.loss_scales == calm.loss_scales
    assert_same_bits(run, calm)
    assert_nothing_stale(run)


@pytest.mark.slow
def test_a_spare_that_gets_a_seat_learns_the_scale_and_how_many_steps_were_updated(
    undisturbed: Undisturbed, warm: WarmLauncher, tmp_path: Path
) -> None:
    job = Job(layers=(2,), data=3, tensor=2, clip=1.0, more=EVERY_SECOND)
    calm = undisturbed(job)
    faults = ["kill:worker=1@step=2,phase=backward", "kill:worker=4@step=9,phase=norm"]
    left_out = [step for step in range(2, 10) if calm.loss_scales[step][1]]
    assert len(left_out) > 2, calm.loss_scales
    faults[1] = f"kill:worker=4@step={left_out[-1] + 1},phase=norm"
    run = job.run(tmp_path / "run", warm, mode="off", faults=faults)
    assert run.fired == faults, run.output[-6000:]
    assert "now      stage 0: [0,5] [2,3]" in run.output
    assert_same(run, calm)


@pytest.mark.slow
def test_a_checkpoint_that_takes_the_states_place_has_the_scale(
    undisturbed: Undisturbed, warm: WarmLauncher, tmp_path: Path
) -> None:
    """Both cells of a stage are lost, which keep each other's copies; saved was between two steps left out."""
    calm = undisturbed(JOB)
    faults = [f"kill:worker={worker}@step={SHRINKS + 2},phase=forward" for worker in (2, 3)]
    flags = (*SAVING, f"--save={tmp_path / 'checkpoints'}")
    run = JOB.run(tmp_path / "run", warm, mode="off", faults=faults, flags=flags)
    assert sorted(run.fired) == sorted(faults), run.output[-6000:]
    assert f"resumed  step {SHRINKS} on 2 of 4 workers" in run.output
    assert_same(run, calm)


@pytest.mark.slow
def test_a_saved_scale_goes_on_in_stock_megatron_and_in_another_grid(
    undisturbed: Undisturbed, warm: WarmLauncher, tmp_path: Path
) -> None:
    calm, checkpoints = undisturbed(JOB), tmp_path / "checkpoints"
    fault = f"kill:worker=0@step={OVERFLOWS},phase=snapshot"
    run = JOB.run(tmp_path / "run", warm, mode="off", faults=[fault], flags=(*SAVING, f"--save={checkpoints}"))
    assert run.fired == [fault]
    assert_same(run, calm)
    loading = ("--ckpt-format=torch_dist", f"--load={checkpoints}", f"--ckpt-step={SHRINKS}")
    stock = run_stock(
        tmp_path / "stock", (*JOB.flags, *loading), workers=4, model=JOB.model, steps=JOB.steps, batch=JOB.batch
    )
    other = replace(JOB, layers=(4,), data=2)
    elastic = other.run(tmp_path / "elastic", warm, mode="off", flags=loading)
    for goes_on in (stock, elastic):
        assert goes_on.code == 0, goes_on.output[-6000:]
        assert [scale for scale, _ in goes_on.loss_scales] == [scale for scale, _ in calm.loss_scales[SHRINKS:]]
        # The line of the first step, which is left out, has no loss, and the next one is an average with it.
        assert goes_on.losses[-3:] == pytest.approx(calm.losses[-3:], rel=1e-4)


@pytest.mark.slow
def test_at_bitwise_a_saved_scale_goes_on_with_other_rows_and_no_bit_changes(
    warm: WarmLauncher, tmp_path: Path
) -> None:
    """Losses are divided by the micro-batches of a row, so with four rows they would overflow at half the scale."""
    bitwise, traced = ("--elastic-consistency=bitwise",), {"ELAS_TEST_TRACE": "1"}
    saving = (*SAVING, f"--save={tmp_path / 'saved'}", f"--exit-interval={SHRINKS}")
    loading = (*SAVING[:1], f"--load={tmp_path / 'saved'}")
    calm = JOB.run(tmp_path / "calm", warm, flags=bitwise, environ=traced)
    first = JOB.run(tmp_path / "first", warm, flags=(*bitwise, *saving), environ=traced)
    assert first.code == 0, first.output[-6000:]
    other = replace(JOB, layers=(4,), data=4, per_row=1)
    run = other.run(tmp_path / "run", warm, flags=(*bitwise, *loading), environ=traced)
    assert "losses are divided as in the run of the checkpoint, on 2 data-parallel rows and not 4" in run.output
    assert_lives_equal([first, run], [0, SHRINKS], calm)
