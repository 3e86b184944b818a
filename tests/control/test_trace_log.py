"""Traces are written as lines that are read back, not too many of an epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_elas.control import trace_log
from megatron_elas.control.trace_log import TRACES_FILE, TraceLog
from megatron_elas.spec.step_trace import Span, StepTrace, read_step_traces


def make_trace(worker: int, step: int = 3, epoch: int = 0) -> StepTrace:
    return StepTrace(
        worker=worker, epoch=epoch, step=step, stage=0, cell=worker, first_layer=0, last_layer=2, began_s=5.0,
        step_s=0.5, spans=(Span(kind="forward", start_s=0.0, end_s=0.25, item=0, samples=1),),
    )  # fmt: skip


def test_traces_are_read_back_and_the_next_controller_goes_on_behind_them(tmp_path: Path) -> None:
    path = tmp_path / TRACES_FILE
    traces = [make_trace(worker) for worker in range(4)]
    for half in (traces[:2], traces[2:]):
        log = TraceLog(path)
        for trace in half:
            log.write(trace)
        log.close()
    assert read_step_traces(path) == tuple(traces)


def test_an_epoch_has_only_so_many_bytes_and_a_job_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_log, "MOST", 2000)
    monkeypatch.setattr(trace_log, "MOST_OF_JOB", 5000)
    log = TraceLog(tmp_path / TRACES_FILE)
    for epoch in range(4):
        for worker in range(10):
            log.write(make_trace(worker, epoch=epoch))
    log.close()
    kept = [(trace.epoch, trace.worker) for trace in read_step_traces(tmp_path / TRACES_FILE)]
    assert kept == [(epoch, worker) for epoch in (0, 1) for worker in range(5)] + [(2, 0), (2, 1)]
    assert len(caplog.records) == 1
    assert (tmp_path / TRACES_FILE).stat().st_size < 5000
