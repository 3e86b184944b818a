"""The block that every recovery prints: who, why, where, what now, and how long each part took.

Invariant: the printed columns add up to the printed total, and the total is the wall time from the
fault (from its detection where nobody knows when it struck) to the end of the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_elas.control.commands import ShowBlock
from megatron_elas.control.states import Outage
from megatron_elas.control.step_meter import EpochTimes, format_time
from megatron_elas.spec.events import WorkerLost
from megatron_elas.spec.layout import Placement
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.report import PHASES, RecoveryReport

TENTHS_PER_S = 10_000
"""Times are printed in tenths of a millisecond."""
RULE = "-" * 80
"""The last line."""


def phases_ms(outage: Outage, report: RecoveryReport, plan_s: float) -> dict[str, float]:
    """Length of every phase on one worker's time line, and their ``total``, in milliseconds.

    Boundaries are rounded, not lengths, so that what is printed adds up exactly.

    Args:
        outage: What is recovered from; its earliest event starts the clock.
        report: The worker's marks. A phase that it did not mark has no length of its own, and a mark
            that lies before the one of an earlier phase (clocks of two hosts) counts as that one.
        plan_s: The planner's time. The part of it that was hidden behind unwinding is not counted again.
    """
    detected_s, started_s = outage.detected_s, outage.struck_s
    marks = {**report.marks_s, "detect": detected_s}
    if "settle" in marks:
        unwound_s = marks.get("quiesce", detected_s)
        marks["plan"] = marks["settle"]
        marks["settle"] = max(unwound_s, marks["settle"] - plan_s)
    lengths: dict[str, float] = {}
    before = 0
    for phase in PHASES:
        end = max(before, round((marks[phase] - started_s) * TENTHS_PER_S)) if phase in marks else before
        lengths[phase] = (end - before) / 10
        before = end
    return {**lengths, "total": before / 10}


def find_slowest(reports: Sequence[RecoveryReport]) -> RecoveryReport:
    """The worker that ended its first step last; of several the one with the lowest id."""
    return max(reports, key=lambda report: (max(report.marks_s.values(), default=0.0), -report.worker))


def format_block(outage: Outage, plan: ElasticPlan, reports: Sequence[RecoveryReport], plan_s: float) -> str:
    """The whole block, without a newline at its end. ``reports`` holds at least one."""
    slowest = find_slowest(reports)
    lengths = phases_ms(outage, slowest, plan_s)
    moved_bytes = sum(report.moved_bytes for report in reports)
    seated = plan.placement.workers
    since = "the fault" if any(loss.fault_s is not None for loss in outage.losses) else "it was noticed"
    return "\n".join(
        [
            f"---- recovered: epoch {plan.epoch} " + "-" * 60,
            *(_format_loss(outage, loss) for loss in outage.losses),
            *(f"left out worker {failure.worker} {failure.detail}" for failure in outage.failures),
            *(f"failed   {sentence}" for sentence in outage.unverified),
            *([] if outage.checkpoint is None else [f"state    from the checkpoint of iteration {outage.checkpoint}"]),
            f"before   {outage.began_in.describe()}",
            f"now      {plan.placement.describe()}",
            f"resumed  step {slowest.resume_step} on {len(seated)} of {len(outage.began_in.workers)} workers, "
            f"{lengths['total']:.1f} ms after {since}, {moved_bytes / 1e6:.1f} MB moved",
            *format_table(lengths, slowest.worker),
            *_format_background(reports),
            RULE,
        ]
    )


def add_step_times[Block: ShowBlock](block: Block, summary: Sequence[EpochTimes]) -> Block:
    """The block with a line about what steps took and are expected to take now, where there is a prediction.

    Args:
        block: Of the newest epoch, or one before it.
        summary: Of all epochs.
    """
    now = next((times.predicted_s for times in summary if times.epoch == block.epoch), None)
    if now is None:
        return block
    before = max(
        (times for times in summary if times.epoch < block.epoch and times.measured_s is not None),
        key=lambda times: times.epoch,
        default=None,
    )
    line = f"step     {format_time(now)} predicted"
    if before is not None:
        line += f", before {before.describe()}"
    facts = {
        "predicted": now,
        "predicted_before": None if before is None else before.predicted_s,
        "measured_before": None if before is None else before.measured_s,
    }
    return replace(
        block,
        text=f"{block.text.removesuffix(RULE)}{line}\n{RULE}",
        facts={**block.facts, "step_s": facts},
    )


def facts_of(outage: Outage, plan: ElasticPlan, report: RecoveryReport, background_s: float = 0.0) -> dict[str, object]:
    """What the block says besides its times, for programs. ``background_s`` is that of the worker where it was longest.

    A lost spare has no stage, cell and lane. Spares that live are survivors.
    """
    return {
        "lost": [loss_facts(outage.began_in, loss) for loss in outage.losses],
        "left_out": [{"worker": failure.worker, "detail": failure.detail} for failure in outage.failures],
        "before": outage.began_in.describe(),
        "after": plan.placement.describe(),
        "resume_step": report.resume_step,
        "failed_checks": list(outage.unverified),
        "checkpoint": outage.checkpoint,
        "beside": {"background_s": background_s},
        "survivors": sorted((*plan.placement.workers, *plan.placement.spares)),
    }


def loss_facts(before: Placement, loss: WorkerLost) -> dict[str, object]:
    """Who was lost, from where and why, for programs; None where a spare has no seat."""
    seat = before.find_seat(loss.worker)
    return {
        "worker": loss.worker,
        "stage": None if seat is None else seat.stage,
        "cell": None if seat is None else seat.cell,
        "lane": None if seat is None else seat.lane,
        "reason": str(loss.reason),
        "detail": loss.detail,
    }


def _format_loss(outage: Outage, loss: WorkerLost) -> str:
    seat = outage.began_in.find_seat(loss.worker)
    where = "spare" if seat is None else f"stage {seat.stage}, cell {seat.cell}, lane {seat.lane}"
    return f"lost     worker {loss.worker} ({where}): {loss.reason}, {loss.detail}"


def longest_background_s(reports: Sequence[RecoveryReport]) -> float:
    """Of the moves that ran beside the first step; 0 when there were none."""
    return max((report.background_s for report in reports), default=0.0)


def _format_background(reports: Sequence[RecoveryReport]) -> list[str]:
    seconds = longest_background_s(reports)
    return (
        [f"beside   optimizer state and copies moved for {seconds * 1e3:.1f} ms during first_step"] if seconds else []
    )


def format_table(lengths: dict[str, float], worker: int) -> list[str]:
    """Two lines: the phases, and how long each took on the worker, which was the slowest."""
    columns = [(name, f"{value:.1f}") for name, value in lengths.items()]
    widths = [max(len(name), len(value)) for name, value in columns]
    return [
        "ms       " + "  ".join(name.rjust(width) for (name, _), width in zip(columns, widths, strict=True)),
        "         "
        + "  ".join(value.rjust(width) for (_, value), width in zip(columns, widths, strict=True))
        + f"  (worker {worker}, the slowest)",
    ]
