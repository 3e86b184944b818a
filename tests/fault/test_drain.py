"""Workers of a running job are let go: they hand over what they hold and leave in order, and training goes on as ever.

``elas drain`` itself is run once; elsewhere a worker of the job asks for the same (``asker.py``).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.migrations import (
    Job,
    answers,
    assert_nothing_stale,
    assert_same_training,
    events,
)
from tests.fault.runs import REPO, Run
from tests.fault.warm_launcher import WarmLauncher

pytestmark = [pytest.mark.process, pytest.mark.timeout(700)]

GRID = Job(layers=(4, 3), data=2)
CHAIN = Job(layers=(3, 2, 2), clip=1.0)
CELLS = Job(layers=(2, 2), data=2, tensor=2, clip=1.0)


def assert_left(run: Run, workers: set[int], job: Job) -> None:
    """The job has ended well, and so have these workers, long before it; the others have trained to the end."""
    assert run.code == 0, run.output[-8000:]
    assert set(run.records("final")) == set(range(job.workers)) - workers
    left = [event["drained"] for event in events(run, "migration") if event["drained"]]
    assert {worker for drained in left for worker in drained} == workers, left
    assert not events(run, "loss") or {event["worker"] for event in events(run, "loss")}.isdisjoint(workers)
    assert "Traceback" not in run.output


@pytest.mark.parametrize(
    "worker",
    [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 3],
    ids=["first-rank", "first-stage", "last-rank"],
)
def test_a_worker_is_drained(worker: int, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path) -> None:
    run = GRID.run(tmp_path / "run", warm, f"2 drain {worker}")
    assert_left(run, {worker}, GRID)
    assert not events(run, "recovery")
    assert_same_training(run, undisturbed(GRID))
    assert_nothing_stale(run)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "blocking"])
@pytest.mark.parametrize(
    ("job", "workers"),
    [
        pytest.param(CHAIN, (0,), id="first-stage-of-one"),
        pytest.param(CHAIN, (1,), id="stage-of-one"),
        pytest.param(CHAIN, (2,), id="last-stage-of-one"),
        pytest.param(GRID, (2, 3), id="both-cells-of-a-stage"),
        pytest.param(GRID, (0, 3), id="one-of-each-stage"),
        pytest.param(GRID, (0, 1, 2), id="all-but-one"),
        pytest.param(CELLS, (6, 7), id="a-cell-of-two"),
    ],
)
def test_several_workers_and_stages_are_drained(
    job: Job, workers: tuple[int, ...], mode: str, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    run = job.run(tmp_path / "run", warm, f"2 drain {' '.join(map(str, workers))}", mode=mode)
    assert_left(run, set(workers), job)
    assert not events(run, "recovery")
    assert_same_training(run, undisturbed(job))
    assert_nothing_stale(run)


@pytest.mark.slow
def test_one_after_the_other_is_drained(undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path) -> None:
    job = replace(CHAIN, steps=24)
    run = job.run(tmp_path / "run", warm, "2 drain 1", "3 drain 0")
    assert_left(run, {0, 1}, job)
    assert_same_training(run, undisturbed(job))
    assert_nothing_stale(run)


@pytest.mark.slow
@pytest.mark.parametrize(("drained", "killed"), [(3, 0), (3, 1), (0, 3), (2, 3)])
def test_a_worker_is_lost_after_another_was_drained(
    drained: int, killed: int, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    job, fault = replace(GRID, steps=20), f"kill:worker={killed}@step=14,phase=backward,microbatch=0"
    run = job.run(tmp_path / "run", warm, f"2 drain {drained}", faults=[fault])
    assert run.fired == [fault] and len(events(run, "migration")) >= 1
    assert events(run, "migration")[0]["resume_step"] < 14
    assert run.code == 0, run.output[-8000:]
    assert set(run.records("final")) == {0, 1, 2, 3} - {drained, killed}
    assert_same_training(run, undisturbed(job))
    assert_nothing_stale(run)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["migrate-stream", "migrate-enter", "migrate-verify"])
@pytest.mark.parametrize("killed", [2, 3], ids=["its-mate", "itself"])
def test_a_worker_is_lost_while_one_is_drained(
    killed: int, phase: str, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    """Who was to leave may have to stay then; but nobody is missing who is not lost or gone."""
    if (killed, phase) == (3, "migrate-verify"):
        pytest.skip("who has no seat does not come to it")
    fault = f"kill:worker={killed}@step=2,phase={phase}"
    run = GRID.run(tmp_path / "run", warm, "2 drain 3", faults=[fault])
    assert run.fired == [fault] and run.code == 0, run.output[-8000:]
    finished = set(run.records("final"))
    assert finished == {0, 1, 2, 3} - {killed} or (killed == 2 and finished == {0, 1})
    assert_same_training(run, undisturbed(GRID))
    assert_nothing_stale(run)


@pytest.mark.slow
@pytest.mark.parametrize("before", [3, 4, 5, 6])
def test_the_controller_is_killed_while_a_worker_is_drained(
    before: int, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    run = GRID.run(tmp_path / "run", warm, "2 drain 3", environ={"ELAS_TEST_KILL_CONTROLLER": f"1@{before}"})
    assert f"controller killed: 1@{before}" in run.output
    assert_left(run, {3}, GRID)
    assert_same_training(run, undisturbed(GRID))


@pytest.mark.slow
def test_the_command_drains_a_worker_of_a_running_job(undisturbed: Callable[..., Run], tmp_path: Path) -> None:
    """As a user runs it, beside the job; once more for the same worker, and for others that cannot be drained."""
    job, folder = replace(GRID, steps=300), tmp_path / "run"
    told: dict[str, subprocess.CompletedProcess[str]] = {}
    # A short path of its own, in which there is no other job: sockets lie in it. A warm launcher would not look there.
    temporary = tempfile.mkdtemp(dir="/tmp")

    def elas(*words: str) -> subprocess.CompletedProcess[str]:
        environ = {"PYTHONPATH": str(REPO), "TMPDIR": temporary, "PATH": "/usr/bin:/bin"}
        return subprocess.run(
            [sys.executable, "-m", "megatron_elas.cli.elas", *words], env=environ, text=True, capture_output=True,
            timeout=60, check=False,
        )  # fmt: skip

    def drain() -> None:
        deadline = time.monotonic() + 60
        while not list(folder.glob("walk.0.*.pt")) and time.monotonic() < deadline:
            time.sleep(0.05)
        told["stranger"] = elas("drain", "7")
        told["drained"] = elas("drain", "3")
        while not events_of(folder) and time.monotonic() < deadline:
            time.sleep(0.05)
        told["again"] = elas("drain", "3")
        told["status"] = elas("status")

    thread = threading.Thread(target=drain)
    thread.start()
    try:
        run = job.run(folder, None, environ={"TMPDIR": temporary})
        thread.join()
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    assert told["drained"].returncode == 0, told["drained"].stderr
    assert "worker 3 handed over everything" in told["drained"].stdout
    for name, says in (("stranger", "worker 7 is not one of 0 to 3"), ("again", "worker 3 was drained already")):
        assert told[name].returncode == 2 and says in told[name].stderr, (name, told[name])
    assert "drained" in told["status"].stdout, told["status"]
    assert_left(run, {3}, job)
    assert_same_training(run, undisturbed(job))


def events_of(folder: Path) -> bool:
    """Whether a job that runs has told of a migration."""
    path = folder / "logs" / "events.jsonl"
    return path.exists() and '"migration"' in path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "asked", "says"),
    [
        pytest.param(CELLS, "drain 6", "drain 7 with it", id="half-a-cell"),
        pytest.param(CELLS, "drain 0 1 2 3 4 5 6 7", "nobody would be left", id="all"),
    ],
)
def test_what_cannot_be_drained_stays(
    job: Job, asked: str, says: str, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    run = job.run(tmp_path / "run", warm, f"2 {asked}")
    (answer,) = answers(run)
    assert answer.startswith("no: ") and says in answer
    assert not events(run, "migration")
    assert_same_training(run, undisturbed(job))


@pytest.mark.slow
def test_a_lost_worker_cannot_be_drained(undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path) -> None:
    fault = "kill:worker=3@step=2,phase=forward"
    run = GRID.run(tmp_path / "run", warm, "9 drain 3", faults=[fault])
    (answer,) = answers(run)
    assert run.fired == [fault] and answer.startswith("no: worker 3 is lost already")
    assert_same_training(run, undisturbed(GRID))
