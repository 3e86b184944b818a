"""The controller is killed, at every kind of moment, in jobs of small workers that need no torch."""

from __future__ import annotations

import json
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from megatron_elas.control.step_log import STEPS_FILE
from megatron_elas.spec.step_report import read_step_reports
from tests.cli.launcher import FAST, TOY, Job, Outcome, launched, wait_gone, wait_until, write_script

pytestmark = pytest.mark.process

PATIENT = (*FAST, "--heartbeat-timeout-s=8", "--settle-timeout-s=20")
"""A controller needs its time to start on a busy machine."""


def kill_controller(job: Job) -> None:
    """And wait until there is another one."""
    before = job.controller()
    before.kill()
    wait_until(lambda: None if job.controller().pid == before.pid else True)


def read_events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_of(diary: Path) -> list[list[tuple[int, int]]]:
    """(epoch, step) of every step that each worker began."""
    return [
        [(int(epoch), int(step)) for epoch, step, _ in map(str.split, page.read_text().splitlines())]
        for page in sorted(diary.iterdir())
    ]


def steps_told(folder: Path) -> dict[int, list[tuple[int, int]]]:
    """(epoch, step) of every step that each worker has told, as the controller has written them down."""
    told: dict[int, list[tuple[int, int]]] = {}
    if (folder / STEPS_FILE).exists():
        for report in read_step_reports(folder / STEPS_FILE):
            told.setdefault(report.worker, []).append((report.epoch, report.step))
    return told


def assert_recovered_once(outcome: Outcome, num_survivors: int) -> None:
    assert outcome.code == 0, outcome
    assert outcome.out.count("---- recovered: epoch 1 ") == 1 and "recovered: epoch 2" not in outcome.out
    assert outcome.out.count("goes on") == num_survivors


def test_a_controller_that_is_killed_in_steady_state_is_replaced_and_a_later_loss_is_recovered_from(
    tmp_path: Path,
) -> None:
    diary = tmp_path / "diary"
    diary.mkdir()
    with launched(
        "--nproc-per-node=4", f"--log-dir={tmp_path}", *PATIENT, TOY, "2", "2", "1", environ={"TOY_DIARY": str(diary)}
    ) as job:
        wait_until(lambda: (len(list(diary.iterdir())) == 4 and all(len(page) > 3 for page in steps_of(diary))) or None)
        wait_until(lambda: len(steps_told(tmp_path)) == 4 or None)
        kill_controller(job)
        told = steps_told(tmp_path)
        before = [len(page) for page in steps_of(diary)]
        wait_until(lambda: all(len(p) > n + 3 for p, n in zip(steps_of(diary), before, strict=True)) or None)
        wait_until(lambda: all(len(steps) > len(told[w]) + 1 for w, steps in steps_told(tmp_path).items()) or None)
        processes = job.descendants()
        job.workers()[3].kill()
        outcome = job.finish()
    assert outcome.code == 0, outcome
    assert not wait_gone(processes)
    assert [event["event"] for event in read_events(tmp_path)] == ["controller_restarted", "loss", "recovery", "end"]
    for page in steps_of(diary):
        assert [epoch for epoch, _ in page] == sorted(epoch for epoch, _ in page)
        assert max(epoch for epoch, _ in page) <= 1, "the restart itself ended no epoch"
    for steps in steps_told(tmp_path).values():
        assert steps == sorted(set(steps)), "the next controller has gone on with the file"


@pytest.mark.parametrize(
    "loss_first",
    [
        pytest.param(True, id="just-after-a-loss"),
        pytest.param(False, id="just-before-a-loss", marks=pytest.mark.slow),
    ],
)
def test_a_loss_while_there_is_no_controller_is_noticed_by_the_next_one(loss_first: bool, tmp_path: Path) -> None:
    with launched("--nproc-per-node=4", *PATIENT, TOY, "2", "2", "1") as job:
        job.wait_for("starts", 4)
        victims = [job.workers()[2], job.controller()]
        if loss_first:
            # It may have heard of the loss, or not; both must be right.
            victims[0].kill()
            victims[1].kill()
        else:
            victims[1].kill()
            victims[0].kill()
        outcome = job.finish()
    assert_recovered_once(outcome, 3)
    assert "the controller ended (killed by SIGKILL) and is started again" in outcome.err


@pytest.mark.slow
def test_it_is_killed_while_workers_settle(tmp_path: Path) -> None:
    """One survivor is stopped for a moment, so that the others wait for its report."""
    with launched("--nproc-per-node=4", *PATIENT, "--hang-timeout-s=8", TOY, "2", "2", "1") as job:
        job.wait_for("starts", 4)
        workers = job.workers()
        workers[1].suspend()
        workers[3].kill()
        wait_until(lambda: "Settling" in journal_states(job) or None)
        kill_controller(job)
        assert "Resuming" not in journal_states(job)
        workers[1].resume()
        outcome = job.finish()
    assert_recovered_once(outcome, 3)


@pytest.mark.slow
def test_it_is_killed_while_workers_resume(tmp_path: Path) -> None:
    with launched(
        "--nproc-per-node=4", *PATIENT, TOY, "2", "2", "1", environ={"TOY_RESUMES_WHEN": str(tmp_path / "now")}
    ) as job:
        job.wait_for("starts", 4)
        job.workers()[3].kill()
        wait_until(lambda: "Resuming" in journal_states(job) or None)
        kill_controller(job)
        (tmp_path / "now").touch()
        outcome = job.finish()
    assert_recovered_once(outcome, 3)


def test_it_is_killed_twice_in_one_recovery(tmp_path: Path) -> None:
    with launched(
        "--nproc-per-node=4", *PATIENT, "--hang-timeout-s=8", TOY, "2", "2", "1",
        environ={"TOY_RESUMES_WHEN": str(tmp_path / "now")},
    ) as job:  # fmt: skip
        job.wait_for("starts", 4)
        workers = job.workers()
        workers[0].suspend()
        workers[3].kill()
        wait_until(lambda: "Settling" in journal_states(job) or None)
        kill_controller(job)
        workers[0].resume()
        wait_until(lambda: "Resuming" in journal_states(job) or None)
        kill_controller(job)
        (tmp_path / "now").touch()
        outcome = job.finish()
    assert_recovered_once(outcome, 3)


@pytest.mark.slow
def test_it_is_killed_while_the_job_ends(tmp_path: Path) -> None:
    """The workers do not listen, and are killed after the grace period."""
    script = write_script(
        tmp_path,
        "import signal, threading\nsignal.signal(signal.SIGTERM, lambda *_: print('not now', flush=True))\n"
        "print('up', flush=True)\nthreading.Event().wait()\n",
    )
    with launched("--nproc-per-node=2", *PATIENT, "--grace-s=3", script) as job:
        job.wait_for("up", 2)
        processes = job.descendants()
        job.process.send_signal(signal.SIGTERM)
        job.wait_for("not now", 2)
        kill_controller(job)
        outcome = job.finish()
    assert outcome.code == 143, outcome
    assert not wait_gone(processes)


@pytest.mark.slow
def test_it_is_killed_before_all_workers_have_joined(tmp_path: Path) -> None:
    with launched(
        "--nproc-per-node=4", *PATIENT, TOY, "2", "2", "1", environ={"TOY_JOINS_WHEN": str(tmp_path / "now")}
    ) as job:
        wait_until(lambda: journal_of(job).read_text().count('"event":"Hello"') == 3 or None)
        kill_controller(job)
        (tmp_path / "now").touch()
        job.wait_for("starts", 4)
        job.workers()[3].kill()
        outcome = job.finish()
    assert_recovered_once(outcome, 3)


@pytest.mark.slow
def test_a_controller_that_is_stopped_is_killed_and_replaced() -> None:
    with launched("--nproc-per-node=4", *PATIENT, TOY, "2", "2", "1") as job:
        job.wait_for("starts", 4)
        controller = job.controller()
        controller.suspend()
        wait_until(lambda: None if job.controller().pid == controller.pid else True)
        job.workers()[3].kill()
        outcome = job.finish()
    assert_recovered_once(outcome, 3)
    assert "the controller did not answer for" in outcome.err


def test_a_controller_that_keeps_dying_ends_the_job_with_a_sentence(tmp_path: Path) -> None:
    with launched("--nproc-per-node=4", f"--log-dir={tmp_path}", *PATIENT, TOY, "2", "2", "1") as job:
        wait_until(lambda: len(list(tmp_path.glob("worker*.log"))) == 4 or None)
        processes = job.descendants()
        for _ in range(3):
            kill_controller(job)
        job.controller().kill()
        outcome = job.finish()
    assert outcome.code == 1, outcome
    assert "the controller ended 4 times within 60 s, at last killed by SIGKILL" in outcome.err
    assert not wait_gone(processes)
    assert [event["event"] for event in read_events(tmp_path)] == [*["controller_restarted"] * 3, "end"]


@pytest.mark.slow
def test_the_other_nodes_wait_for_a_controller_that_is_started_again_and_the_job_goes_on(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    common = ("--nnodes=2", "--nproc-per-node=2", f"--rdzv-endpoint={endpoint}", *PATIENT)
    environ = {"ELAS_TOKEN": "a secret of two nodes"}
    with (
        launched(*common, "--node-rank=1", TOY, "1", "4", "2", environ=environ) as second,
        launched(*common, "--node-rank=0", TOY, "1", "4", "2", environ=environ) as first,
    ):
        first.wait_for("starts", 2)
        second.wait_for("starts", 2)
        victim = second.workers()[1]
        first.controller().kill()
        victim.kill()
        first.wait_for("recovered: epoch 1")
        kill_controller(first)
        second.workers()[0].kill()
        outcomes = first.finish(), second.finish()
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert "the controller on node 0 is gone; training goes on" in outcomes[1].err
    assert outcomes[0].out.count("---- recovered: epoch") == 2


@pytest.mark.slow
def test_a_damaged_journal_ends_the_job_with_its_own_code(tmp_path: Path) -> None:
    with launched("--nproc-per-node=4", *PATIENT, TOY, "2", "2", "1") as job:
        job.wait_for("starts", 4)
        processes = job.descendants()
        path = journal_of(job)
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([*lines[:2], "{}\n", *lines[2:]]))
        job.controller().kill()
        outcome = job.finish()
    assert outcome.code == 4, outcome
    assert "line 3 of its journal is damaged" in outcome.err
    assert not wait_gone(processes)


def journal_of(job: Job) -> Path:
    """The controller's, in the private folder that the launcher holds the lock of."""

    def find() -> Path | None:
        for file in Path(f"/proc/{job.process.pid}/fd").iterdir():
            path = Path(str(file.readlink())).parent / "journal"
            if re.search(r"/elas-[^/]+/journal$", str(path)) and path.exists():
                return path
        return None

    return wait_until(find)


def journal_states(job: Job) -> list[str]:
    """The controller's states so far."""
    *lines, _ = journal_of(job).read_text().split("\n")
    return [json.loads(line)["state"] for line in lines[1:]]
