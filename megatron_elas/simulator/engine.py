"""The simulation of a job: events in the order of their time, whole steps between them."""

from __future__ import annotations

from megatron_elas.simulator.outcome import Outcome
from megatron_elas.simulator.traces import Trace
from megatron_elas.spec.cluster import Cluster
from megatron_elas.spec.job_profile import JobProfile


def simulate(job: JobProfile, cluster: Cluster, trace: Trace, policy: str) -> Outcome:
    """Run a job through a trace.

    Args:
        job: What is trained, on a grid that the cluster has devices for.
        cluster: Devices that the grid does not need are spares.
        trace: What happens.
        policy: One of ``planner.policies.POLICIES``.

    Raises:
        BadUsage: The trace or the grid does not fit the cluster, or there is no such policy.
        NoFeasiblePlan: The job does not even begin.
    """
    raise NotImplementedError
