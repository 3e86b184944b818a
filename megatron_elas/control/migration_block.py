"""The block that every migration prints: what moved where, what went beside which steps, and for how long all stopped.

Invariant: the printed columns add up to the printed total, and the total is the time from the end of the last step
under the old plan to the begin of the first one under the new.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from megatron_elas.control.commands import ShowMigration
from megatron_elas.control.recovery_block import RULE, TENTHS_PER_S, format_table
from megatron_elas.control.states import Migration
from megatron_elas.control.step_meter import format_time
from megatron_elas.spec.layout import describe_layers
from megatron_elas.spec.migration import MIGRATION_PHASES, MigrationReport
from megatron_elas.spec.plan import ElasticPlan

Move = tuple[int, int, int, int]
"""Transformer layers ``[start, stop)``, the stage that had them, the stage that has them."""


def moves_of(before: ElasticPlan, after: ElasticPlan) -> tuple[Move, ...]:
    """Which layers came to another stage, ascending; stages are those of the plans, so one that vanishes shifts those
    behind it.
    """
    old, new = _stages_of(before), _stages_of(after)
    moved = [(layer, old[layer], new[layer]) for layer in sorted(old) if old[layer] != new[layer]]
    moves = []
    for (_, source, target), group in groupby(enumerate(moved), lambda entry: (entry[1][0] - entry[0], *entry[1][1:])):
        layers = [layer for _, (layer, _, _) in group]
        moves.append((layers[0], layers[-1] + 1, source, target))
    return tuple(moves)


def _stages_of(plan: ElasticPlan) -> dict[int, int]:
    return {layer: stage for stage, (start, stop) in enumerate(plan.layers) for layer in range(start, stop)}


def phases_ms(report: MigrationReport) -> dict[str, float]:
    """Length of every phase of the switch on one worker, and their ``total``, in milliseconds.

    Boundaries are rounded, not lengths, so that what is printed adds up exactly.
    """
    lengths: dict[str, float] = {}
    passed_s, before = 0.0, 0
    for phase in MIGRATION_PHASES:
        passed_s += report.phases_s.get(phase, 0.0)
        end = max(before, round(passed_s * TENTHS_PER_S))
        lengths[phase] = (end - before) / 10
        before = end
    return {**lengths, "total": before / 10}


def find_slowest(reports: Sequence[MigrationReport]) -> MigrationReport:
    """The worker that was blocked longest; of several the one with the lowest id."""
    return max(reports, key=lambda report: (report.blocked_s, -report.worker))


def show_migration(migration: Migration) -> ShowMigration:
    """The block, and the same for programs. At least one worker has reported."""
    before, after = migration.before, migration.after
    reports = [migration.reports[worker] for worker in sorted(migration.reports)]
    slowest = find_slowest(reports)
    lengths = phases_ms(slowest)
    moves = moves_of(before, after)
    streamed_steps = max(report.streamed_steps for report in reports)
    hand_over_s = max(report.hand_over_s for report in reports)
    verify_s = max(report.verify_s for report in reports)
    streamed, gradients, moved = (
        sum(getattr(report, name) for report in reports) for name in ("streamed_bytes", "gradient_bytes", "moved_bytes")
    )
    kinds = ((streamed, "state"), (gradients, "gradients"))
    streams = " and ".join(f"{size / 1e6:.1f} MB of {kind}" for size, kind in kinds if _shows(size))
    streams += f" in {streamed_steps} step{'s' * (streamed_steps != 1)}" if streams else ""
    text = "\n".join(
        [
            f"---- migrated: epoch {after.epoch} " + "-" * 60,
            *([f"drained  {describe_workers(migration.leaving)}"] if migration.leaving else []),
            f"before   {before.describe()}",
            f"now      {after.describe()}",
            *([f"moved    {', '.join(map(_describe_move, moves))}"] if moves else []),
            *([f"compared {forecast.removeprefix(', ')}"] if (forecast := describe_forecast(migration)) else []),
            *([f"beside   {streams}, their exchanges {hand_over_s * 1e3:.1f} ms longer"] if streams else []),
            f"switched before step {slowest.step}, blocked {lengths['total']:.1f} ms, "
            f"{f'{moved / 1e6:.1f} MB moved then, ' if _shows(moved) else ''}verified in {verify_s * 1e3:.1f} ms of "
            f"that step",
            *format_table(lengths, slowest.worker),
            RULE,
        ]
    )
    facts: dict[str, object] = {
        "before": before.placement.describe(),
        "after": after.placement.describe(),
        "layers_before": [list(layers) for layers in before.layers],
        "layers_after": [list(layers) for layers in after.layers],
        "moved": [{"layers": [start, stop], "from": source, "to": target} for start, stop, source, target in moves],
        "drained": list(migration.leaving),
        "resume_step": slowest.step,
        "plan_s": migration.plan_s,
        "streamed_steps": streamed_steps,
        "streamed_bytes": streamed,
        "gradient_bytes": gradients,
        "hand_over_ms": hand_over_s * 1e3,
        "moved_bytes": moved,
        "verify_ms": verify_s * 1e3,
        "slowest": slowest.worker,
        "reported": [report.worker for report in reports],
    }
    return ShowMigration(epoch=after.epoch, text=text, phases_ms=lengths, facts=facts)


def describe_workers(workers: Sequence[int]) -> str:
    """``worker 2``, ``workers 2, 3``."""
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"


def describe_forecast(migration: Migration) -> str:
    """What is predicted for both plans, by the same costs; empty where nothing is."""
    now, before = migration.target.predicted_s, migration.in_force_s
    if now is None or before is None:
        return ""
    return f", a step of {format_time(now)} predicted, and {format_time(before)} for the plan before by the same costs"


def _shows(size: int) -> bool:
    """Whether so many bytes are more than nothing in megabytes with one decimal."""
    return size >= 50_000


def _describe_move(move: Move) -> str:
    start, stop, source, target = move
    return f"{describe_layers(start, stop)} from stage {source} to {target}"
