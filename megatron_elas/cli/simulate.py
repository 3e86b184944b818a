"""``elas simulate``: what becomes of a job over days of failures, under one policy or another. Nothing is run.

docs/simulator.md says what is simulated, and how to read the table.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_elas.cli.job_choice import add_job, read_job, read_policies
from megatron_elas.cli.text import format_count
from megatron_elas.planner.policies import POLICIES
from megatron_elas.simulator.engine import simulate
from megatron_elas.simulator.failure_rates import DAY_S, FailureRate, Rates, generate
from megatron_elas.simulator.outcome import Outcome
from megatron_elas.simulator.page import draw_page
from megatron_elas.simulator.plots import plot_shares, plot_throughput
from megatron_elas.simulator.rates import StepRates
from megatron_elas.simulator.table import as_values, format_table
from megatron_elas.simulator.trace_files import load_trace, write_trace
from megatron_elas.simulator.traces import Failure, Trace
from megatron_elas.spec.cluster import Cluster
from megatron_elas.spec.errors import BadUsage, ExitCode, NoFeasiblePlan
from megatron_elas.spec.job_profile import JobProfile
from megatron_elas.spec.tables import as_table, configs_folder

DAYS = 7.0
"""Simulated of a trace that is drawn."""
GENERATED = "generated"
MTBF_H, REPAIR_H = 6.0, 2.2
"""Of ``--trace generated``; the repair time is the one of configs/traces/llama3-405b.toml."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The job, what happens to it, and what to print."""
    add_job(parser.add_argument_group("the job"))
    what = parser.add_argument_group("what happens")
    what.add_argument(
        "--trace",
        default="llama3-405b",
        metavar="NAME",
        help=f"a profile of configs/traces ({', '.join(_known_traces())}), a file that ends in .jsonl, .csv or .toml, "
        f"or '{GENERATED}': single devices at --mtbf-h (default: llama3-405b)",
    )
    what.add_argument(
        "--days", type=float, metavar="N", help=f"how long (default: the trace's own length, or {DAYS:g})"
    )
    what.add_argument("--seed", type=int, metavar="S", help="of a trace that is drawn (default: 1)")
    what.add_argument(
        "--failure-factor", type=float, metavar="F", help="draw so many times as many failures and slow devices"
    )
    what.add_argument(
        "--mtbf-h", type=float, metavar="H", help=f"of '{GENERATED}': hours between failures (default: {MTBF_H:g})"
    )
    what.add_argument(
        "--repair-h", type=float, metavar="H", help=f"of '{GENERATED}': until repaired (default: {REPAIR_H:g})"
    )
    how = parser.add_argument_group("policies and output")
    how.add_argument(
        "--policy",
        default="ours,recycle,torchft",
        metavar="NAME,NAME",
        help=f"some of {', '.join(POLICIES)} (default: ours,recycle,torchft)",
    )
    how.add_argument(
        "--staggered", action="store_true", help="let ours begin a step on stages that are through, as recycle does"
    )
    how.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write the trace, plots (.svg, .png), outcomes and a page there"
    )
    how.add_argument("--json", action="store_true", help="print one JSON object in place of the table")


def run(flags: argparse.Namespace) -> int:
    """Simulate and print.

    Raises:
        BadUsage: A flag or a file cannot be used.
        NoFeasiblePlan: No policy can begin.
    """
    policies = read_policies(flags.policy)
    if flags.staggered and "ours" not in policies:
        raise BadUsage(f"--staggered is for ours: add it to --policy {flags.policy}")
    job, cluster = read_job(flags)
    trace = _read_trace(flags, cluster)
    if flags.out is not None:
        _make_folder(flags.out)
    outcomes: list[Outcome] = []
    refused: dict[str, str] = {}
    for policy in policies:
        try:
            rates = StepRates(job, cluster, "ours", staggered=True) if flags.staggered and policy == "ours" else None
            outcomes.append(simulate(job, cluster, trace, policy, rates=rates))
        except NoFeasiblePlan as error:
            refused[policy] = str(error)
    if not outcomes:
        raise NoFeasiblePlan("; ".join(f"{policy}: {why}" for policy, why in refused.items()))
    facts = _facts(job, cluster, trace)
    if flags.json:
        print(json.dumps(_values(job, cluster, trace, outcomes, refused), indent=1))
    else:
        print("\n".join(f"{name:8} {text}" for name, text in facts.items()) + "\n")
        print(format_table(outcomes))
        for policy, why in refused.items():
            print(f"{policy}: no plan to begin with: {why}")
    if flags.out is not None:
        _write_all(flags.out, job, cluster, trace, outcomes, refused)
        if not flags.json:
            print(f"\nwritten to {flags.out}: open {flags.out / 'index.html'}")
    return ExitCode.FINISHED


# ------------------------------------------------------------ inputs


def _known_traces() -> list[str]:
    return sorted(file.stem for file in (configs_folder() / "traces").glob("*.toml"))


def _read_trace(flags: argparse.Namespace, cluster: Cluster) -> Trace:
    for name in ("days", "failure_factor", "mtbf_h", "repair_h"):
        value = getattr(flags, name)
        if value is not None and not 0 < value < math.inf:
            raise BadUsage(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
    if flags.trace == GENERATED:
        found: Trace | Rates = _single_devices(flags, cluster)
    else:
        if flags.mtbf_h is not None or flags.repair_h is not None:
            raise BadUsage(f"--mtbf-h and --repair-h are for --trace {GENERATED}: leave them out for {flags.trace}")
        found = load_trace(flags.trace)
    if isinstance(found, Rates):
        factor = flags.failure_factor or 1.0
        rates = Rates(
            name=found.name if factor == 1 else f"{found.name} x{factor:g}",
            failures=tuple(replace(rate, per_day=rate.per_day * factor) for rate in found.failures),
            slowdowns=tuple(replace(rate, per_day=rate.per_day * factor) for rate in found.slowdowns),
        )
        trace = generate(cluster, rates, (flags.days or DAYS) * DAY_S, 1 if flags.seed is None else flags.seed)
    else:
        if flags.failure_factor is not None or flags.seed is not None:
            raise BadUsage(f"--seed and --failure-factor are for traces that are drawn, and {flags.trace} is fixed")
        trace = found if flags.days is None else found.cut(flags.days * DAY_S)
    trace.check_devices(cluster.num_devices, cluster.name)
    return trace


def _single_devices(flags: argparse.Namespace, cluster: Cluster) -> Rates:
    mtbf_h = flags.mtbf_h or MTBF_H
    rate = FailureRate(
        cause="device",
        scope="device",
        per_day=24 / mtbf_h / cluster.num_devices,
        repair_s=3600 * (flags.repair_h or REPAIR_H),
    )
    return Rates(name=f"a device every {mtbf_h:g} h", failures=(rate,))


def _facts(job: JobProfile, cluster: Cluster, trace: Trace) -> dict[str, str]:
    spec = job.spec
    spares = cluster.num_devices - spec.world_size
    failures = sum(isinstance(event, Failure) for event in trace.events)
    slow = len(trace.events) - failures
    return {
        "job": f"{job.name}: tensor {spec.tensor_parallel} x pipeline {spec.pipeline_parallel} x data "
        f"{spec.data_parallel}, {spec.num_microbatches} micro-batches of {spec.micro_batch_size}, "
        f"consistency {spec.consistency}",
        "cluster": f"{cluster.name}: {cluster.num_devices} x {cluster.device.name}"
        + (f", {spares} of them spare" if spares else ""),
        "trace": f"{trace.name}: {_format_days(trace.seconds)}, {format_count(failures, 'failure')}"
        + (f", {format_count(slow, 'slow device')}" if slow else ""),
    }


def _format_days(seconds: float) -> str:
    days = f"{seconds / DAY_S:g}"
    return f"{days} day" if days == "1" else f"{days} days"


def _values(
    job: JobProfile, cluster: Cluster, trace: Trace, outcomes: Sequence[Outcome], refused: dict[str, str]
) -> dict[str, object]:
    return {
        "job": job.name,
        "spec": as_table(job.spec),
        "cluster": cluster.name,
        "devices": cluster.num_devices,
        "trace": trace.name,
        "seconds": trace.seconds,
        "events": len(trace.events),
        "policies": [as_values(outcome) for outcome in outcomes],
        "no_plan": refused,
    }


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadUsage(f"--out {folder} cannot be made ({error.strerror}): name another folder") from error


def _write_all(
    folder: Path,
    job: JobProfile,
    cluster: Cluster,
    trace: Trace,
    outcomes: Sequence[Outcome],
    refused: dict[str, str],
) -> None:
    pictures = {"throughput": plot_throughput(outcomes), "shares": plot_shares(outcomes)}
    values = _values(job, cluster, trace, outcomes, refused)
    files: dict[str, str | bytes] = {
        "outcomes.json": json.dumps(values, indent=1) + "\n",
        "index.html": draw_page(outcomes, trace, list(pictures.values()), _facts(job, cluster, trace)),
    }
    for name, picture in pictures.items():
        files[f"{name}.svg"] = picture.svg()
        try:
            files[f"{name}.png"] = picture.png()
        except BadUsage as error:
            print(f"elas: {folder / name}.png was not written: {error}", file=sys.stderr)
    write_trace(trace, folder / "trace.jsonl")
    for file, content in files.items():
        try:
            (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)
        except OSError as error:
            raise BadUsage(f"{folder / file} cannot be written ({error.strerror}): name another folder") from error
