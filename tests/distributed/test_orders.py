"""Workers are lost in the middle of steps that run orders of a plan: split backward, any order of backward passes.

Plans get orders whatever the planner gives, for the grid at launch and for every one after a loss. What is trained is
compared with the undisturbed run of the stock schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.conftest import TIMEOUT_S
from tests.distributed.flag_sets import STEPS, FlagSet
from tests.distributed.test_flags import assert_same_columns, assert_same_evaluations
from tests.fault.runs import Run, assert_nothing_stale, assert_same_training, run_job
from tests.fault.settings import BY_PROFILE
from tests.fault.test_a_stage_is_lost import PP4, assert_same_model
from tests.schedule.plan_orders import Kind

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(3 * TIMEOUT_S)]

LAZY = "--overlap-grad-reduce --overlap-param-gather"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job whose plans have orders of that kind."""

    name: str
    kind: Kind
    flags: FlagSet


def flag_set(flags: str, *faults: str, tensor: int = 1, pipeline: int = 2, data: int = 2, per_row: int = 3) -> FlagSet:
    return FlagSet(
        name="", counted="answers", tensor=tensor, pipeline=pipeline, data=data, batch=data * per_row, flags=flags,
        first=f"kill:{faults[0]}", second=f"kill:{faults[1]}" if len(faults) > 1 else "",
    )  # fmt: skip


CASES = (
    Case(
        name="2x2-split", kind="split",
        flags=flag_set(
            LAZY, "worker=3@step=2,phase=backward,microbatch=1", "worker=0@step=4,phase=forward,microbatch=2"
        ),
    ),
    Case(name="2x2-late", kind="late", flags=flag_set("", "worker=1@step=2,phase=backward,microbatch=2")),
    Case(name="2x2-whole", kind="whole", flags=flag_set(LAZY, "worker=2@step=3,phase=reduce")),
    Case(
        name="2x3-uneven", kind="split",
        flags=flag_set(
            f"{LAZY} --calculate-per-token-loss", "worker=0@step=2,phase=backward,microbatch=1",
            "worker=4@step=4,phase=backward,microbatch=0", data=3,
        ),
    ),
    Case(
        name="sequence-parallel", kind="late",
        flags=flag_set("--sequence-parallel", "worker=5@step=3,phase=backward,microbatch=2", tensor=2),
    ),
)  # fmt: skip


def train(case: Case, folder: Path, documents: Path, orders: str, *faults: str) -> Run:
    return run_job(
        folder, (), workers=case.flags.workers, faults=faults, steps=STEPS, batch=case.flags.batch,
        model=case.flags.command_line(documents), timeout_s=TIMEOUT_S,
        launcher_flags=BY_PROFILE, environ={"ELAS_TEST_ORDERS": orders},
    )  # fmt: skip


def assert_ran(run: Run, kind: Kind) -> None:
    """All workers ended with orders of that kind."""
    for record in run.records("final").values():
        kinds = [word[0] for word in record["order"].split()]
        assert kinds.count("F") == kinds.count("B") == len(record["items"])
        assert kinds.count("W") == (0 if kind == "whole" else len(record["items"]))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_a_worker_is_lost_in_a_step_that_runs_an_order(case: Case, documents: Path, tmp_path: Path) -> None:
    faults = tuple(filter(None, (case.flags.first, case.flags.second)))
    calm = train(case, tmp_path / "calm", documents, "none")
    run = train(case, tmp_path / "run", documents, case.kind, *faults)
    assert run.fired == list(faults), run.output[-6000:]
    assert {record["order"] for record in calm.records("final").values()} == {""}
    assert_ran(run, case.kind)
    assert_same_training(run, calm)
    assert_nothing_stale(run)
    assert_same_evaluations(run, calm, 1e-5)
    assert_same_columns(run, calm, 1e-5)


def test_a_stage_is_lost_in_a_step_that_runs_an_order(tmp_path: Path) -> None:
    fault = "kill:worker=2@step=5,phase=backward,microbatch=3"
    calm, run = (
        run_job(
            tmp_path / orders, (PP4,), workers=4, faults=faults, timeout_s=TIMEOUT_S, launcher_flags=BY_PROFILE,
            environ={"ELAS_TEST_ORDERS": orders},
        )
        for orders, faults in (("none", ()), ("split", (fault,)))
    )  # fmt: skip
    assert run.fired == [fault], run.output[-6000:]
    assert_ran(run, "split")
    assert_same_model(run, calm)
    assert_nothing_stale(run)
