"""Traced steps in the trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process is a stage, a thread is a cell. Under each step, a complete event, are those of its passes. Losses, and the
news that all have gone over to another plan, are instants; recoveries are events of a process of their own. Times are
microseconds from the begin of the first traced step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_elas.cli.report_facts import JobLog, describe_loss
from megatron_elas.cli.report_gantt import LETTERS
from megatron_elas.spec.step_trace import Span, StepTrace

TraceEvent = dict[str, Any]


def make_chrome_trace(log: JobLog) -> dict[str, Any]:
    """Ready for ``json.dumps``.

    Args:
        log: With one trace at least.
    """
    zero_s = min(trace.began_s for trace in log.traces)
    events = [*_names(log), *_job_events(log, zero_s)]
    for trace in sorted(log.traces, key=lambda trace: (trace.began_s, trace.worker)):
        events += _step_events(trace, zero_s)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _job_process(log: JobLog) -> int:
    return max(trace.stage for trace in log.traces) + 1


def _names(log: JobLog) -> Iterator[TraceEvent]:
    job = _job_process(log)
    for stage in range(job):
        yield _name("process_name", stage, 0, f"stage {stage}")
        yield {"ph": "M", "name": "process_sort_index", "pid": stage, "tid": 0, "args": {"sort_index": stage}}
    for stage, cell in sorted({(trace.stage, trace.cell) for trace in log.traces}):
        yield _name("thread_name", stage, cell, f"cell {cell}")
    yield _name("process_name", job, 0, "job")
    yield _name("thread_name", job, 0, "losses and recoveries")


def _name(kind: str, pid: int, tid: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _job_events(log: JobLog, zero_s: float) -> Iterator[TraceEvent]:
    """Losses, recoveries, migrations. One from before the first traced step is left out: it would stretch the view."""
    job = _job_process(log)
    for event in log.events:
        at_us = _microseconds(float(event.get("time_s", 0.0)) - zero_s)
        if at_us < 0:
            continue
        if event["event"] == "loss":
            yield {
                "ph": "i", "s": "g", "name": f"lost: {describe_loss(event)}", "cat": "loss", "ts": at_us,
                "pid": job, "tid": 0,
            }  # fmt: skip
        elif event["event"] == "migration":
            yield {
                "ph": "i", "s": "g", "name": f"migrated, epoch {event['epoch']}", "cat": "migration", "ts": at_us,
                "pid": job, "tid": 0,
            }  # fmt: skip
        elif event["event"] == "recovery" and "total" in event:
            length_us = 1e3 * float(event["total"])
            yield {
                "ph": "X", "name": f"recovery, epoch {event['epoch']}", "cat": "recovery",
                "ts": round(max(0.0, at_us - length_us), 3), "dur": round(length_us, 3), "pid": job, "tid": 0,
                "args": {"before": event.get("before"), "after": event.get("after")},
            }  # fmt: skip


def _step_events(trace: StepTrace, zero_s: float) -> Iterator[TraceEvent]:
    begin_s = trace.began_s - zero_s
    yield _complete(
        trace, f"step {trace.step}, epoch {trace.epoch}", "step", begin_s, begin_s + trace.end_s,
        {
            "worker": trace.worker,
            "layers": f"{trace.first_layer} to {trace.last_layer - 1}",
            "first under its plan": trace.first,
            "spans left out": trace.left_out,
        },
    )  # fmt: skip
    for span in trace.spans:
        arguments: dict[str, Any] = {"worker": trace.worker, "step": trace.step}
        if span.item is not None:
            arguments |= {"item": span.item, "samples": span.samples}
        if span.apart_s:
            arguments["waited for parameters, ms"] = 1e3 * span.apart_s
        yield _complete(trace, _label(span), span.kind, begin_s + span.start_s, begin_s + span.end_s, arguments)


def _label(span: Span) -> str:
    return span.kind if span.item is None else f"{LETTERS[span.kind]}{span.item}"


def _complete(
    trace: StepTrace, name: str, category: str, start_s: float, end_s: float, arguments: dict[str, Any]
) -> TraceEvent:
    start_us, end_us = _microseconds(start_s), _microseconds(end_s)
    return {
        "ph": "X", "name": name, "cat": category, "ts": start_us, "dur": round(end_us - start_us, 3),
        "pid": trace.stage, "tid": trace.cell, "args": arguments,
    }  # fmt: skip


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)
