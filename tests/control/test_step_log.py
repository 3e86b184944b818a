"""Measured steps are written as whole lines, not too many, and a disk that fails ends nothing."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from megatron_elas.control import line_log, step_log
from megatron_elas.control.step_log import ALL, PAUSE_S, STEPS_FILE, StepLog
from megatron_elas.spec.step_report import PassTotal, StepReport, read_step_reports


def make_report(worker: int, step: int, epoch: int = 0) -> StepReport:
    return StepReport(
        worker=worker, epoch=epoch, step=step, first_layer=0, last_layer=1, cells=2, step_s=0.5, predicted_s=0.4,
        passes=(PassTotal(kind="forward", passes=2, samples=4, seconds=0.1),), stage=0, ended_s=1.5,
    )  # fmt: skip


def test_reports_are_read_back_and_the_next_controller_goes_on_behind_them(tmp_path: Path) -> None:
    path = tmp_path / STEPS_FILE
    reports = [make_report(worker, step) for step in range(3) for worker in range(2)]
    for half in (reports[:3], reports[3:]):
        log = StepLog(path)
        for report in half:
            log.write(report)
        log.close()
    assert read_step_reports(path) == tuple(reports)


def test_without_a_report_there_is_no_file(tmp_path: Path) -> None:
    StepLog(tmp_path / STEPS_FILE).close()
    assert not (tmp_path / STEPS_FILE).exists()


def test_after_the_first_reports_of_a_worker_and_an_epoch_one_is_written_now_and_then(tmp_path: Path) -> None:
    now = [0.0]
    log = StepLog(tmp_path / STEPS_FILE, lambda: now[0])
    for step in range(ALL + 5):
        log.write(make_report(0, step))
    log.write(make_report(1, 0))
    now[0] += PAUSE_S
    log.write(make_report(0, 1000))
    now[0] += PAUSE_S / 2
    log.write(make_report(0, 1001))
    log.write(make_report(0, 1002, epoch=1))
    log.close()
    written = [(r.worker, r.epoch, r.step) for r in read_step_reports(tmp_path / STEPS_FILE)]
    assert written == [*((0, 0, step) for step in range(ALL)), (1, 0, 0), (0, 0, 1000), (0, 1, 1002)]


def test_a_folder_that_is_gone_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = StepLog(tmp_path / "gone" / STEPS_FILE)
    for step in range(3):
        log.write(make_report(0, step))
    log.close()
    assert [record.message for record in caplog.records] == [
        f"steps are not written down any more: {tmp_path / 'gone' / STEPS_FILE} "
        "([Errno 2] No such file or directory: " + f"'{tmp_path / 'gone' / STEPS_FILE}')"
    ]


def test_a_disk_that_hangs_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, write, room = threading.Event(), os.write, 20
    monkeypatch.setattr(line_log, "WAITING", room)
    monkeypatch.setattr(os, "write", lambda *arguments: (hanging.wait(), write(*arguments))[1])
    log = StepLog(tmp_path / STEPS_FILE)
    for worker in range(room + 10):
        log.write(make_report(worker, 0))
    log.write(make_report(room + 9, 1))
    hanging.set()
    log._lines._values.put(None)
    log._lines._thread.join()
    reports = read_step_reports(tmp_path / STEPS_FILE)
    assert room <= len(reports) <= room + 1, "one more may have been on its way to the disk"


def test_a_line_that_an_earlier_controller_could_not_finish_is_taken_away(tmp_path: Path) -> None:
    path = tmp_path / STEPS_FILE
    log = StepLog(path)
    log.write(make_report(0, 0))
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:30])
    assert len(read_step_reports(path)) == 1
    log = StepLog(path)
    log.write(make_report(1, 1))
    log.close()
    assert [report.worker for report in read_step_reports(path)] == [0, 1]
    path.write_bytes(whole[:30])
    log = StepLog(path)
    log.write(make_report(2, 2))
    log.close()
    assert [report.worker for report in read_step_reports(path)] == [2]


def test_many_workers_together_write_no_more_than_a_bounded_number_of_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_log, "MOST", 50)
    now = [0.0]
    log = StepLog(tmp_path / STEPS_FILE, lambda: now[0])
    for step in range(10):
        for worker in range(100):
            log.write(make_report(worker, step))
        now[0] += step_log.SPACING_S
    log.close()
    assert len(read_step_reports(tmp_path / STEPS_FILE)) == 50 + 9
