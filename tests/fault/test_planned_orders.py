"""Plans that the planner makes after a loss have orders with split backward passes, and layers move besides.

The undisturbed run has Megatron's own schedule. No order is forced here: what the planner gives for a job of this size
has weight gradients apart, and if it has none, these tests fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.migrations import (
    Job,
    assert_nothing_stale,
    assert_same_bits,
    assert_same_training,
    events,
    splits,
)
from tests.fault.runs import Run
from tests.fault.settings import RECOMPUTE
from tests.fault.warm_launcher import WarmLauncher

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(700)]

OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
BITWISE = "--elastic-consistency=bitwise"
THREE = Job(layers=(4, 4, 4), data=2, per_row=4, steps=20, clip=1.0)
JOBS = {
    "plain": THREE,
    "tied-overlap": replace(THREE, tied=True, more=OVERLAP),
    "sequence-parallel": Job(
        layers=(3, 3), tensor=2, data=2, per_row=4, steps=20, clip=1.0, more=("--sequence-parallel", *OVERLAP)
    ),
    "gpt-recompute": replace(THREE, llama=False, more=RECOMPUTE),
    "bf16": replace(THREE, more=("--bf16",)),
    "weights-used-twice": replace(THREE, more=("--mlp-chunks-for-training=2", BITWISE, *OVERLAP)),
}
FIRST = "kill:worker=3@step=3,phase=backward,microbatch=1"


def assert_split(run: Run) -> None:
    """At the end every cell runs each item forward and backward, and somebody computes weight gradients apart."""
    records = run.records("final").values()
    for record in records:
        kinds = [word[0] for word in record["order"].split()]
        assert kinds.count("F") == kinds.count("B") == len(record["items"]), record["order"]
    assert any("W" in record["order"] for record in records), [record["order"] for record in records]


def loose(job: Job) -> dict[str, float]:
    return {"relative": 1e-4, "state_error": 5e-2} if "--bf16" in job.more else {}


@pytest.mark.parametrize("name", JOBS)
def test_a_loss_leads_to_split_backward_passes(
    name: str, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    job = JOBS[name]
    run = job.run(tmp_path / "run", warm, faults=[FIRST])
    calm = undisturbed(job)
    assert run.fired == [FIRST], run.output[-8000:]
    assert_split(run)
    assert {record["order"] for record in calm.records("final").values()} == {""}
    if BITWISE in job.more:
        assert_same_bits(run, calm)
    assert_same_training(run, calm, **loose(job))
    assert_nothing_stale(run)


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("worker", [0, 2, 5])
def test_a_worker_is_killed_in_the_middle_of_weight_gradients(
    worker: int, number: int, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    run = THREE.run(
        tmp_path / "run", warm, faults=[FIRST], environ={"ELAS_TEST_KILL_IN_WEIGHTS": f"{worker}@12,{number}"}
    )
    assert run.fired == [FIRST]
    assert (run.folder / "killed_in_weights").exists(), run.output[-8000:]
    assert len(events(run, "recovery")) == 2
    assert_same_training(run, undisturbed(THREE))
    assert_nothing_stale(run)


@pytest.mark.parametrize("mode", ["async", "blocking"])
def test_a_plan_without_a_loss_may_have_orders_and_changes_no_bit_where_gradients_are_added_in_order(
    mode: str, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    """Layers go where they are asked to go; weight gradients of every weight are added item by item, as ever."""
    job = replace(THREE, clip=0.0)
    run = job.run(tmp_path / "run", warm, "2 rebalance 5,4,3", "9 rebalance 4,4,4", mode=mode)
    assert splits(run) == [(5, 4, 3), (4, 4, 4)]
    assert_split(run)
    orders = [record["order"].split() for record in run.records("final").values()]
    calm = undisturbed(job)
    in_order = all(_ascends(order, "B") and _ascends(order, "W") for order in orders)
    if in_order:
        assert_same_bits(run, calm)
    else:
        assert_same_training(run, calm)
    assert_nothing_stale(run)


def _ascends(order: list[str], kind: str) -> bool:
    numbers = [int(word[1:]) for word in order if word[0] == kind]
    return numbers == sorted(numbers)
