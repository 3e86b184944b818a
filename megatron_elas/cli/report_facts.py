"""What a job's log folder tells: its steps epoch by epoch, its losses and its recoveries."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_elas.control.migration_block import describe_workers
from megatron_elas.control.step_log import STEPS_FILE
from megatron_elas.control.trace_log import TRACES_FILE
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.layout import describe_layers
from megatron_elas.spec.migration import MIGRATION_PHASES
from megatron_elas.spec.report import PHASES
from megatron_elas.spec.step_report import StepReport, read_step_reports
from megatron_elas.spec.step_trace import StepTrace, read_step_traces

EVENTS_FILE = "events.jsonl"

Event = Mapping[str, Any]
"""A line of ``events.jsonl``: ``event`` is its name, ``time_s`` when it was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """Where the time of a stage's workers went in an epoch's steps."""

    stage: int
    first_layer: int
    last_layer: int
    """One past the last."""
    cells: int
    busy: float | None
    """Share of the step in which passes and optimizer computed; None when passes were not measured."""
    waiting: float | None
    """Share of the step in which passes waited for inputs from other stages; None when it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochFacts:
    """The steps of one epoch."""

    epoch: int
    first_step: int
    last_step: int
    steps: int
    """That some worker reported."""
    workers: int
    """That reported any."""
    reports: int
    measured_s: float
    """Median of the reports, but for each worker's first under the plan where there are others."""
    predicted_s: float | None
    """The newest forecast of the epoch."""
    stages: tuple[StageShare, ...]

    @property
    def ratio(self) -> float | None:
        """Measured over predicted time."""
        return None if self.predicted_s is None else self.measured_s / self.predicted_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """One step of an epoch, for a plot."""

    epoch: int
    step: int
    measured_s: float
    """Median over the workers that reported it."""
    first: bool
    """All of these reports are of first steps under a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One recovery."""

    epoch: int
    """That it began."""
    lost: tuple[str, ...]
    """Who, from where and why, in words."""
    seats: tuple[tuple[int, int, int], ...]
    """(stage, cell, worker) of those of them that had a seat."""
    resume_step: int
    phases_ms: dict[str, float]
    """By name, PHASES in their order, then ``total``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One planned change: layers moved, or workers were drained, while everybody lived."""

    epoch: int
    """That it began."""
    what: str
    """For people: ``layers 2-3 from stage 1 to 0; worker 5 drained``."""
    resume_step: int
    """Before which all went over."""
    streamed_steps: int
    streamed_mb: float
    """State and gradients that went beside these steps, of all workers."""
    phases_ms: dict[str, float]
    """Of the slowest worker while it stood still, by name, MIGRATION_PHASES in their order, then ``total``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLog:
    """The newest run in a log folder."""

    folder: Path
    reports: tuple[StepReport, ...]
    events: tuple[Event, ...]
    earlier_runs: int
    """In the same folder, left out."""
    traces: tuple[StepTrace, ...] = ()
    """Of steps around losses and migrations; each once per worker, in the order they were told."""

    @property
    def epochs(self) -> tuple[EpochFacts, ...]:
        """Those that a step was reported of, in order."""
        by_epoch: dict[int, list[StepReport]] = defaultdict(list)
        for report in self.reports:
            by_epoch[report.epoch].append(report)
        return tuple(_epoch_facts(epoch, by_epoch[epoch]) for epoch in sorted(by_epoch))

    @property
    def worker_steps(self) -> int:
        """Steps that the workers of each epoch have run, reported or not, as far as reports and events tell."""
        resumed = {own.epoch: own.resume_step for own in self.recoveries}
        resumed |= {own.epoch: own.resume_step for own in self.migrations}
        total, until = 0, -1
        for own in reversed(self.epochs):
            begin = min(own.first_step, resumed.get(own.epoch, own.first_step))
            total += own.workers * (max(own.last_step + 1, until) - begin)
            until = begin
        return max(total, len(self.reports))

    @property
    def points(self) -> tuple[StepPoint, ...]:
        """Steps in order; one that was run in two epochs is there twice."""
        by_step: dict[tuple[int, int], list[StepReport]] = defaultdict(list)
        for report in self.reports:
            by_step[report.epoch, report.step].append(report)
        return tuple(
            StepPoint(
                epoch=epoch,
                step=step,
                measured_s=statistics.median(report.step_s for report in own),
                first=all(report.first for report in own),
            )
            for (epoch, step), own in sorted(by_step.items())
        )

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        """In the order they were logged."""
        return tuple(_recovery(event) for event in self.events if event["event"] == "recovery")

    @property
    def migrations(self) -> tuple[Migration, ...]:
        """In the order they were logged."""
        return tuple(_migration(event) for event in self.events if event["event"] == "migration")

    @property
    def unrecovered(self) -> tuple[str, ...]:
        """Losses that no recovery names, in words."""
        recovered = {
            loss.get("worker") for event in self.events if event["event"] == "recovery" for loss in event["lost"]
        }
        return tuple(
            describe_loss(event)
            for event in self.events
            if event["event"] == "loss" and event.get("worker") not in recovered
        )

    @property
    def controller_restarts(self) -> tuple[int, ...]:
        """For each time that a new controller took over: the newest step that had ended then."""
        times = [float(event["time_s"]) for event in self.events if event["event"] == "controller_restarted"]
        ended = [(report.ended_s, report.step) for report in self.reports if report.ended_s is not None]
        return tuple(max((step for end_s, step in ended if end_s <= time_s), default=0) for time_s in times)

    @property
    def end(self) -> Event | None:
        """How the job ended; None: it did not, or its launcher was killed."""
        return next((event for event in reversed(self.events) if event["event"] == "end"), None)


def read_job_log(folder: Path) -> JobLog:
    """The newest run of a folder that was given to ``elasrun --log-dir``.

    Raises:
        BadUsage: There is no such folder, it holds none of the two files, or one of them cannot be read.
    """
    steps, events = folder / STEPS_FILE, folder / EVENTS_FILE
    if not folder.is_dir():
        raise BadUsage(f"{folder} is no folder: give the one that elasrun --log-dir named")
    if not steps.is_file() and not events.is_file():
        raise BadUsage(
            f"{folder} holds neither {STEPS_FILE} nor {EVENTS_FILE}: give the folder that elasrun --log-dir named on "
            f"node 0, once the job has begun"
        )
    traces = folder / TRACES_FILE
    return _newest_run(
        folder,
        read_step_reports(steps) if steps.is_file() else (),
        read_events(events) if events.is_file() else (),
        read_step_traces(traces) if traces.is_file() else (),
    )


def read_events(path: Path) -> tuple[Event, ...]:
    """The lines of ``events.jsonl``. Raises BadUsage."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise BadUsage(f"{path} cannot be read ({error.strerror}): name another folder") from error
    events = []
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except ValueError as error:
            raise BadUsage(f"{path}, line {number} is no valid JSON ({error}): correct or remove it") from error
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise BadUsage(f"{path}, line {number} names no event: correct or remove it")
        events.append(event)
    return tuple(events)


def describe_loss(loss: Event) -> str:
    """``worker 3 (stage 1, cell 1): killed by SIGKILL``."""
    where = "spare" if loss.get("stage") is None else f"stage {loss['stage']}, cell {loss['cell']}"
    return f"worker {loss.get('worker')} ({where}): {loss.get('detail') or loss.get('reason')}"


def _newest_run(
    folder: Path, reports: Sequence[StepReport], events: Sequence[Event], traces: Sequence[StepTrace]
) -> JobLog:
    """The files are appended to when a folder is used again: the line ``end`` parts the runs."""
    ends = [place for place, event in enumerate(events) if event["event"] == "end"]
    times = [float(events[place].get("time_s", 0.0)) for place in ends]
    newest_s = max((report.ended_s for report in reports if report.ended_s is not None), default=0.0)
    # A run that has begun since then has lines, or steps, after the last end.
    running = bool(ends) and (ends[-1] < len(events) - 1 or newest_s > times[-1])
    before = ends if running else ends[:-1]
    begin, since_s = (before[-1] + 1, times[len(before) - 1]) if before else (0, 0.0)
    return JobLog(
        folder=folder,
        reports=tuple(report for report in reports if report.ended_s is None or report.ended_s > since_s),
        events=tuple(events[begin:]),
        earlier_runs=len(before),
        traces=tuple(trace for trace in traces if trace.began_s > since_s),
    )


def _epoch_facts(epoch: int, reports: Sequence[StepReport]) -> EpochFacts:
    steady = [report for report in reports if not report.first] or reports
    steps = {report.step for report in reports}
    predicted = [report.predicted_s for report in reports if report.predicted_s is not None]
    by_layers: dict[tuple[int, int], list[StepReport]] = defaultdict(list)
    for report in steady:
        by_layers[report.first_layer, report.last_layer].append(report)
    return EpochFacts(
        epoch=epoch,
        first_step=min(steps),
        last_step=max(steps),
        steps=len(steps),
        workers=len({report.worker for report in reports}),
        reports=len(reports),
        measured_s=statistics.median(report.step_s for report in steady),
        predicted_s=predicted[-1] if predicted else None,
        stages=tuple(_stage_share(place, by_layers[layers]) for place, layers in enumerate(sorted(by_layers))),
    )


def _stage_share(place: int, reports: Sequence[StepReport]) -> StageShare:
    """Of one stage; ``place`` is its number where the reports do not say it."""
    newest = reports[-1]
    busy = [
        (sum(own.seconds for own in report.passes) + (report.optimizer_s or 0.0)) / report.step_s
        for report in reports
        if report.passes
    ]
    waiting = [report.waited_s / report.step_s for report in reports if report.waited_s is not None]
    return StageShare(
        stage=place if newest.stage is None else newest.stage,
        first_layer=newest.first_layer,
        last_layer=newest.last_layer,
        cells=newest.cells,
        busy=statistics.median(busy) if busy else None,
        waiting=statistics.median(waiting) if waiting else None,
    )


def _recovery(event: Event) -> Recovery:
    return Recovery(
        epoch=int(event["epoch"]),
        lost=tuple(describe_loss(loss) for loss in event["lost"]),
        seats=tuple(
            (int(loss["stage"]), int(loss["cell"]), int(loss["worker"]))
            for loss in event["lost"]
            if loss.get("stage") is not None
        ),
        resume_step=int(event["resume_step"]),
        phases_ms={name: float(event[name]) for name in (*PHASES, "total") if name in event},
    )


def _migration(event: Event) -> Migration:
    parts = []
    for move in event["moved"]:
        parts.append(f"{describe_layers(*move['layers'])} from stage {move['from']} to {move['to']}")
    if event["drained"]:
        parts.append(f"{describe_workers(event['drained'])} drained")
    return Migration(
        epoch=int(event["epoch"]),
        what="; ".join(parts) or "other items or cells",
        resume_step=int(event["resume_step"]),
        streamed_steps=int(event["streamed_steps"]),
        streamed_mb=(float(event["streamed_bytes"]) + float(event["gradient_bytes"])) / 1e6,
        phases_ms={name: float(event[name]) for name in (*MIGRATION_PHASES, "total") if name in event},
    )
