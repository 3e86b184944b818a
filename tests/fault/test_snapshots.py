"""Copies of optimizer shards at other workers cost no bit while nothing happens, and are the owner's bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fault.runs import Run, assemble, assert_same_training, run_job

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

AT = 4
STEPS = 7
CLIPPED = ("--clip-grad=0.5", "--weight-decay=0.1")
"""The gradient norm of the tiny model is above this in every step."""

PRECISIONS = [pytest.param((), id="fp32"), pytest.param(("--bf16",), id="bf16", marks=pytest.mark.slow)]


def run(folder: Path, *flags: str, faults: tuple[str, ...] = ()) -> Run:
    """A run of two stages and two cells each that records the state before step AT + 1."""
    grid = ("--pipeline-model-parallel-size=2", *CLIPPED)
    done = run_job(folder, (*grid, *flags), workers=4, steps=STEPS, faults=faults, versions=[AT + 1])
    assert done.code == 0 and done.fired == list(faults), done.output[-6000:]
    return done


def state(done: Run, record: str) -> dict[str, torch.Tensor]:
    """Master and moments of every parameter over all workers."""
    found = assemble(done.records(record))
    assert len(found) > 5
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
def test_training_has_the_same_bits_however_copies_are_kept(precision: tuple[str, ...], tmp_path: Path) -> None:
    off = run(tmp_path / "off", *precision, "--elastic-snapshot=off")
    expected = state(off, "final")
    for name, flags in {
        "replay": ("--elastic-snapshot=replay",),
        "copy": ("--elastic-snapshot=copy",),
        "twice": ("--elastic-snapshot-replicas=2",),
    }.items():
        other = run(tmp_path / name, *precision, *flags)
        assert other.losses == off.losses and other.gradient_norms == off.gradient_norms
        found = state(other, "final")
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key], value), f"{name}: {key}"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("worker", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_backup_has_made_the_update_of_a_lost_owner_with_the_same_bits(
    worker: int, precision: tuple[str, ...], tmp_path: Path
) -> None:
    calm = run(tmp_path / "calm", *precision)
    fault = f"kill:worker={worker}@step={AT},phase=commit"  # by then all others have prepared the step
    struck = run(tmp_path / "run", *precision, faults=(fault,))
    assert f"resumed  step {AT + 1} on" in struck.output, "the step was not finished but run again"
    assert_same_training(struck, calm)
    expected, found = state(calm, f"version.{AT + 1}.epoch.0"), state(struck, f"version.{AT + 1}.epoch.1")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
