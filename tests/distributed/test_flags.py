"""Two losses leave training as it would have been, under further sets of Megatron's flags (flag_sets.py)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.conftest import TIMEOUT_S
from tests.distributed.flag_sets import FLAG_SETS, STEPS, FlagSet
from tests.fault.runs import Run, assert_nothing_stale, assert_same_training, run_job

EVALUATED = re.compile(r"(validation loss at [^|]*)\| lm loss value: ([0-9.E+-]+)")
COLUMNS = re.compile(
    r"(learning rate|decoupled learning rate|num zeros|params norm|number of skipped iterations): *([0-9.E+-]+)"
)


def train(flags: FlagSet, folder: Path, documents: Path, *faults: str) -> Run:
    """One job."""
    steps = None if "--train-samples" in flags.flags else STEPS
    return run_job(
        folder, (), workers=flags.workers, faults=faults, steps=steps, batch=flags.batch,
        model=flags.command_line(documents), timeout_s=TIMEOUT_S,
    )  # fmt: skip


@pytest.mark.process
@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize(
    "flags", [pytest.param(f, id=f.name, marks=() if f.quick else pytest.mark.slow) for f in FLAG_SETS]
)
def test_two_losses_do_not_change_training(flags: FlagSet, documents: Path, tmp_path: Path) -> None:
    faults = tuple(filter(None, (flags.first, flags.second)))
    calm = train(flags, tmp_path / "calm", documents)
    run = train(flags, tmp_path / "run", documents, *faults)
    assert run.fired == list(faults), run.output[-6000:]
    relative, state = (1e-4, 5e-2) if flags.half else (1e-5, 1e-3)
    assert_same_training(run, calm, relative=relative, state=state)
    assert len(run.losses) == STEPS and calm.losses[0] != calm.losses[-1]
    assert_nothing_stale(run)
    assert_same_evaluations(run, calm, relative)
    assert_same_columns(run, calm, relative)
    if "--clip-grad=0.05" in flags.flags:
        assert min(calm.gradient_norms) > 0.05, "nothing was clipped"


def assert_same_evaluations(run: Run, calm: Run, relative: float) -> None:
    """Every evaluation once, with the same loss."""
    ours, theirs = EVALUATED.findall(run.output), EVALUATED.findall(calm.output)
    assert [what for what, _ in ours] == [what for what, _ in theirs]
    assert len(theirs) >= 2
    for (what, got), (_, want) in zip(ours, theirs, strict=True):
        assert float(got) == pytest.approx(float(want), rel=relative), what


def assert_same_columns(run: Run, calm: Run, relative: float) -> None:
    """Learning rates, zeros in the gradients and so on, line by line."""
    ours, theirs = COLUMNS.findall(run.output), COLUMNS.findall(calm.output)
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    assert len(theirs) >= 2 * STEPS
    for (name, got), (_, want) in zip(ours, theirs, strict=True):
        # The gradient of a key's bias is nothing but rounding, so now and then one of them is zero or is none.
        error = 4 if name == "num zeros" else 0
        assert float(got) == pytest.approx(float(want), rel=relative, abs=error), name
