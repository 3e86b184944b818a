"""Traces are bounded, read back as they were written, and refused with a sentence."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_elas.planner.plan import initial_plan
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.step_trace import (
    MOST_ASKED,
    MOST_CELLS,
    MOST_SPANS,
    Span,
    StepTrace,
    parse_steps,
    read_step_traces,
    traces_steps,
)
from megatron_elas.spec.tables import as_table

FORWARD = Span(kind="forward", start_s=0.125, end_s=0.25, item=4, samples=2, apart_s=0.0625)
TRACE = StepTrace(
    worker=3, epoch=1, step=7, stage=1, cell=0, first_layer=2, last_layer=4, began_s=1e9, step_s=0.5,
    spans=(FORWARD, Span(kind="optimizer", start_s=0.25, end_s=0.75)), first=True,
)  # fmt: skip


def test_a_trace_is_read_back_and_a_line_under_way_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    line = json.dumps(as_table(TRACE))
    path.write_text(f"{line}\n{line}\n{line[:50]}")
    assert read_step_traces(path) == (TRACE, TRACE)
    assert TRACE.end_s == 0.75, "its last span ends after the step's own time"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[]\n", "line 1 is no object"),
        ("{\n", "line 1 is no valid JSON"),
        ("{}\n", "line 1: 'worker' is missing"),
        (json.dumps({**as_table(TRACE), "step_s": 0}) + "\n", "line 1: step_s must be above 0"),
        (json.dumps({**as_table(TRACE), "cell": -1}) + "\n", "line 1: cell must be at least 0"),
        (json.dumps({**as_table(TRACE), "last_layer": 1}) + "\n", "end before they begin"),
    ],
)
def test_what_is_no_trace_is_said(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text(line)
    with pytest.raises(BadUsage, match=words):
        read_step_traces(path)
    with pytest.raises(BadUsage, match="cannot be read"):
        read_step_traces(tmp_path / "none")


def test_spans_have_a_known_kind_and_end_after_they_start() -> None:
    with pytest.raises(BadUsage, match="kind is 'sleep'"):
        Span(kind="sleep", start_s=0, end_s=1)
    for start_s, end_s in ((2.0, 1.0), (-1.0, 1.0), (0.0, float("nan"))):
        with pytest.raises(BadUsage, match="write times from 0 up"):
            Span(kind="wait", start_s=start_s, end_s=end_s)
    with pytest.raises(BadUsage, match=f"a trace of {MOST_SPANS + 1} spans"):
        StepTrace(**{**as_table(TRACE), "spans": (FORWARD,) * (MOST_SPANS + 1)})


@pytest.mark.parametrize(("stages", "rows", "lanes"), [(2, 2, 2), (4, 300, 1), (100, 3, 1), (3, 40, 1)])
def test_of_every_stage_some_cells_tell_and_of_large_jobs_not_all(stages: int, rows: int, lanes: int) -> None:
    job = JobSpec(
        tensor_parallel=lanes, pipeline_parallel=stages, data_parallel=rows, micro_batch_size=1, num_microbatches=rows,
        stage_layers=(1,) * stages,
    )  # fmt: skip
    plan = initial_plan(job, {})
    told = [worker for worker in plan.placement.workers if traces_steps(plan, worker)]
    seats = [plan.placement.seat(worker) for worker in told]
    assert {seat.lane for seat in seats} == {0}
    assert {seat.stage for seat in seats} == set(range(stages))
    assert len(told) <= max(MOST_CELLS, stages)
    if stages * rows <= MOST_CELLS:
        assert len(told) == stages * rows
    first = [seat.cell for seat in seats if seat.stage == 0]
    gaps = [after - before for before, after in pairwise(first)]
    assert not gaps or max(gaps) - min(gaps) <= 1, "they are spread evenly"


def test_steps_that_are_asked_for() -> None:
    assert parse_steps("5,20-22, 7") == {5, 7, 20, 21, 22}
    for text in ("", "5,", "x", "3-", "-3", "9-5", "1-2-3"):
        with pytest.raises(BadUsage, match="write numbers from 0 up and ranges, such as 5,20-22"):
            parse_steps(text)
    for text in ("0-1000", "0-999999999999999"):
        with pytest.raises(BadUsage, match=f"more than {MOST_ASKED}"):
            parse_steps(text)
