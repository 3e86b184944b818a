"""What the controller knows of the time of steps: measured by the workers, predicted by the planner.

The costs that plans are made with are fitted to the workers' reports now and then, on another thread, so that a plan
that workers wait for takes the newest fit and fits nothing. The forecast of an epoch is made with what was measured
before it, so it is one. That of the first epoch comes from the profile, and is made anew, once, when every stage has
been measured.
"""

from __future__ import annotations

import asyncio
import logging

from megatron_elas.control.costing import Costing, Reckoning
from megatron_elas.control.launch import Launch
from megatron_elas.control.step_meter import KEPT, StepMeter
from megatron_elas.planner.job_costs import JobCosts
from megatron_elas.planner.plan import predict_step_s
from megatron_elas.spec.errors import ElasticError
from megatron_elas.spec.job_profile import JobProfile
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.step_report import StepReport

logger = logging.getLogger(__name__)

FITTED_WORKERS = 1024
"""Whose reports a fit takes at most."""


class Outlook:
    """Of one job; for the event loop's thread."""

    def __init__(self, launch: Launch) -> None:
        self.meter = StepMeter()
        self._costing = Costing(launch)
        self._newest: Reckoning | None = None
        self._profile: JobProfile | None = None
        self._plan: ElasticPlan | None = None
        self._unread = 0
        """Reports since the last fit, or the last change of plan."""
        self._workers = 0
        """With a seat."""
        self._fitting = False
        self._told: str | None = None
        """The newest problem that was logged."""

    def reckon(self, profile: JobProfile | None) -> JobCosts | None:
        """The costs to plan with now; None: every layer counts the same."""
        if self._newest is not None:
            return self._newest.costs
        try:
            return self._costing.reckon(profile, ()).costs
        except ElasticError as error:  # it was there when the job was launched
            self._tell(f"plans count layers: {error}")
            return None

    def follow(self, plan: ElasticPlan, profile: JobProfile | None) -> None:
        """This plan is in force, for a job of this profile."""
        if self._plan is None or plan.epoch > self._plan.epoch:
            self._plan, self._profile = plan, profile
            self._workers, self._unread = len(plan.placement.workers), 0
            self.meter.follow(plan)

    def take(self, report: StepReport) -> StepReport:
        """A worker's report, completed by what was predicted for its epoch. Without a plan in force nothing is kept."""
        if self._plan is None:
            return report
        self._unread += 1
        return self.meter.take(report)

    @property
    def is_fit_due(self) -> bool:
        """Whether so much was measured since the last fit that ``fit`` should run."""
        if self._fitting or self._plan is None or self._profile is None:
            return False
        rounds = 1 if self._newest is None else KEPT
        return self._unread >= rounds * self._workers and self.meter.is_measured(self._plan.epoch)

    async def fit(self) -> None:
        """Fit the costs to what was measured, and with them the first epoch's forecast."""
        plan, profile, reports = self._plan, self._profile, self.meter.sample(FITTED_WORKERS)
        assert plan is not None and profile is not None
        self._fitting, self._unread = True, 0
        try:
            reckoning = await asyncio.to_thread(self._costing.reckon, profile, reports)
            seconds = None
            if self._newest is None and plan.epoch == 0 and reckoning.costs is not None:
                seconds = await asyncio.to_thread(predict_step_s, profile.spec, plan, reckoning.costs)
        except ElasticError as error:
            self._tell(f"plans do not go by measured steps: {error}")
            return
        except Exception:  # no training may end because its steps cannot be foretold
            logger.exception("plans do not go by measured steps")
            return
        finally:
            self._fitting = False
        self._newest = reckoning
        self._tell(reckoning.problem and f"plans do not go by measured steps: {reckoning.problem}")
        if seconds is not None:
            self.meter.set_forecast(plan.epoch, seconds)

    def _tell(self, problem: str | None) -> None:
        if problem is not None and problem != self._told:
            logger.warning("%s", problem)
        self._told = problem
