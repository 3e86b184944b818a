"""``elas plan``: what would be planned for a job after a loss, what other policies would do, and how long steps take.

Everything is predicted, from profiles of the job and the cluster or from what a running job measured. Nothing is run.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_elas.cli import plan_sheet
from megatron_elas.cli.job_choice import add_job, read_job, read_policies
from megatron_elas.cli.plan_facts import (
    BackupFacts,
    MoveFacts,
    OrderFacts,
    StageFacts,
    backup_facts,
    move_facts,
    order_facts,
    stage_facts,
)
from megatron_elas.cli.text import format_count
from megatron_elas.planner.finding import REGROUPING, RESTAGING, RUNTIME, as_job_allows
from megatron_elas.planner.policies import EXACT_ITEMS, POLICIES, PolicyStep, ours, stock
from megatron_elas.planner.prediction import Predictor
from megatron_elas.planner.profile import Fit, fit_cost
from megatron_elas.planner.search import Freedom
from megatron_elas.planner.situation import Situation
from megatron_elas.planner.step_plan import QUICK, THOROUGH, Effort, StepPlan
from megatron_elas.schedule.actions import format_order
from megatron_elas.schedule.checks import Fault
from megatron_elas.schedule.gantt import write_gantt
from megatron_elas.schedule.grid import draw_text, print_orders
from megatron_elas.spec.cluster import Cluster
from megatron_elas.spec.cost import JobCost, load_cost
from megatron_elas.spec.errors import BadUsage, ElasticError, ExitCode, NoFeasiblePlan
from megatron_elas.spec.job_profile import JobProfile
from megatron_elas.spec.step_report import read_step_reports
from megatron_elas.spec.tables import as_table

Cell = tuple[int, int]
"""(Stage, row)."""
PICTURES = (".svg", ".png", ".html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The job, what it runs on, what it lost, and what to print."""
    what = parser.add_argument_group("the job")
    add_job(what)
    what.add_argument(
        "--lost", type=read_cell, nargs="+", action="extend", default=[], metavar="STAGE:ROW", help="cells, from 0"
    )
    how = parser.add_argument_group("the plan")
    how.add_argument(
        "--policy",
        default="ours",
        metavar="NAME,NAME",
        help=f"compared in a table when there are several: {', '.join(POLICIES)} (default: ours)",
    )
    how.add_argument(
        "--effort",
        choices=("quick", "thorough"),
        default="thorough",
        help="quick: as while workers wait; thorough: as while training goes on (default)",
    )
    how.add_argument(
        "--freedom",
        choices=("all", "runtime"),
        default="all",
        help="ours: what may change; all: whatever a step allows (default), runtime: what a job does at once",
    )
    how.add_argument(
        "--staggered",
        action="store_true",
        help="ours: stages step their optimizers one by one, as recycle's do; today's runtime does not",
    )
    costs = how.add_mutually_exclusive_group()
    costs.add_argument("--cost", type=Path, metavar="FILE.json", help="what the layers cost, as --save-cost wrote it")
    costs.add_argument(
        "--measured", type=Path, metavar="STEPS.jsonl", help="fit what the layers cost to a job's reports"
    )
    how.add_argument("--save-cost", type=Path, metavar="FILE.json", help="write what the layers cost")
    output = parser.add_argument_group("output")
    output.add_argument("--grid", action="store_true", help="print the schedule: over time, then each cell's order")
    output.add_argument("--gantt", type=Path, metavar="FILE", help="draw the schedule as .svg, .png or .html")
    output.add_argument("--json", action="store_true", help="print one JSON object in place of text")


def read_cell(text: str) -> Cell:
    """``1:2``: stage 1, row 2."""
    found = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no cell: write its stage and its row, such as 1:2")
    return int(found[1]), int(found[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """What to plan for."""

    job: JobProfile
    cluster: Cluster
    begin: Situation
    """Without a loss."""
    now: Situation
    lost: tuple[Cell, ...]
    source: str
    """Where the costs come from."""
    fit: Fit | None
    reports: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """Our plan, and all that is told of it."""

    plan: StepPlan
    stages: tuple[StageFacts, ...]
    moves: MoveFacts
    backups: BackupFacts
    order: OrderFacts


def run(flags: argparse.Namespace) -> int:
    """Plan and print.

    Raises:
        BadUsage: A flag or a file cannot be used.
        NoFeasiblePlan: What is left cannot carry the job.
    """
    policies = read_policies(flags.policy)
    _check_outputs(flags, policies)
    given = _read_inputs(flags)
    before = _try_stock(given.begin)
    effort = _choose_effort(flags.effort, given.now)
    steps = [(name, _try_policy(name, given, effort, flags)) for name in policies]
    if all(isinstance(step, str) for _, step in steps):
        raise NoFeasiblePlan("; ".join(f"{name}: {step}" for name, step in steps))
    if flags.save_cost is not None:
        _write(flags.save_cost, json.dumps(as_table(given.begin.cost), indent=1) + "\n")
    planned = _look_into(dict(steps).get("ours"), given)
    if planned is not None and flags.gantt is not None:
        _draw(planned, flags.gantt, given)
    if flags.json:
        print(json.dumps(_facts(given, before, steps, planned, grid=flags.grid), indent=1))
    else:
        print("\n\n".join(_paragraphs(given, before, steps, planned, flags)))
    if planned is not None:
        _refuse_faults(planned.order.faults)
    return ExitCode.FINISHED


def _refuse_faults(faults: Sequence[Fault]) -> None:
    if faults:
        first = faults[0]
        raise ElasticError(
            f"the schedule has {format_count(len(faults), 'fault')}, the first in stage {first.stage}, cell "
            f"{first.cell}: {first.text}; this is an error of the planner: report it with the command"
        )


# ------------------------------------------------------------ inputs


def _check_outputs(flags: argparse.Namespace, policies: Sequence[str]) -> None:
    """Before anything is computed."""
    if flags.gantt is not None and flags.gantt.suffix not in PICTURES:
        raise BadUsage(f"--gantt {flags.gantt}: a picture ends in {', '.join(PICTURES)}")
    if "ours" not in policies and (flags.grid or flags.gantt is not None):
        raise BadUsage(f"--grid and --gantt show the schedule of ours: add it to --policy {flags.policy}")
    for name, path in (("--gantt", flags.gantt), ("--save-cost", flags.save_cost)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise BadUsage(f"{name} {path} cannot be written: give the path of a file in an existing folder")


def _read_inputs(flags: argparse.Namespace) -> _Inputs:
    job, cluster = read_job(flags)
    begin = Situation.of(job, cluster)
    fit, reports, source = None, 0, f"estimated for {cluster.device.name}"
    if flags.cost is not None:
        begin = replace(begin, cost=_read_cost(flags.cost, begin.cost))
        source = f"read from {flags.cost}"
    elif flags.measured is not None:
        read = read_step_reports(flags.measured)
        # The first steps under a plan are no measure of those after them.
        read = tuple(report for report in read if not report.first) or read
        layers = max((report.last_layer for report in read if report.passes), default=begin.cost.num_layers)
        if layers != begin.cost.num_layers:
            raise BadUsage(
                f"--measured {flags.measured}: its steps are of a model with {layers} layers, and --job has "
                f"{begin.cost.num_layers}: name the job that was measured"
            )
        try:
            fit = fit_cost(begin.cost, read)
        except BadUsage as error:
            raise BadUsage(f"--measured {flags.measured}: {error}") from error
        begin, reports = replace(begin, cost=fit.cost), len(read)
        source = f"fitted to {flags.measured}"
    lost = tuple(sorted(set(flags.lost)))
    _check_lost(lost, job)
    return _Inputs(
        job=job,
        cluster=cluster,
        begin=begin,
        now=begin.without(lost),
        lost=lost,
        source=source,
        fit=fit,
        reports=reports,
    )


def _read_cost(path: Path, estimate: JobCost) -> JobCost:
    cost = load_cost(path)
    if cost.num_layers != estimate.num_layers:
        raise BadUsage(
            f"--cost {path} is of a model with {cost.num_layers} layers, and --job has {estimate.num_layers}: "
            f"give the file that was saved for this job"
        )
    return cost


def _check_lost(lost: Sequence[Cell], job: JobProfile) -> None:
    stages, rows = job.spec.pipeline_parallel, job.spec.data_parallel
    for stage, row in lost:
        if stage >= stages or row >= rows:
            raise BadUsage(
                f"--lost {stage}:{row} is no cell of {stages} stages and {rows} rows: stages are 0 to {stages - 1}, "
                f"rows 0 to {rows - 1}"
            )


# ------------------------------------------------------------ plans


def _choose_effort(name: str, now: Situation) -> Effort:
    if name == "quick":
        return QUICK
    return replace(THOROUGH, exact=now.num_stages * now.job.num_microbatches <= EXACT_ITEMS)


def _try_stock(begin: Situation) -> PolicyStep | None:
    try:
        return stock(begin)
    except NoFeasiblePlan:
        return None


def _try_policy(name: str, given: _Inputs, effort: Effort, flags: argparse.Namespace) -> PolicyStep | str:
    """Its step, or why there is none."""
    if name != "ours":
        return _try(partial(POLICIES[name], given.begin, given.lost))
    step: PolicyStep | str = ""
    for freedom in _choose_freedoms(flags.freedom, given.now):
        plan = partial(ours, given.begin, given.lost, effort=effort, staggered=flags.staggered, freedom=freedom)
        step = _try(plan)
        if isinstance(step, PolicyStep):
            break
    return step


def _choose_freedoms(name: str, now: Situation) -> tuple[Freedom, ...]:
    """As much as is needed, the least first."""
    if name == "all":
        return (Freedom(),)
    freedoms = (REGROUPING,) if now.lost_stages else (RUNTIME, RESTAGING, REGROUPING)
    return tuple(as_job_allows(freedom, now.job) for freedom in freedoms)


def _try(policy: Callable[[], PolicyStep]) -> PolicyStep | str:
    try:
        return policy()
    except NoFeasiblePlan as error:
        return str(error)


def _look_into(step: PolicyStep | str | None, given: _Inputs) -> _Planned | None:
    if not isinstance(step, PolicyStep) or step.plan is None:
        return None
    plan = step.plan
    predictor = Predictor(plan.situation, exact=plan.effort.exact, staggered=plan.freedom.staggered)
    return _Planned(
        plan=plan,
        stages=stage_facts(plan, predictor),
        moves=move_facts(plan),
        backups=backup_facts(plan, given.cluster, frozenset(given.lost)),
        order=order_facts(plan, predictor),
    )


# ------------------------------------------------------------ output


def _paragraphs(
    given: _Inputs,
    before: PolicyStep | None,
    steps: Sequence[tuple[str, PolicyStep | str]],
    planned: _Planned | None,
    flags: argparse.Namespace,
) -> list[str]:
    parts = [plan_sheet.describe_inputs(given.job, given.cluster, given.lost, given.source)]
    if given.fit is not None:
        parts.append(plan_sheet.describe_fit(given.fit, given.reports))
    if planned is not None:
        plan, step = planned.plan, dict(steps)["ours"]
        assert isinstance(step, PolicyStep)
        parts.append(plan.explain())
        parts.append(plan_sheet.describe_stages(planned.stages, plan.step_s, given.now.memory_bytes))
        parts.append(
            "\n".join(
                (
                    plan_sheet.describe_effect(plan, before, step),
                    plan_sheet.describe_moves(planned.moves, planned.backups),
                    plan_sheet.describe_order(planned.order),
                )
            )
        )
    if len(steps) > 1 or planned is None:
        parts.append(plan_sheet.describe_policies(steps, given.begin, given.now, before))
    if planned is not None and flags.grid:
        parts.append(
            "the schedule up to the last gradient, and each cell's order\n" + draw_text(planned.order.timeline)
        )
        parts.append(print_orders(planned.plan.prediction.schedule, planned.order.faults))
    if planned is not None and flags.gantt is not None:
        parts.append(f"drawn in {flags.gantt}")
    if flags.save_cost is not None:
        parts.append(f"costs written to {flags.save_cost}: give it back with --cost")
    return parts


def _facts(
    given: _Inputs,
    before: PolicyStep | None,
    steps: Sequence[tuple[str, PolicyStep | str]],
    planned: _Planned | None,
    *,
    grid: bool,
) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "job": given.job.name,
        "cluster": given.cluster.name,
        "spec": as_table(given.job.spec),
        "costs": given.source,
        "lost": given.lost,
        "surviving_share": given.now.surviving_share,
        "before_s": None if before is None else before.step_s,
        "policies": [_policy_facts(name, step, given.now, before) for name, step in steps],
    }
    if given.fit is not None:
        factors = [{"units": group, "pass": kind, "factor": factor} for group, kind, factor in given.fit.factors]
        facts["fit"] = {"reports": given.reports, "deviation": given.fit.deviation, "factors": factors}
    if planned is not None:
        facts["plan"] = _plan_facts(planned, grid=grid)
    return facts


def _policy_facts(name: str, step: PolicyStep | str, now: Situation, before: PolicyStep | None) -> dict[str, Any]:
    if isinstance(step, str):
        return {"policy": name, "no_plan": step}
    kept = None if before is None else step.samples_per_s / before.samples_per_s
    return {
        "policy": name,
        "step_s": step.step_s,
        "samples": step.samples,
        "cells": step.cells,
        "throughput_share": kept,
        "share_of_surviving": None if kept is None else kept / now.surviving_share,
        "how": step.what,
    }


def _plan_facts(planned: _Planned, *, grid: bool) -> dict[str, Any]:
    plan, order = planned.plan, planned.order
    schedule = plan.prediction.schedule
    clocks = {"nominal": plan.nominal, "boosted": plan.boosted, "slowed": plan.slowed}
    facts: dict[str, Any] = {
        "step_s": plan.step_s,
        "bound_s": plan.prediction.bound_s,
        "nothing_s": None if plan.nothing is None else plan.nothing.step_s,
        "micro_batch_size": plan.candidate.size,
        "deals": plan.candidate.deals,
        "stages": [as_table(stage) for stage in planned.stages],
        "clocks": {name: as_table(clocked) for name, clocked in clocks.items()},
        "moves": as_table(planned.moves),
        "backups": planned.backups.pairs,
        "explain": plan.explain().splitlines(),
        "exact": order.exact,
        "actions": order.actions,
        "receives_ahead": order.receives_ahead,
        "faults": [fault._asdict() for fault in order.faults],
    }
    if grid:
        facts["orders"] = {f"{s}.{c}": format_order(schedule.orders[s][c]) for s, c in schedule.cells()}
    return facts


def _draw(planned: _Planned, path: Path, given: _Inputs) -> None:
    title = (
        f"{given.job.name} on {given.cluster.name}, lost: {' '.join(f'{s}:{r}' for s, r in given.lost) or 'nothing'}"
    )
    try:
        write_gantt(planned.order.timeline, path, title=title)
    except OSError as error:
        raise BadUsage(f"--gantt {path} cannot be written ({error.strerror}): name another file") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise BadUsage(f"{path} cannot be written ({error.strerror}): name another file") from error
