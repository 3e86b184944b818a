"""What one accelerator computes, keeps and draws, as a function of its clock.

A clock is a number relative to the nominal one, which is the clock of the published peak: 1.0 is nominal.

Time of an operation::

    max(c / f, m) + const      c: the compute part, m: the memory part, both at the nominal clock; f: the clock

Power while computing::

    static + dynamic f V(f)^2  V(f) = max(floor, 1 - slope (1 - f)), relative to the voltage at the nominal clock

Sources: piecewise linear cycles over frequency, and only the cores being scaled, follow measurements on Ascend
(ASPLOS 2025); the shape of the power curve was fitted to the sample rows of Zeus' guide on Perseus.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.tables import build, find_table, read_table


def require_positive(owner: object, *names: str) -> None:
    """Raise BadUsage unless these numbers of a value are finite and above 0."""
    for name in names:
        value = getattr(owner, name)
        if not 0 < value < math.inf:
            raise BadUsage(f"{name} must be above 0, got {value}")


def require_not_negative(owner: object, *names: str) -> None:
    """Raise BadUsage unless these numbers of a value are finite and at least 0."""
    for name in names:
        value = getattr(owner, name)
        if not 0 <= value < math.inf:
            raise BadUsage(f"{name} must be at least 0, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockRange:
    """The clocks that a device can be set to."""

    nominal_mhz: float
    """What 1.0 stands for."""
    lowest: float
    highest: float
    step: float
    """Between settings; they are ``1 + k * step``."""
    latency_s: float
    """From asking for a clock to running at it."""

    def __post_init__(self) -> None:
        require_positive(self, "nominal_mhz", "lowest", "highest", "step")
        require_not_negative(self, "latency_s")
        if not self.lowest <= 1 <= self.highest:
            raise BadUsage(f"clocks from {self.lowest} to {self.highest} do not contain the nominal one, 1.0")

    def settings(self) -> tuple[float, ...]:
        """Every clock, ascending."""
        # A bound given with three digits is still meant to include the setting at it.
        below = int((1 - self.lowest) / self.step + 1e-3)
        above = int((self.highest - 1) / self.step + 1e-3)
        return tuple(round(1 + k * self.step, 9) for k in range(-below, above + 1))

    def at_least(self, clock: float) -> float:
        """The lowest setting that is no slower; the highest one when none is."""
        settings = self.settings()
        return next((setting for setting in settings if setting >= clock - 1e-9), settings[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerCurve:
    """Watts over the clock."""

    static_w: float
    """Drawn at any clock."""
    dynamic_w: float
    """Added at the nominal clock while computing."""
    waiting_w: float
    """Drawn in all while waiting for another device."""
    voltage_slope: float
    """How fast the voltage falls with the clock; 0: not at all."""
    voltage_floor: float
    """Below which it does not fall; 1.0 is the voltage at the nominal clock."""

    def __post_init__(self) -> None:
        require_positive(self, "voltage_floor")
        require_not_negative(self, "static_w", "dynamic_w", "waiting_w", "voltage_slope")

    def computing_w(self, clock: float) -> float:
        """Watts while computing at this clock."""
        voltage = max(self.voltage_floor, 1 - self.voltage_slope * (1 - clock))
        return self.static_w + self.dynamic_w * clock * voltage**2

    def energy_j(self, busy_s: float, waiting_s: float, clock: float = 1.0) -> float:
        """Joules of a time spent computing at this clock, and of a time spent waiting."""
        return busy_s * self.computing_w(clock) + waiting_s * self.waiting_w


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of accelerator."""

    name: str
    peak_flops: float
    """Per second, dense, in bf16, at the nominal clock."""
    efficiency: float
    """Share of the peak that a transformer's matrix multiplications reach."""
    memory_bytes: int
    usable_memory: float
    """Share of the memory that a plan may fill; the rest is for libraries, buffers and fragmentation."""
    memory_bandwidth: float
    """Bytes per second that element-wise operations reach."""
    host_bandwidth: float
    """Bytes per second between device and host memory, one way."""
    layer_pass_s: float
    """Constant time of one pass (forward, input gradient or weight gradient) through one layer: launches, gaps."""
    clock: ClockRange | None = None
    """None: it cannot be set."""
    power: PowerCurve | None = None
    """None: not known."""

    def __post_init__(self) -> None:
        require_positive(self, "peak_flops", "memory_bytes", "memory_bandwidth", "host_bandwidth")
        require_not_negative(self, "layer_pass_s")
        for name in ("efficiency", "usable_memory"):
            if not 0 < getattr(self, name) <= 1:
                raise BadUsage(f"{name} must be above 0 and at most 1, got {getattr(self, name)}")

    @property
    def usable_bytes(self) -> int:
        """Memory that a plan may fill."""
        return int(self.memory_bytes * self.usable_memory)


def load_device(name: str) -> Device:
    """A device by the name of its profile in ``configs/devices``, or by a file's path.

    Raises:
        BadUsage: There is none, or it cannot be used.
    """
    path = find_table("devices", name)
    return build(Device, read_table(path), str(path))
