"""``elas report``: what a job's steps took against what was predicted, and how it recovered, from its log folder."""

from __future__ import annotations

import argparse
import importlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_elas.cli.chrome_trace import make_chrome_trace
from megatron_elas.cli.closing import describe_unstruck, sum_up
from megatron_elas.cli.report_facts import EpochFacts, Event, JobLog, read_job_log
from megatron_elas.cli.report_page import draw_page
from megatron_elas.cli.text import format_count, format_pairs, format_span, format_table
from megatron_elas.control.commands import EndJob
from megatron_elas.control.step_log import ALL
from megatron_elas.control.step_meter import format_time
from megatron_elas.spec.errors import BadUsage, ExitCode
from megatron_elas.spec.tables import as_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which job, and where to write a page."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("path", nargs="?", type=Path, metavar="PATH", help="the folder that elasrun --log-dir named")
    which.add_argument(
        "--job", metavar="RUN_ID", help="a job that runs here, or how its run id begins; default: the only job here"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE",
        help="write a page with a plot of the steps, and Gantts of those around losses and migrations",
    )  # fmt: skip
    parser.add_argument(
        "--trace", type=Path, metavar="FILE",
        help="write the traced steps for Perfetto (ui.perfetto.dev) or chrome://tracing",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of text")


def run(flags: argparse.Namespace) -> int:
    """Read and print. Raises BadUsage."""
    for name, path in (("--html", flags.html), ("--trace", flags.trace)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise BadUsage(f"{name} {path} cannot be written: give the path of a file in an existing folder")
    log = read_job_log(_find_folder(flags.job) if flags.path is None else flags.path)
    if flags.html is not None:
        _write("--html", flags.html, draw_page(log, describe(log)))
    if flags.trace is not None:
        if not log.traces:
            raise BadUsage(
                f"--trace {flags.trace}: no step of {log.folder} was traced, which is done around losses and "
                f"migrations and from the second step on: let the job run longer, or ask for steps with "
                f"--elastic-trace-steps"
            )
        _write("--trace", flags.trace, json.dumps(make_chrome_trace(log)))
    print(json.dumps(_facts(log), indent=1) if flags.json else describe(log))
    return ExitCode.FINISHED


def _write(flag: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadUsage(f"{flag} {path} cannot be written ({error.strerror}): name another file") from error


def describe(log: JobLog) -> str:
    """The whole text."""
    parts = [_describe_log(log)]
    epochs, recoveries = log.epochs, log.recoveries
    if epochs:
        parts.append("steps by epoch: time from begin to end, busy and waiting shares per stage\n" + _epochs(epochs))
    if recoveries:
        parts.append("recoveries, in ms\n" + _recoveries(log))
    if log.migrations:
        parts.append("migrations: the time for which steps stood still, in ms\n" + _migrations(log))
    return "\n\n".join(parts)


def _find_folder(run_id: str | None) -> Path:
    # Loaded here only: it asks for more than reading a folder takes.
    jobs = importlib.import_module("megatron_elas.cli.running_jobs")
    job = jobs.find_job(run_id)
    if job.log_dir is None:
        raise BadUsage(
            f"job {job.run_id} writes nothing down: start it with elasrun --log-dir DIR, or ask 'elas status' about it"
        )
    return Path(job.log_dir)


def _describe_log(log: JobLog) -> str:
    pairs = [("folder", str(log.folder))]
    pairs.append(("steps", _describe_steps(log) if log.reports else "none was measured"))
    if log.traces:
        traced = " ".join(map(str, sorted({trace.step for trace in log.traces})))
        pairs.append(("traced", f"steps {traced}: --html draws them, --trace writes them for Perfetto"))
    if log.unrecovered:
        pairs.append(("lost", f"and not recovered from: {'; '.join(log.unrecovered)}"))
    if log.controller_restarts:
        steps_then = ", ".join(map(str, log.controller_restarts))
        pairs.append(
            ("controller", f"restarted {format_count(len(log.controller_restarts), 'time')} after step {steps_then}")
        )
    if log.end is None:
        pairs.append(("end", "none is logged: the job runs, or its launcher was killed"))
    else:
        pairs += _describe_end(log.end)
    if log.earlier_runs:
        pairs.append(("left out", f"{format_count(log.earlier_runs, 'earlier run')} in the same folder"))
    return format_pairs(*pairs)


def _describe_steps(log: JobLog) -> str:
    steps, workers = {own.step for own in log.reports}, {own.worker for own in log.reports}
    told, ran = len(log.reports), log.worker_steps
    span, by = format_span(min(steps), max(steps)), format_count(len(workers), "worker")
    if told >= ran:
        return f"{span}: {format_count(told, 'report')} of {by}"
    text = (
        f"{span}: {told} of {format_count(ran, 'report')} of {by}; a heartbeat tells a worker's newest step only, and "
        f"none that was cut"
    )
    by_epoch = Counter((own.epoch, own.worker) for own in log.reports)
    return text + (f"; after {ALL} of an epoch one a minute is logged" if max(by_epoch.values()) >= ALL else "")


def _describe_end(event: Event) -> list[tuple[str, str]]:
    """As the terminal was told, see ``closing``; runs of older releases logged less."""
    exit_code, sentence, worker = (event.get(name) for name in ("exit_code", "sentence", "worker"))
    if sentence:
        more = "" if worker is None else f", also in worker{worker}.log"
        return [("end", f"{sentence} (exit code {exit_code}{more})")]
    if exit_code != ExitCode.FINISHED:
        return [("end", f"exit code {exit_code}")]
    facts = {name: event[name] for name in ("steps", "lost", "drained") if name in event}
    pairs = [("end", sum_up(EndJob(exit_code=ExitCode.FINISHED, sentence="", **facts), event.get("workers")))]
    if unstruck := event.get("unstruck"):
        pairs.append(("faults", describe_unstruck(unstruck)))
    return pairs


def _epochs(epochs: Sequence[EpochFacts]) -> str:
    rows = [
        [
            str(own.epoch),
            format_span(own.first_step, own.last_step),
            str(own.steps),
            str(own.workers),
            format_time(own.measured_s),
            "" if own.predicted_s is None else format_time(own.predicted_s),
            "" if own.ratio is None else f"{own.ratio:.2f}",
            " ".join("?" if stage.busy is None else f"{stage.busy:.0%}" for stage in own.stages),
            " ".join("?" if stage.waiting is None else f"{stage.waiting:.0%}" for stage in own.stages),
            " ".join(f"{stage.last_layer - stage.first_layer}x{stage.cells}" for stage in own.stages),
        ]
        for own in epochs
    ]
    head = ["epoch", "steps", "seen", "workers", "measured", "predicted", "ratio", "busy", "waiting", "layers x cells"]
    return format_table(head, rows)


def _recoveries(log: JobLog) -> str:
    names = list(dict.fromkeys(name for recovery in log.recoveries for name in recovery.phases_ms))
    rows = [
        [
            str(recovery.epoch),
            str(recovery.resume_step),
            *(f"{recovery.phases_ms[name]:.1f}" if name in recovery.phases_ms else "" for name in names),
            "; ".join(recovery.lost),
        ]
        for recovery in log.recoveries
    ]
    return format_table(["epoch", "from step", *names, "lost"], rows)


def _migrations(log: JobLog) -> str:
    names = list(dict.fromkeys(name for migration in log.migrations for name in migration.phases_ms))
    rows = [
        [
            str(migration.epoch),
            str(migration.resume_step),
            *(f"{migration.phases_ms[name]:.1f}" if name in migration.phases_ms else "" for name in names),
            f"{migration.streamed_mb:.1f} MB in {format_count(migration.streamed_steps, 'step')}",
            migration.what,
        ]
        for migration in log.migrations
    ]
    return format_table(["epoch", "from step", *names, "beside", "what"], rows)


def _facts(log: JobLog) -> dict[str, Any]:
    return {
        "folder": str(log.folder),
        "epochs": [{**as_table(epoch), "ratio": epoch.ratio} for epoch in log.epochs],
        "traced_steps": sorted({(trace.epoch, trace.step) for trace in log.traces}),
        "recoveries": [as_table(recovery) for recovery in log.recoveries],
        "migrations": [as_table(migration) for migration in log.migrations],
        "unrecovered": log.unrecovered,
        "controller_restarts": log.controller_restarts,
        "exit_code": None if log.end is None else log.end.get("exit_code"),
        "earlier_runs": log.earlier_runs,
    }
