"""What the running job has measured of its steps: the newest reports, and how they compare with what the plan said.

Pure: no clock and no file. Memory is bounded: the newest ``KEPT`` reports of every worker, and one line for each of
the newest ``EPOCHS`` epochs.

The first step of a worker under a plan (``StepReport.first``) is no measure of the steps after it: its report is
completed like any other, and not kept.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from dataclasses import dataclass, replace

from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.step_report import StepReport

KEPT = 8
"""Reports of every worker."""
EPOCHS = 256
"""Epochs that the summary goes back to."""
CLOCKS = (0.05, 20.0)
"""Between which a device's clock is, relative to the nominal one."""
ENOUGH = 2
"""Reports of a stage that make it measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochTimes:
    """The steps of one epoch, but for the first of every worker."""

    epoch: int
    reports: int
    """That came, of all workers."""
    measured_s: float | None
    """Time of a step: the median over the newest reports of all workers; None before there is one."""
    predicted_s: float | None
    """What the plan said; None without a prediction."""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted time."""
        if self.measured_s is None or self.predicted_s is None:
            return None
        return self.measured_s / self.predicted_s

    def describe(self) -> str:
        """For people: ``412.0 ms measured, 398.0 ms predicted, ratio 1.04``; empty when nothing is known."""
        parts = []
        if self.measured_s is not None:
            parts.append(f"{format_time(self.measured_s)} measured")
        if self.predicted_s is not None:
            parts.append(f"{format_time(self.predicted_s)} predicted")
        if self.ratio is not None:
            parts.append(f"ratio {self.ratio:.2f}")
        return ", ".join(parts)


def format_time(seconds: float) -> str:
    """Of a step, for people."""
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.1f} ms"


class StepMeter:
    """Of one job."""

    def __init__(self) -> None:
        self._kept: dict[int, deque[StepReport]] = defaultdict(lambda: deque(maxlen=KEPT))
        """By worker, oldest first."""
        self._past: deque[EpochTimes] = deque(maxlen=EPOCHS)
        """Of epochs before the newest one."""
        self._newest = EpochTimes(epoch=0, reports=0, measured_s=None, predicted_s=None)
        """``measured_s`` is not up to date."""
        self._plan: ElasticPlan | None = None
        self._stage_of: dict[int, int] = {}
        """Of the plan's workers."""
        self._counts: list[int] = []
        """Reports of every stage under the plan."""

    # ------------------------------------------------------------ what it is told

    def follow(self, plan: ElasticPlan) -> None:
        """This plan is in force. What it predicts is its epoch's forecast, until another one is set."""
        if self._plan is not None and plan.epoch <= self._plan.epoch:
            return
        self._plan = plan
        stages = plan.placement.stages
        self._stage_of = {w: stage for stage, cells in enumerate(stages) for cell in cells for w in cell.workers}
        self._counts = [0] * len(stages)
        for report in self.reports(plan.epoch):  # that came before
            if report.worker in self._stage_of:
                self._counts[self._stage_of[report.worker]] += 1
        self._begin(plan.epoch)
        if plan.predicted_s is not None:
            self.set_forecast(plan.epoch, plan.predicted_s)

    def set_forecast(self, epoch: int, seconds: float | None) -> None:
        """What a step of the epoch takes by the costs that are known now; None: nobody can say.

        A forecast of an epoch that is over changes nothing.
        """
        self._begin(epoch)
        if epoch == self._newest.epoch:
            self._newest = replace(self._newest, predicted_s=seconds)

    def take(self, report: StepReport) -> StepReport:
        """Keep a report, if it is of the newest epoch. Gives it with what was predicted for its epoch.

        One that does not fit the plan in force, whoever made it, is not kept.
        """
        if self._plan is None or report.epoch <= self._plan.epoch:
            self._begin(report.epoch)
        if report.epoch == self._newest.epoch and not report.first and self._count(report):
            self._kept[report.worker].append(report)
            self._newest = replace(self._newest, reports=self._newest.reports + 1)
        return replace(report, predicted_s=self.predicted_s(report.epoch))

    def _count(self, report: StepReport) -> bool:
        """Whether the report is one of the plan in force, as far as there is a plan; then its stage has one more."""
        if self._plan is None or report.epoch != self._plan.epoch:
            return True
        stage = self._stage_of.get(report.worker)
        if stage is None or not CLOCKS[0] <= report.clock <= CLOCKS[1]:
            return False
        if (report.first_layer, report.last_layer) != self._plan.layers[stage]:
            return False
        if report.cells != len(self._plan.placement.stages[stage]):
            return False
        self._counts[stage] += 1
        return True

    def _begin(self, epoch: int) -> None:
        if epoch <= self._newest.epoch:
            return
        if self._newest.reports or self._newest.predicted_s is not None:
            self._past.append(self._up_to_date())
        self._newest = EpochTimes(epoch=epoch, reports=0, measured_s=None, predicted_s=None)

    def _up_to_date(self) -> EpochTimes:
        times = [report.step_s for report in self.reports(self._newest.epoch)]
        return replace(self._newest, measured_s=statistics.median(times) if times else None)

    # ------------------------------------------------------------ what it says

    def reports(self, epoch: int | None = None) -> tuple[StepReport, ...]:
        """The kept ones, of one epoch or of all, by worker and age: to fit costs to."""
        return tuple(
            report
            for _, kept in sorted(self._kept.items())
            for report in kept
            if epoch is None or report.epoch == epoch
        )

    def sample(self, workers: int) -> tuple[StepReport, ...]:
        """The two newest reports of so many workers at most, spread evenly over all."""
        every = -(-len(self._kept) // workers)
        return tuple(report for worker in sorted(self._kept)[::every] for report in list(self._kept[worker])[-2:])

    def is_measured(self, epoch: int) -> bool:
        """Whether every stage of the epoch's plan has ``ENOUGH`` reports. Never before ``follow`` told that plan."""
        if self._plan is None or self._plan.epoch != epoch:
            return False
        return min(self._counts) >= ENOUGH

    def now(self, epoch: int) -> EpochTimes:
        """The epoch's steps as they are now: of every worker's reports only the newest one counts."""
        newest = [kept[-1].step_s for kept in self._kept.values() if kept[-1].epoch == epoch]
        return EpochTimes(
            epoch=epoch,
            reports=len(newest),
            measured_s=statistics.median(newest) if newest else None,
            predicted_s=self.predicted_s(epoch),
        )

    def predicted_s(self, epoch: int) -> float | None:
        """The epoch's forecast."""
        return next((times.predicted_s for times in (self._newest, *self._past) if times.epoch == epoch), None)

    def summary(self) -> tuple[EpochTimes, ...]:
        """One line per epoch in which something was measured or predicted, oldest first."""
        newest = self._up_to_date()
        said = newest.reports or newest.predicted_s is not None
        return (*self._past, newest) if said else tuple(self._past)
