"""The controller is killed before, at and after the loss of a worker; training is that of the undisturbed run."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from tests.fault.conftest import GRID
from tests.fault.runs import Run, assert_same_training, run_job

pytestmark = [pytest.mark.process, pytest.mark.timeout(500)]

FAULT = "kill:worker=2@step=5,phase=backward,microbatch=1"


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param("settling,resuming", id="while-settling-and-while-resuming"),
        pytest.param("2@5", id="just-before-the-loss", marks=pytest.mark.slow),
        pytest.param("1@2,1@4", id="twice-in-steady-state", marks=pytest.mark.slow),
        pytest.param("settling,3@8", id="while-settling-and-after-the-recovery", marks=pytest.mark.slow),
    ],
)
def test_a_loss_is_recovered_from_with_the_losses_samples_and_state_of_the_undisturbed_run(
    moments: str, calm: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELAS_TEST_KILL_CONTROLLER", moments)
    before = {process.pid for process in psutil.process_iter()}
    run = run_job(tmp_path / "run", GRID, workers=4, faults=[FAULT], timeout_s=200)
    assert sorted(re.findall(r"controller killed: (\S+)", run.output)) == sorted(moments.split(","))
    assert run.fired == [FAULT]
    assert run.output.count("and is started again; training goes on") == moments.count(",") + 1
    assert_same_training(run, calm)
    assert run.records("final").keys() == {0, 1, 3}
    assert list(run.recoveries) == [1], "one epoch for one loss"
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before and str(tmp_path) in str(p.info)]
