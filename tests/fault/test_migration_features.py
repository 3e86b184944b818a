"""Layers move in jobs of every feature: no bit changes; and a worker is lost on the way, and losses stay the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.migrations import (
    Job,
    assert_layers_once,
    assert_nothing_stale,
    assert_same_bits,
    assert_same_training,
    splits,
)
from tests.fault.runs import Run
from tests.fault.settings import RECOMPUTE
from tests.fault.warm_launcher import WarmLauncher

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(700)]

OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
MASKED = ("--data-path=DOCUMENTS", "--split=1,0,0", "--eod-mask-loss")
"""Documents end within samples; the test puts their path in."""
FP16 = (
    "--fp16", "--accumulate-allreduce-grads-in-fp32", "--initial-loss-scale=360448", "--loss-scale-window=1",
    "--hysteresis=1",
)  # fmt: skip
"""Every second step overflows."""
GRID = Job(layers=(3, 2), data=2)
JOBS = {
    "tied": replace(GRID, tied=True),
    "tied-three-stages": Job(layers=(2, 2, 2), tied=True),
    "gpt": replace(GRID, llama=False, tied=True, more=("--position-embedding-type=learned_absolute",)),
    "gpt-untied": replace(GRID, llama=False),
    "bf16": replace(GRID, more=("--bf16",)),
    "bf16-tied-overlap": replace(GRID, tied=True, more=("--bf16", *OVERLAP)),
    "fp16": replace(GRID, more=FP16),
    "fp16-static": replace(GRID, tied=True, more=(*FP16[:2], "--loss-scale=777")),
    "bf16-reduced": replace(GRID, more=("--bf16", "--grad-reduce-in-bf16", "--elastic-consistency=statistical")),
    "overlap": replace(GRID, more=OVERLAP),
    "overlap-three-cells": Job(layers=(3, 2), data=3, more=OVERLAP),
    "tensor-parallel": replace(GRID, tensor=2, data=1),
    "sequence-parallel": replace(GRID, tensor=2, tied=True, more=("--sequence-parallel", *OVERLAP)),
    "per-token": replace(GRID, data_flags=MASKED, more=("--calculate-per-token-loss",)),
    "masked": replace(GRID, data_flags=MASKED, llama=False, more=("--reset-position-ids",)),
    "recompute": replace(GRID, more=RECOMPUTE),
    "recompute-selective": replace(GRID, llama=False, more=("--recompute-granularity=selective", *OVERLAP)),
    "two-backups": replace(GRID, more=("--elastic-snapshot-replicas=2",)),
    "whole-copies": replace(GRID, more=("--elastic-snapshot=copy",)),
    "compared-copies": replace(GRID, more=("--elastic-snapshot-verify-interval=2",)),
    "warm-up-and-loaders": replace(
        GRID, more=("--lr-warmup-iters=12", "--log-params-norm", "--log-num-zeros-in-grad"), clip=0.0
    ),
}


def with_documents(job: Job, documents: Path) -> Job:
    return replace(job, data_flags=tuple(flag.replace("DOCUMENTS", str(documents)) for flag in job.data_flags))


def sequence_of(job: Job) -> tuple[tuple[int, ...], ...]:
    """A layer goes to the last stage; then all but one come to the first."""
    first, *middle, last = job.layers
    return (first - 1, *middle, last + 1), (first + last - 1, *middle, 1)


@pytest.mark.parametrize("name", JOBS)
def test_layers_move_with_every_feature(
    name: str, documents: Path, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    job = with_documents(JOBS[name], documents)
    sequence = sequence_of(job)
    asked = [f"1 rebalance {','.join(map(str, layers))}" for layers in sequence]
    run = job.run(tmp_path / "run", warm, *asked)
    calm = undisturbed(job)
    assert splits(run) == list(sequence)
    assert_layers_once(run, sequence[-1])
    assert_same_bits(run, calm)
    assert run.gradient_norms == pytest.approx(calm.gradient_norms, abs=1.1e-3), "more than the last printed digit"
    assert_nothing_stale(run)


@pytest.mark.parametrize("phase", ["migrate-hand-over", "migrate-rebuild"])
@pytest.mark.parametrize("name", JOBS)
def test_a_worker_is_lost_on_the_way_with_every_feature(
    name: str, phase: str, documents: Path, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    job = with_documents(replace(JOBS[name], clip=1.0), documents)
    if "--elastic-snapshot=copy" in job.more and phase == "migrate-hand-over":
        pytest.skip("nothing is handed over where backups get whole copies")
    worker = job.workers - 1
    fault = f"kill:worker={worker}@step=3,phase={phase}"
    (sequence, _) = sequence_of(job)
    run = job.run(tmp_path / "run", warm, f"3 rebalance {','.join(map(str, sequence))}", faults=[fault])
    assert run.fired == [fault], run.output[-8000:]
    loose = {"relative": 1e-4, "state_error": 5e-2} if {"--bf16", "--fp16"} & set(job.more) else {}
    if "--grad-reduce-in-bf16" in job.more:  # sums of gradients are rounded to 8 bits
        loose["relative"] = 1e-3
    assert_same_training(run, undisturbed(job), **loose)
    assert_nothing_stale(run)
