"""Which traced steps a report shows: the last one before the first event, and one under every plan after it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_elas.cli.report_facts import JobLog, Migration, Recovery
from megatron_elas.control.migration_block import describe_workers
from megatron_elas.spec.step_trace import StepTrace

MOST_STEPS = 12
"""That are shown; of more plans, the first and the newest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCell:
    """One cell in a shown step."""

    trace: StepTrace
    same_step: bool
    """False: the cell told nothing of the shown step, and this is its nearest one under the same plan."""
    lost: bool
    """The next event takes it away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownStep:
    """One step of all cells that traced it."""

    epoch: int
    step: int
    why: str
    """For people: ``after the loss of worker 3``."""
    cells: tuple[TracedCell, ...]
    """By stage and cell."""
    gone: tuple[str, ...]
    """Who was lost when the epoch began, in words."""
    began_s: float
    """The first cell's, as ``time.time()``."""
    measured_s: float
    """The step's time: the median of the workers that reported it."""
    predicted_s: float | None

    @property
    def span_s(self) -> float:
        """From the first cell's begin to the last one's end."""
        return max(self.begin_of(cell) + cell.trace.end_s for cell in self.cells)

    def begin_of(self, cell: TracedCell) -> float:
        """Seconds from the step's begin to the cell's; 0 where it shows another step."""
        return max(0.0, cell.trace.began_s - self.began_s) if cell.same_step else 0.0

    @property
    def layers(self) -> tuple[tuple[int, int, int], ...]:
        """(first layer, one past the last, traced cells) of every stage."""
        stages: dict[int, list[TracedCell]] = {}
        for cell in self.cells:
            stages.setdefault(cell.trace.stage, []).append(cell)
        return tuple((own[0].trace.first_layer, own[0].trace.last_layer, len(own)) for _, own in sorted(stages.items()))


def shown_steps(log: JobLog) -> tuple[ShownStep, ...]:
    """In the order of their epochs; none when nothing was traced."""
    epochs = sorted({trace.epoch for trace in log.traces})
    if len(epochs) > MOST_STEPS:
        epochs = [epochs[0], *epochs[1 - MOST_STEPS :]]
    return tuple(_show(log, epochs, place) for place in range(len(epochs)))


def _show(log: JobLog, epochs: Sequence[int], place: int) -> ShownStep:
    epoch = epochs[place]
    traces = [trace for trace in log.traces if trace.epoch == epoch]
    step = _choose_before(traces) if place == 0 else _choose_after(traces)
    recovery = _recovery_of(log, epoch)
    coming = _recovery_of(log, epochs[place + 1]) if place + 1 < len(epochs) else None
    taken = set() if coming is None else {(stage, cell) for stage, cell, _ in coming.seats}
    cells = []
    for worker in {trace.worker for trace in traces}:
        own = [trace for trace in traces if trace.worker == worker]
        nearest = min(own, key=lambda trace: (abs(trace.step - step), trace.step))
        cells.append(
            TracedCell(trace=nearest, same_step=nearest.step == step, lost=(nearest.stage, nearest.cell) in taken)
        )
    cells.sort(key=lambda cell: (cell.trace.stage, cell.trace.cell))
    same = [cell.trace for cell in cells if cell.same_step]
    reports = [report.step_s for report in log.reports if (report.epoch, report.step) == (epoch, step)]
    return ShownStep(
        epoch=epoch,
        step=step,
        why=_describe_reason(place, recovery, next((m for m in log.migrations if m.epoch == epoch), None)),
        cells=tuple(cells),
        gone=() if recovery is None or place == 0 else recovery.lost,
        began_s=min(trace.began_s for trace in same),
        measured_s=statistics.median(reports or [trace.step_s for trace in same]),
        predicted_s=next((facts.predicted_s for facts in log.epochs if facts.epoch == epoch), None),
    )


def _recovery_of(log: JobLog, epoch: int) -> Recovery | None:
    return next((recovery for recovery in log.recoveries if recovery.epoch == epoch), None)


def _choose_before(traces: Sequence[StepTrace]) -> int:
    """The newest step; the one before it if more cells told that: some may have been a step ahead."""
    newest = sorted({trace.step for trace in traces})[-2:]
    return max(newest, key=lambda step: (sum(trace.step == step for trace in traces), step))


def _choose_after(traces: Sequence[StepTrace]) -> int:
    """The first step that nothing disturbed."""
    return min((trace.first, trace.step) for trace in traces)[1]


def _describe_reason(place: int, recovery: Recovery | None, migration: Migration | None) -> str:
    if place == 0:
        return "before"
    if migration is not None:
        return f"after the migration of {migration.what}"
    if recovery is None:
        return "after a planned change"
    workers = [worker for _, _, worker in recovery.seats]
    return f"after the loss of {describe_workers(workers) if workers else 'a spare'}"
