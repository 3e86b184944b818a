"""Optimizer shards are re-cut for fewer replicas without changing a bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.fault.runs import Run, assemble, assert_nothing_stale, run_job

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

AT = 4


def lose_one(tmp_path: Path, flags: tuple[str, ...], workers: int, worker: int) -> Run:
    """Kill a worker in mid-step and record the state before every run of that step and the one before."""
    fault = f"kill:worker={worker}@step={AT},phase=backward,microbatch=1"
    run = run_job(tmp_path / "run", flags, workers=workers, faults=[fault], versions=[AT - 1, AT], steps=8)
    assert run.fired == [fault], run.output[-6000:]
    assert run.code == 0, run.output[-6000:]
    assert_nothing_stale(run)
    return run


@pytest.mark.parametrize(
    ("flags", "workers", "lost", "before", "after", "precision"),
    [
        pytest.param(*case, precision, id=f"{name}-{precision}", marks=() if quick == precision else pytest.mark.slow)
        for name, quick, case in (
            ("4-to-3", "fp32", ((), 4, 1, {0, 1, 2, 3}, {0, 2, 3})),
            ("2-to-1", "bf16", (("--pipeline-model-parallel-size=2",), 4, 3, {2, 3}, {2})),
        )
        for precision in ("fp32", "bf16")
    ],
)
def test_masters_moments_and_step_are_equal_bit_for_bit_by_name(
    flags: tuple[str, ...], workers: int, lost: int, before: set[int], after: set[int], precision: str, tmp_path: Path
) -> None:
    run = lose_one(tmp_path, (*flags, *(["--bf16"] if precision == "bf16" else [])), workers, lost)
    version = int(re.search(r"resumed  step (\d+)", run.output).group(1))  # type: ignore[union-attr]
    old = run.records(f"version.{version}.epoch.0")
    new = run.records(f"version.{version}.epoch.1")
    stage = old[lost]["stage"]
    assert {w for w, r in old.items() if r["stage"] == stage} == before
    assert {w for w, r in new.items() if r["stage"] == stage} == after
    assert {r["step"] for r in old.values()} == {r["step"] for r in new.values()} == {float(version)}
    was, now = assemble(old), assemble(new)
    assert was.keys() == now.keys() and len(was) > 5
    for key, value in was.items():
        assert torch.equal(value, now[key]), key
        assert value[1].abs().sum() > 0, f"{key}: its first moment is zero, so the comparison says nothing"


@pytest.mark.slow
def test_a_bf16_parameter_is_the_cast_of_its_master_after_the_recovery(tmp_path: Path) -> None:
    run = lose_one(tmp_path, ("--bf16",), 4, 2)
    records = run.records("final")
    masters = assemble(records)
    for record in records.values():
        for name, param in record["parameters"].items():
            master = masters[record["stage"], record["lane"], name][0]
            assert torch.equal(param.view(-1), master.to(torch.bfloat16)), name
