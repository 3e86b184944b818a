"""At bitwise, losses of workers change no bit of losses, norms and states, however sums are cut and shared."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fault.bitwise import assert_equal
from tests.fault.runs import Run, run_job

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(700)]

LINE = re.compile(r"iteration +(\d+)/.*? num zeros: ([0-9.]+) \|.*? params norm: ([0-9.]+)")
VALIDATION = re.compile(r"(validation loss at iteration \d+[^|]*)\| lm loss value: ([0-9.E+-]+)")
WIDE = ("--hidden-size=192", "--ffn-hidden-size=512")
"""Parameters that torch divides among threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A grid, what is lost of it and when."""

    flags: tuple[str, ...]
    workers: int
    batch: int
    faults: tuple[str, ...]
    threads: int = 1


EVALUATED = ("--split=90,10,0", "--eval-interval=4", "--eval-iters=2", "--log-params-norm", "--log-num-zeros-in-grad")
DROPOUT = ("--attention-dropout=0.1", "--hidden-dropout=0.1")
CASES = {
    # 3 cells, then 2, then 1; 15 micro-batches, a number that is no power of two.
    "cells-fp32": Case(
        flags=(*EVALUATED, "--seed=3"),
        workers=3,
        batch=15,
        faults=(
            "kill:worker=1@step=4,phase=backward,microbatch=2",
            "kill:worker=2@step=7,phase=evaluate,microbatch=1",
        ),
    ),
    "stages-bf16": Case(
        flags=(*EVALUATED, *DROPOUT, "--pipeline-model-parallel-size=2", "--bf16"),
        workers=6,
        batch=12,
        faults=("kill:worker=4@step=4,phase=norm", "kill:worker=0@step=9,phase=optimizer"),
    ),
    "threads": Case(
        flags=(*EVALUATED, *WIDE), workers=3, batch=6, faults=("kill:worker=0@step=5,phase=gather",), threads=3
    ),
    "per-token": Case(
        flags=(*EVALUATED, "--pipeline-model-parallel-size=2", "--calculate-per-token-loss"),
        workers=4,
        batch=12,
        faults=("kill:worker=3@step=4,phase=reduce", "kill:worker=1@step=9,phase=forward,microbatch=3"),
    ),
}


def train(case: Case, folder: Path, faults: tuple[str, ...]) -> Run:
    return run_job(
        folder,
        ("--elastic-consistency=bitwise", *case.flags),
        workers=case.workers,
        batch=case.batch,
        faults=faults,
        timeout_s=300,
        environ={"ELAS_TEST_TRACE": "1", "OMP_NUM_THREADS": str(case.threads)},
    )


def lines(run: Run) -> list[tuple[str, ...]]:
    """Zeros and norms of parameters by iteration, and losses of evaluations, as printed."""
    return [*LINE.findall(run.output), *VALIDATION.findall(run.output)]


@pytest.mark.parametrize("name", CASES)
def test_no_bit_changes_when_workers_are_lost(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    calm = train(case, tmp_path / "calm", ())
    run = train(case, tmp_path / "run", case.faults)
    assert run.fired == list(case.faults), run.output[-6000:]
    assert_equal(run, calm)
    assert lines(run) == lines(calm) and len(lines(run)) >= 16 + 4
