"""The walk for stale objects finds every kind of them, and nothing where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fault.planting import BLIND
from tests.fault.runs import run_job
from tests.fault.stale_megatron import CHECKS as MEGATRON_CHECKS
from tests.fault.stale_runtime import CHECKS as RUNTIME_CHECKS

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

Findings = dict[str, tuple[str, str, list[str]]]

PLANTER = 2


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """What the walk of one survivor found with each plant; on a grid that still has replicas after the loss."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELAS_TEST_PLANTS", str(PLANTER))
        fault = "kill:worker=1@step=2,phase=backward,microbatch=0"
        run = run_job(
            tmp_path_factory.mktemp("planted") / "run", ("--pipeline-model-parallel-size=2",), workers=6,
            faults=[fault], steps=4, batch=12,
        )  # fmt: skip
    assert run.fired == [fault] and run.code == 0, run.output[-6000:]
    findings: Findings = run.records("plants")[PLANTER]
    return findings


@pytest.mark.slow
def test_every_planted_object_is_named_by_its_check(planted: Findings) -> None:
    missed = {
        name: (check, says, found)
        for name, (check, says, found) in planted.items()
        if check and not any(line.startswith(f"{check}: ") and says in line for line in found)
    }
    assert not missed
    assert len(planted) > 100


@pytest.mark.slow
def test_without_a_plant_nothing_is_found_before_and_after(planted: Findings) -> None:
    assert planted["nothing"][2] == planted["nothing, at the end"][2] == []


@pytest.mark.slow
def test_every_check_has_a_plant(planted: Findings) -> None:
    assert {check.__name__ for check in (*RUNTIME_CHECKS, *MEGATRON_CHECKS)} == {
        check for check, _, _ in planted.values() if check
    }


@pytest.mark.slow
def test_a_walk_that_sees_no_objects_says_so(planted: Findings) -> None:
    blind = {line.partition(":")[0] for line in planted[BLIND][2] if "it is blind" in line}
    assert blind == {"process_groups", "links", "group_collections", "buffers", "optimizers", "data_loaders"}


def test_attributes_in_slots_are_seen() -> None:
    from tests.fault.stale import attributes

    class Slotted:
        __slots__ = ("__dict__", "epoch", "unset")

    thing: Any = Slotted()
    thing.epoch, thing.more = 3, 4
    assert attributes(thing) == {"epoch": 3, "more": 4}


def test_recoveries_are_read_from_the_output() -> None:
    from tests.fault.runs import Run

    text = (
        "---- recovered: epoch 1 ---\nlost     worker 1 (x)\nbefore   stage 0: [0,1] [2,3]\n"
        "now      stage 0: [2,3] | spare: 0\nresumed\n"
        "---- recovered: epoch 12 ---\nnow      stage 0: [0] [4] | stage 1: [5]\n"
    )
    assert Run(code=0, output=text, folder=Path()).recoveries == {1: {2, 3}, 12: {0, 4, 5}}
