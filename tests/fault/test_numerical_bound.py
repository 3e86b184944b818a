"""At ``--elastic-consistency numerical`` events change losses and gradient norms by rounding: within the stated bound.

The bound is that of docs/consistency.md. The events are what changes sums most: layers on other stages, micro-batches
joined to larger items, and fewer cells. With dropout: masks that moved would exceed the bound a hundredfold.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.migrations import Job, events, splits
from tests.fault.runs import Run
from tests.fault.traces import read_trace
from tests.fault.warm_launcher import WarmLauncher

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]

BOUND = {"fp32": {"loss": 2e-6, "norm": 1e-5}, "bf16": {"loss": 2e-4, "norm": 2e-3}}
"""Largest relative deviations, by what passes compute in."""
PRECISION = {"fp32": (), "bf16": ("--bf16",)}
UPSTREAM = ("--elastic-rng=megatron", "--elastic-consistency=statistical")
STEPS = 50
DROPOUT = ("--hidden-dropout=0.1", "--attention-dropout=0.1")
GRID = Job(layers=(3, 2), data=3, per_row=4, steps=STEPS, clip=1.0, more=("--micro-batch-size=2", *DROPOUT))
ASKED = ("2 rebalance 1,4", "2 rebalance 4,1")
"""Before the losses: then nothing else is planned, so both are carried out within a few steps."""
FAULTS = ("kill:worker=4@step=22,phase=backward,microbatch=0", "kill:worker=0@step=30,phase=reduce")


def numbers(run: Run) -> dict[tuple[str, int], float]:
    """(loss or norm, step) -> the exact number. Every worker that knows it tells the same."""
    found: dict[tuple[str, int], float] = {}
    for step in read_trace(run.folder).steps:
        for name, value in (("loss", step.loss), ("norm", step.norm)):
            if value is not None:
                assert found.setdefault((name, step.step), value) == value, (name, step)
    return found


def deviate(job: Job, warm: WarmLauncher, folder: Path) -> dict[str, list[float]]:
    """Train with and without events. Relative deviations of losses and of norms, by step."""
    traced = {"ELAS_TEST_TRACE": "1"}
    calm = job.run(folder / "calm", warm, mode="off", environ=traced)
    run = job.run(folder / "run", warm, *ASKED, faults=FAULTS, environ=traced)
    assert (run.code, calm.code) == (0, 0), run.output[-6000:] if run.code else calm.output[-6000:]
    assert sorted(run.fired) == sorted(FAULTS), run.output[-8000:]
    assert len(events(run, "recovery")) == 2 and splits(run)[:2] == [(1, 4), (4, 1)]
    sizes = {size for record in run.records("final").values() for size in record["items"]}
    assert sizes - {2}, "no micro-batch was cut or joined"
    assert run.samples == calm.samples and run.iterations == calm.iterations
    ours, theirs = numbers(run), numbers(calm)
    assert ours.keys() == theirs.keys() == {(name, step) for name in ("loss", "norm") for step in range(STEPS)}
    found = {
        name: [abs(ours[name, step] / theirs[name, step] - 1) for step in range(STEPS)] for name in ("loss", "norm")
    }
    print({name: f"{max(values):.1e}" for name, values in found.items()})
    return found


@pytest.mark.parametrize("precision", BOUND)
def test_losses_and_norms_stay_within_the_bound(precision: str, warm: WarmLauncher, tmp_path: Path) -> None:
    found = deviate(replace(GRID, more=(*GRID.more, *PRECISION[precision])), warm, tmp_path)
    for name, bound in BOUND[precision].items():
        assert max(found[name]) <= bound, f"{name}: {found[name]}"
    assert any(found["loss"]), "no sum was made in another order, so the bound says nothing"
    assert not any(found["loss"][:2]), "equal before the first event"


def test_masks_that_move_exceed_the_bound(warm: WarmLauncher, tmp_path: Path) -> None:
    """With upstream's streams, for which there is no bound."""
    found = deviate(replace(GRID, more=(*GRID.more, *UPSTREAM)), warm, tmp_path)
    for name, bound in BOUND["fp32"].items():
        assert max(found[name]) > 50 * bound, f"{name}: {found[name]}"
