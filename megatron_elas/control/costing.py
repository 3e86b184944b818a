"""What the controller plans with: the cost of the job's layers, from a profile and from the job's own steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_elas.control.launch import CostSource, Launch
from megatron_elas.planner.job_costs import JobCosts
from megatron_elas.planner.profile import fit_cost
from megatron_elas.planner.time_model import make_time_model
from megatron_elas.spec.cluster import load_cluster
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.job_profile import JobProfile
from megatron_elas.spec.step_report import StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Reckoning:
    """Costs, and where they come from."""

    costs: JobCosts | None
    """None: nothing is known of the model, and every layer counts the same."""
    source: CostSource
    deviation: float | None = None
    """Of the fitted times of passes from the measured ones: median, relative."""
    problem: str | None = None
    """Why what was measured is not used, though it was asked for."""


class Costing:
    """Of one job. Pure but for the profile, which is read once; may be used from any thread."""

    def __init__(self, launch: Launch) -> None:
        self._source = launch.costs
        self._cluster = launch.cluster
        self._estimate: JobCosts | None = None

    def reckon(self, profile: JobProfile | None, reports: Sequence[StepReport]) -> Reckoning:
        """The costs to plan with.

        Args:
            profile: What the workers said of their job when they joined; None: with flags that leave it open.
            reports: Of the job's steps, of any epochs; without any, the profile decides alone.

        Raises:
            BadUsage: The cluster's profile cannot be read any more.
        """
        if profile is None:
            return Reckoning(costs=None, source="profile")
        if self._estimate is None:
            # Clocks are part of a plan only where somebody sets them; no runtime of ours does.
            if profile.emulated is None:
                costs = JobCosts.of(profile, load_cluster(self._cluster))
            else:
                costs = make_time_model(profile, profile.emulated).costs
            self._estimate = replace(costs, clock=None)
        estimate = self._estimate
        reports = [report for report in reports if report.passes]
        if self._source == "profile" or not reports:
            return Reckoning(costs=estimate, source="profile")
        try:
            fit = fit_cost(estimate.cost, reports)
        except BadUsage as error:
            return Reckoning(costs=estimate, source="profile", problem=str(error))
        return Reckoning(costs=replace(estimate, cost=fit.cost), source="measured", deviation=fit.deviation)
