"""The cost of one model, spread over the layers of another: what an emulated run takes, and what it is predicted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from megatron_elas.spec.cluster import Cluster, Link, load_cluster
from megatron_elas.spec.cost import JobCost, UnitCost, Work
from megatron_elas.spec.device import load_device
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.tables import configs_folder, read_table

INSTANT = Link(bandwidth=1e30, latency_s=0.0)
"""Between devices of which nothing is known but what they are themselves."""


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
        reduced = link.ring_s(parameters * cost.gradient_bytes, cells)
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
