"""What a running job's plans are reckoned with: what its layers cost, and the devices that its workers compute on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_elas.planner.cost_model import estimate_job
from megatron_elas.spec.cluster import Cluster, Link
from megatron_elas.spec.cost import JobCost, UnitCost, Work
from megatron_elas.spec.device import ClockRange, PowerCurve
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.job_profile import JobProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCosts:
    """Costs of a job on its devices."""

    cost: JobCost
    """Of one lane of a cell, tensor parallelism being inside the numbers."""
    memory_bytes: int
    """Of a device, as far as a plan may fill it."""
    link: Link
    """Between cells."""
    clock: ClockRange | None = None
    """None: clocks cannot be set."""
    power: PowerCurve | None = None
    """None: energy is not known."""

    @staticmethod
    def of(profile: JobProfile, cluster: Cluster) -> JobCosts:
        """The costs of a job, in tensor-parallel cells as its spec says, on the devices of a cluster."""
        device = cluster.device
        return JobCosts(
            cost=estimate_job(profile, cluster),
            memory_bytes=device.usable_bytes,
            link=cluster.between,
            clock=device.clock,
            power=device.power,
        )

    def check(self, job: JobSpec) -> None:
        """Raise BadUsage when these are the costs of another model."""
        if self.cost.num_layers != job.num_layers:
            raise BadUsage(
                f"the costs are those of {self.cost.num_layers} layers, and the job has {job.num_layers}: "
                f"take them from a profile of the job's own model"
            )


def uniform_costs(job: JobSpec) -> JobCosts:
    """Costs of a job of which only the grid is known.

    A layer's forward and backward pass together take a unit of time for a micro-batch; embedding, head, loss, optimizer
    and transfers take none. A layer fills a unit of memory, and a device has room for as many as the fullest stage had
    at launch.
    """
    none = Work()
    layer = UnitCost(
        forward=Work(fixed_s=1 / 3),
        input_gradient=Work(fixed_s=1 / 3),
        weight_gradient=Work(fixed_s=1 / 3),
        parameters=1,
        activation_bytes=0.0,
    )
    end = replace(layer, forward=none, input_gradient=none, weight_gradient=none, parameters=0)
    return JobCosts(
        cost=JobCost(
            embedding=end, layers=(layer,) * job.num_layers, head=end, loss=end, boundary_bytes=0,
            weight_bytes=1, gradient_bytes=0, optimizer_bytes=0,
        ),
        memory_bytes=max(stop - start for start, stop in job.launch_layers),
        link=Link(bandwidth=1e30, latency_s=0.0),
    )  # fmt: skip
