"""A lost worker takes its tensor-parallel cell along; the mates stay alive and hand over what they hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.configurations import of_name
from tests.distributed.conftest import TIMEOUT_S, Train
from tests.fault.runs import Run, assert_nothing_stale, assert_same_training

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_S)]

CONFIGURATION = of_name("tp2dp3-sequence-parallel")
"""Cells [0,1] [2,3] [4,5]; copies go from 0 to 2 to 4 to 0, and from 1 to 3 to 5 to 1."""


def test_a_shard_that_only_a_spare_holds_is_handed_over(
    undisturbed: Callable[..., Run], train: Train, tmp_path: Path
) -> None:
    # Worker 2 keeps the copy of 0's shard, and goes while 0 becomes a spare; so does 3, which keeps that of 1.
    faults = ("kill:worker=1@step=5,phase=forward,microbatch=1", "kill:worker=2@step=5,phase=recovery")
    run = train(CONFIGURATION, tmp_path / "run", faults)
    assert run.fired == list(faults), run.output[-6000:]
    assert "now      stage 0: [4,5] | spare: 0,3" in run.output
    assert_same_training(run, undisturbed(CONFIGURATION))
    assert run.records("final").keys() == {4, 5}
    assert_nothing_stale(run)


def test_a_mate_that_is_lost_before_it_has_handed_over_is_replaced_by_its_copy(
    undisturbed: Callable[..., Run], train: Train, tmp_path: Path
) -> None:
    faults = ("kill:worker=1@step=5,phase=forward,microbatch=1", "kill:worker=0@step=5,phase=recovery")
    run = train(CONFIGURATION, tmp_path / "run", faults)
    assert run.fired == list(faults), run.output[-6000:]
    assert_same_training(run, undisturbed(CONFIGURATION))
    assert run.records("final").keys() == {2, 3, 4, 5}
    assert_nothing_stale(run)


def test_a_spare_may_be_lost_as_well(
    undisturbed: Callable[..., Run], train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = "kill:worker=1@step=5,phase=forward,microbatch=1"
    monkeypatch.setenv("ELAS_TEST_KILL_SPARES", "8")
    run = train(CONFIGURATION, tmp_path / "run", (fault,))
    assert run.fired == [fault], run.output[-6000:]
    assert "spares killed before step 8: 0" in run.output and "lost     worker 0 " in run.output
    assert_same_training(run, undisturbed(CONFIGURATION))
    assert run.records("final").keys() == {2, 3, 4, 5}
    assert_nothing_stale(run)
