"""Failures that happen by chance: published rates, and traces drawn from them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from megatron_elas.simulator.traces import Event, Failure, Slowdown, Trace
from megatron_elas.spec.cluster import Cluster
from megatron_elas.spec.device import require_not_negative, require_positive
from megatron_elas.spec.errors import BadUsage

DAY_S = 86400.0
MOST_EVENTS = 2_000_000
"""Of a trace that is drawn: what fits the memory, a hundred times what a million devices do in a month."""

Floats = NDArray[numpy.float64]
Indices = NDArray[numpy.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRate:
    """How often the devices of a unit die together, and for how long they are away."""

    cause: str
    scope: str
    """The unit: ``device``, ``node`` or ``switch``."""
    per_day: float
    """Failures of one such unit in a day, in the long run."""
    shape: float = 1.0
    """Of the Weibull distribution of the time from being there to failing: 1.0 forgets, below 1.0 a unit that has
    just come back is likelier to fail again."""
    repair_s: float
    """Mean seconds until the unit is there again; ``inf``: never."""
    repair_spread: float = 0.0
    """Standard deviation of the repair time's logarithm (log-normal); 0.0: always the mean."""
    nodes: int | None = None
    """Behind one switch; None: as many as the cluster's profile says die together."""

    def __post_init__(self) -> None:
        require_positive(self, "per_day", "shape")
        require_not_negative(self, "repair_spread")
        if not self.repair_s > 0:
            raise BadUsage(f"repair_s must be above 0, got {self.repair_s}")
        if self.scope not in {"device", "node", "switch"}:
            raise BadUsage(f"scope is {self.scope!r}: write device, node or switch")
        if self.nodes is not None and (self.scope != "switch" or self.nodes < 1):
            raise BadUsage(
                f"nodes is {self.nodes}: it counts those behind a switch, at least 1; leave it out otherwise"
            )

    def devices_per_unit(self, cluster: Cluster) -> int:
        """Devices that die together."""
        match self.scope:
            case "device":
                return 1
            case "node":
                return cluster.devices_per_node
            case _:
                return (self.nodes or cluster.nodes_per_domain) * cluster.devices_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowdownRate:
    """How often a device gets slow, how much, and for how long."""

    cause: str
    per_day: float
    """Slowdowns of one device in a day."""
    factor: float
    """How many times as long its passes take."""
    seconds: float
    """Mean length."""
    spread: float = 0.0
    """Standard deviation of the length's logarithm (log-normal); 0.0: always the mean."""

    def __post_init__(self) -> None:
        require_positive(self, "per_day", "seconds")
        require_not_negative(self, "spread")
        if not 1 < self.factor < math.inf:
            raise BadUsage(f"factor must be above 1, got {self.factor}: a slow device takes longer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """All that happens by chance in a cluster."""

    name: str
    failures: tuple[FailureRate, ...] = ()
    slowdowns: tuple[SlowdownRate, ...] = ()

    def failures_per_day(self, cluster: Cluster) -> float:
        """Expected number in the whole cluster, as long as all of it is there."""
        return sum(
            rate.per_day * _count_units(cluster.num_devices, rate.devices_per_unit(cluster)) for rate in self.failures
        )

    def events_per_day(self, cluster: Cluster) -> float:
        """The same, with devices that get slow."""
        slow = sum(rate.per_day for rate in self.slowdowns) * cluster.num_devices
        return self.failures_per_day(cluster) + slow


def generate(cluster: Cluster, rates: Rates, seconds: float, seed: int) -> Trace:
    """Draw a trace: the same one for the same arguments.

    Each kind of failure and slowdown has random numbers of its own, so a changed rate leaves the other kinds as they
    were. At the beginning all units are there, and have been for long: what is drawn first is what is left of a
    Weibull interval that began at some time before. While a unit is away it does not fail again of the same cause;
    of another it may.

    Args:
        cluster: Whose devices fail.
        rates: How often.
        seconds: How long.
        seed: Any whole number that is not negative.
    """
    if not 0 < seconds < math.inf:
        raise BadUsage(f"a trace lasts a number of seconds above 0, not {seconds}")
    if seed < 0:
        raise BadUsage(f"the seed is {seed}: give one that is not negative")
    expected = seconds / DAY_S * rates.events_per_day(cluster)
    if expected > MOST_EVENTS:
        raise BadUsage(
            f"{rates.name}: some {expected:.0f} events in {seconds / DAY_S:g} days are more than {MOST_EVENTS}: choose "
            f"fewer days, or lower rates"
        )
    events: list[Event] = []
    for index, rate in enumerate(rates.failures):
        random = numpy.random.default_rng([seed, 0, index])
        events += _draw_failures(cluster, rate, seconds, random)
    for index, slowness in enumerate(rates.slowdowns):
        random = numpy.random.default_rng([seed, 1, index])
        events += _draw_slowdowns(cluster.num_devices, slowness, seconds, random)
    events.sort(key=_order)
    return Trace(name=f"{rates.name}, seed {seed}", seconds=seconds, events=tuple(events))


def _order(event: Event) -> tuple[float, bool, int]:
    return event.at_s, isinstance(event, Slowdown), event.devices[0] if isinstance(event, Failure) else event.device


def _draw_failures(
    cluster: Cluster, rate: FailureRate, seconds: float, random: numpy.random.Generator
) -> Iterator[Failure]:
    size = rate.devices_per_unit(cluster)
    units = _count_units(cluster.num_devices, size)
    mean_s = DAY_S / rate.per_day
    for unit, at_s, repair_s in _renew(units, mean_s, rate.shape, rate.repair_s, rate.repair_spread, seconds, random):
        first = unit * size
        devices = tuple(range(first, min(first + size, cluster.num_devices)))
        yield Failure(at_s=at_s, devices=devices, repair_s=repair_s, cause=rate.cause)


def _draw_slowdowns(
    devices: int, rate: SlowdownRate, seconds: float, random: numpy.random.Generator
) -> Iterator[Slowdown]:
    for device, at_s, length_s in _renew(
        devices, DAY_S / rate.per_day, 1.0, rate.seconds, rate.spread, seconds, random
    ):
        yield Slowdown(at_s=at_s, device=device, factor=rate.factor, seconds=length_s, cause=rate.cause)


def _count_units(devices: int, size: int) -> int:
    return -(-devices // size)


def _renew(
    units: int,
    mean_s: float,
    shape: float,
    away_s: float,
    spread: float,
    seconds: float,
    random: numpy.random.Generator,
) -> Iterator[tuple[int, float, float]]:
    """Unit, time and length of every absence before ``seconds``; in rounds, the n-th absences of all units at once."""
    scale_s = mean_s / math.gamma(1 + 1 / shape)
    # An interval that a given moment falls into is long with a probability in proportion to its length; its
    # power of the shape has a gamma distribution then, and the moment is anywhere in it.
    left = random.random(units) * random.standard_gamma(1 + 1 / shape, units) ** (1 / shape) * scale_s
    who: Indices = numpy.flatnonzero(left < seconds)
    when: Floats = left[who]
    while who.size:
        away = _lengths(who.size, away_s, spread, random)
        yield from zip(who.tolist(), when.tolist(), away.tolist(), strict=True)
        when = when + away + scale_s * random.weibull(shape, who.size)
        again = when < seconds
        who, when = who[again], when[again]


def _lengths(count: int, mean_s: float, spread: float, random: numpy.random.Generator) -> Floats:
    if spread == 0 or math.isinf(mean_s):
        return numpy.full(count, mean_s)
    return numpy.exp(random.normal(math.log(mean_s) - spread**2 / 2, spread, count))
