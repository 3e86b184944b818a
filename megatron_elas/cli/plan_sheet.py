"""The text of ``elas plan``."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_elas.cli.plan_facts import BackupFacts, MoveFacts, OrderFacts, Span, StageFacts
from megatron_elas.cli.text import format_bytes, format_count, format_pairs, format_ranges, format_span, format_table
from megatron_elas.control.step_meter import format_time
from megatron_elas.planner.policies import PolicyStep
from megatron_elas.planner.profile import Fit
from megatron_elas.planner.situation import Situation
from megatron_elas.planner.step_plan import StepPlan
from megatron_elas.spec.cluster import Cluster
from megatron_elas.spec.job_profile import JobProfile


def describe_inputs(job: JobProfile, cluster: Cluster, lost: Sequence[tuple[int, int]], source: str) -> str:
    """What was asked."""
    spec = job.spec
    return format_pairs(
        (
            "job",
            f"{job.name}: {job.num_layers} layers, {spec.num_microbatches} micro-batches of "
            f"{format_count(spec.micro_batch_size, 'sample')}, consistency {spec.consistency}",
        ),
        (
            "grid",
            f"tensor {spec.tensor_parallel} x pipeline {spec.pipeline_parallel} x data {spec.data_parallel} = "
            f"{format_count(spec.world_size, 'worker')}",
        ),
        ("cluster", f"{cluster.name}: {format_count(cluster.num_devices, 'device')} ({cluster.device.name})"),
        ("costs", source),
        ("lost", " ".join(f"{stage}:{row}" for stage, row in lost) or "nothing"),
    )


def describe_fit(fit: Fit, reports: int) -> str:
    """How measured times compare with estimated ones."""
    rows = [[group, kind.replace("_", " "), f"{factor:.3g}"] for group, kind, factor in fit.factors]
    return (
        f"measured over estimated time, from {format_count(reports, 'report')}; fitted times differ from measured ones "
        f"by {fit.deviation:.1%} (median)\n" + format_table(["units", "pass", "factor"], rows)
    )


def describe_stages(stages: Sequence[StageFacts], step_s: float, memory_bytes: int) -> str:
    """A line for each stage."""
    rows = []
    for own in stages:
        rows.append(
            [
                str(own.stage),
                f"{own.first_layer}-{own.last_layer - 1} ({own.last_layer - own.first_layer})",
                str(len(own.cells)),
                _name_cells(own),
                _span(own.items),
                _span(own.item_samples),
                _span(own.samples),
                f"{own.clock:g}",
                f"{own.busy_s:.4g}",
                f"{own.busy_s / step_s:.0%}",
                format_bytes(own.memory_bytes),
            ]
        )
    head = ["stage", "layers", "cells", "rows", "items", "samples each", "samples", "clock", "busy s", "busy", "memory"]
    return (
        f"stages: items and samples are per cell and step, memory is a device's, of {format_bytes(memory_bytes)}; "
        f"S:R is row R of stage S\n" + format_table(head, rows)
    )


def describe_effect(plan: StepPlan, before: PolicyStep | None, after: PolicyStep) -> str:
    """The step before and after, and what share of the throughput is left."""
    if before is None:
        return f"step {after.step_s:.4g} s; stock 1F1B without a loss does not fit the memory"
    text = f"step {before.step_s:.4g} s without a loss (stock 1F1B), {after.step_s:.4g} s after it"
    kept = after.samples_per_s / before.samples_per_s
    share = plan.situation.surviving_share
    return f"{text}:\n{kept:.1%} of the throughput on {share:.1%} of the cells: {kept / share:.3f} of their share"


def describe_moves(moves: MoveFacts, backups: BackupFacts) -> str:
    """What is sent, and who keeps whose copy."""
    if moves.transfers:
        layers, transfers = format_count(moves.layers, "layer"), format_count(moves.transfers, "transfer")
        received, given = format_bytes(moves.received_bytes), format_bytes(moves.sent_bytes)
        sent = (
            f"{layers} to other stages; {format_bytes(moves.total_bytes)} of optimizer state in {transfers} per lane\n"
            f"         a device receives {received} and sends {given} at most: {format_time(moves.seconds)} of its link"
        )
    else:
        sent = "none"
    apart = len(backups.pairs) - backups.in_own_domain
    kept = (
        f"{apart} of {format_count(len(backups.pairs), 'worker')} have their copy in another failure domain; "
        f"nobody keeps more than {backups.most_wards}"
    )
    return format_pairs(("moves", sent), ("backups", kept))


def describe_order(order: OrderFacts) -> str:
    """What was checked; what is wrong is told elsewhere."""
    if order.faults:
        return format_pairs(("faults", str(len(order.faults))))
    what = "every cell" if order.exact else "one cell for each stage"
    text = f"{order.actions} actions of {what}: every sample once on every stage, no circle, within the memory"
    if order.receives_ahead is not None:
        text += f"\n         where sends wait for receives, these are posted {order.receives_ahead} actions ahead"
    return format_pairs(("checked", text))


def describe_policies(
    steps: Sequence[tuple[str, PolicyStep | str]], begin: Situation, now: Situation, before: PolicyStep | None
) -> str:
    """A line for each policy; a policy without a step has a sentence instead."""
    rows = []
    for name, step in steps:
        if isinstance(step, str):
            rows.append([name, "", "", "", "", "", "no plan: " + step])
            continue
        kept = None if before is None else step.samples_per_s / before.samples_per_s
        rows.append(
            [
                name,
                f"{step.step_s:.4g}",
                str(step.samples),
                f"{step.cells} of {begin.num_cells}",
                "" if kept is None else f"{kept:.3f}",
                "" if kept is None else f"{kept / now.surviving_share:.3f}",
                step.what if step.plan is None else "as above",
            ]
        )
    head = ["policy", "step s", "samples", "cells", "of no loss", "of the share left", "how"]
    notes = "policies: throughput relative to stock 1F1B without a loss, and that relative to the share of cells left"
    staggering = [name for name, step in steps if name == "recycle" or (not isinstance(step, str) and _staggers(step))]
    if staggering:
        notes += f"; optimizers are staggered by {' and '.join(staggering)} only"
    return notes + "\n" + format_table(head, rows)


def _staggers(step: PolicyStep) -> bool:
    return step.plan is not None and step.plan.freedom.staggered


def _name_cells(own: StageFacts) -> str:
    staying = format_ranges(row for origin, row in own.cells if origin == own.home)
    return " ".join([staying, *(f"{origin}:{row}" for origin, row in own.cells if origin != own.home)])


def _span(span: Span) -> str:
    return format_span(*span)
