"""The cost of one model, spread over the layers of another: what an emulated run takes, and what it is predicted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from megatron_elas.planner.cost_model import estimate_job
from megatron_elas.planner.job_costs import JobCosts
from megatron_elas.spec.cluster import Cluster, Link, load_cluster
from megatron_elas.spec.cost import JobCost, UnitCost, Work
from megatron_elas.spec.device import load_device
from megatron_elas.spec.emulation import EmulatedTime
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.job_profile import JobProfile, load_job
from megatron_elas.spec.tables import configs_folder, read_table

INSTANT = Link(bandwidth=1e30, latency_s=0.0)
"""Between devices of which nothing is known but what they are themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel:
    """What an emulated run takes."""

    cluster: Cluster
    model: str
    """Name of the model whose time is taken."""
    cost: JobCost
    """Of real devices, over as many layers as the run's model has."""
    waits: JobCost
    """The same, without forward passes that are run again for recomputation: the run does so itself."""
    growth: float
    """Parameters of the model whose time is taken, for one of the run's."""
    speed: float
    workers: int

    @property
    def costs(self) -> JobCosts:
        """What the run's plans are reckoned with: times as they pass, memory of the real devices."""
        device, cluster, speed = self.cluster.device, self.cluster, self.speed
        link = cluster.inside if self.workers <= cluster.devices_per_node else cluster.between
        return JobCosts(
            cost=_hasten(self.cost, speed),
            memory_bytes=device.usable_bytes,
            link=Link(bandwidth=link.bandwidth * speed, latency_s=link.latency_s / speed),
            clock=device.clock,
            power=device.power,
        )


def make_time_model(own: JobProfile, emulated: EmulatedTime) -> TimeModel:
    """The times of an emulated run.

    Args:
        own: The run itself.
        emulated: Whose time it takes.

    Raises:
        BadUsage: A profile is not there, cannot be used, or is too small.
    """
    workers = own.spec.world_size
    cluster = find_hardware(emulated.hardware, workers)
    model = own if emulated.model is None else load_job(emulated.model)
    cost = estimate_job(model, cluster)
    waits, again = cost, own.training.recompute == "full"
    if again:
        once, twice = (
            estimate_job(replace(model, training=replace(model.training, recompute=recompute)), cluster)
            for recompute in ("none", "full")
        )
        waits, cost = once, twice
    return TimeModel(
        cluster=cluster,
        model=model.name,
        cost=spread_layers(cost, own.num_layers),
        waits=spread_layers(waits, own.num_layers),
        growth=_parameters(cost) / _parameters(estimate_job(own, cluster)),
        speed=emulated.speed,
        workers=workers,
    )


def _parameters(cost: JobCost) -> int:
    return cost.parameters(0, cost.num_layers)


def _hasten(cost: JobCost, speed: float) -> JobCost:
    hastened = {id(unit): _hasten_unit(unit, speed) for unit in cost.units(0, cost.num_layers)}
    return replace(
        cost,
        embedding=hastened[id(cost.embedding)],
        layers=tuple(hastened[id(layer)] for layer in cost.layers),
        head=hastened[id(cost.head)],
        loss=hastened[id(cost.loss)],
    )


def _hasten_unit(unit: UnitCost, speed: float) -> UnitCost:
    return replace(
        unit,
        forward=unit.forward.scaled(1 / speed),
        input_gradient=unit.input_gradient.scaled(1 / speed),
        weight_gradient=unit.weight_gradient.scaled(1 / speed),
        optimizer_s=unit.optimizer_s / speed,
    )


def find_hardware(name: str, num_devices: int) -> Cluster:
    """A cluster by its profile in ``configs/clusters``, or devices by theirs in ``configs/devices``, or by a file.

    Devices alone are taken as one node whose links take no time.

    Args:
        name: Of the profile, or path of the file.
        num_devices: That are needed.

    Raises:
        BadUsage: There is none, or it is too small.
    """
    if name.endswith((".toml", ".json")):
        is_cluster = "nodes" in read_table(Path(name))
    else:
        is_cluster = (configs_folder() / "clusters" / f"{name}.toml").is_file()
    if not is_cluster:
        device = load_device(name)
        return Cluster(
            name=device.name,
            nodes=1,
            devices_per_node=num_devices,
            device=device,
            inside=INSTANT,
            between=INSTANT,
            host_memory_bytes=device.memory_bytes * num_devices,
        )
    cluster = load_cluster(name)
    if cluster.num_devices < num_devices:
        raise BadUsage(
            f"{cluster.name} has {cluster.num_devices} devices, and the job has {num_devices} workers: name a larger "
            f"cluster"
        )
    return cluster


def spread_layers(cost: JobCost, num_layers: int) -> JobCost:
    """The cost of a model, dealt to another number of layers.

    Layer ``i`` of ``n`` gets all that lies between ``i / n`` and ``(i + 1) / n`` of the model's layers, parts of layers
    included: with as many layers each its own, with a quarter of them the sum of four, and so on. Embedding, head and
    loss stay, and so does what all takes together. (Where compute and memory time of a layer are mixed, this holds
    exactly for layers that are limited by the same one of the two.)
    """
    if num_layers == cost.num_layers:
        return cost
    ratio = Fraction(cost.num_layers, num_layers)
    merged: dict[tuple[tuple[int, Fraction], ...], UnitCost] = {}
    layers = []
    for i in range(num_layers):
        begin, end = i * ratio, (i + 1) * ratio
        inside = range(int(begin), -(-end.numerator // end.denominator))
        parts = [(cost.layers[j], min(end, Fraction(j + 1)) - max(begin, Fraction(j))) for j in inside]
        key = tuple((id(layer), part) for layer, part in parts)
        if key not in merged:  # layers that are alike stay one object
            merged[key] = _merge(parts)
        layers.append(merged[key])
    return replace(cost, layers=tuple(layers))


class Tail(NamedTuple):
    """What a stage does from its last gradient of a step to the next step."""

    exchange_s: float
    """Reduction of gradients and gather of parameters, among its cells."""
    optimizer_s: float

    @property
    def seconds(self) -> float:
        """Of both."""
        return self.exchange_s + self.optimizer_s


def stage_tails(cost: JobCost, cuts: Sequence[int], links: Sequence[Link], widths: Sequence[int]) -> tuple[Tail, ...]:
    """What stages do after their passes; the norm of the gradients lets none of them go on before the slowest one.

    Args:
        cost: Of the job.
        cuts: Stage ``s`` has layers ``[cuts[s], cuts[s + 1])``.
        links: Slowest one between two cells of each stage.
        widths: Cells of each stage.
    """
    tails = []
    for (first, last), link, cells in zip(pairwise(cuts), links, widths, strict=True):
        parameters = cost.parameters(first, last)
        reduced = link.ring_s(parameters * cost.reduced_bytes, cells)
        gathered = link.ring_s(parameters * cost.weight_bytes, cells)
        tails.append(Tail(exchange_s=reduced + gathered, optimizer_s=cost.optimizer_s(first, last, cells)))
    return tuple(tails)


def _merge(parts: Sequence[tuple[UnitCost, Fraction]]) -> UnitCost:
    def total(name: str) -> float:
        return float(sum(getattr(unit, name) * part for unit, part in parts))

    numbers = ("activation_bytes", "kept_bytes", "optimizer_s")
    return UnitCost(
        forward=_add([unit.forward.scaled(float(part)) for unit, part in parts]),
        input_gradient=_add([unit.input_gradient.scaled(float(part)) for unit, part in parts]),
        weight_gradient=_add([unit.weight_gradient.scaled(float(part)) for unit, part in parts]),
        parameters=round(sum(unit.parameters * part for unit, part in parts)),
        working_bytes=max(unit.working_bytes for unit, _ in parts),
        **{name: total(name) for name in numbers},
    )


def _add(works: Sequence[Work]) -> Work:
    return Work(**{field.name: sum(getattr(work, field.name) for work in works) for field in fields(Work)})
