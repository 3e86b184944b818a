"""What happens to the devices of a cluster over a stretch of time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_elas.spec.device import require_not_negative, require_positive
from megatron_elas.spec.errors import BadUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Devices that stop computing at once."""

    at_s: float
    devices: tuple[int, ...]
    """That die together, such as those of a node; numbered as the cluster numbers them."""
    repair_s: float = math.inf
    """From the failure until they can be used again; inf: never."""
    cause: str = ""
    """In words, for people."""

    def __post_init__(self) -> None:
        require_not_negative(self, "at_s")
        if not self.devices or min(self.devices) < 0 or len(set(self.devices)) < len(self.devices):
            raise BadUsage(f"devices must be numbers from 0 up, at least one, each once, got {list(self.devices)}")
        if not self.repair_s > 0:
            raise BadUsage(f"repair_s must be above 0, got {self.repair_s}: write inf for never")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """A device that computes more slowly for a while."""

    at_s: float
    device: int
    factor: float
    """Its passes take so many times as long; above 1."""
    seconds: float
    """How long it lasts."""
    cause: str = ""
    """In words, for people."""

    def __post_init__(self) -> None:
        require_not_negative(self, "at_s", "device")
        require_positive(self, "seconds")
        if not 1 < self.factor < math.inf:
            raise BadUsage(f"factor must be above 1 and finite, got {self.factor}")


Event = Failure | Slowdown


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All that happens in a stretch of time."""

    name: str
    seconds: float
    """Simulated in all; events begin within them."""
    events: tuple[Event, ...] = ()
    """By ``at_s``, ascending."""

    def __post_init__(self) -> None:
        require_positive(self, "seconds")
        begins = [event.at_s for event in self.events]
        if begins != sorted(begins):
            raise BadUsage(f"{self.name}: events are not in the order of their time: sort them by at_s")
        if begins and begins[-1] >= self.seconds:
            raise BadUsage(f"{self.name}: an event at {begins[-1]} s is not within the {self.seconds} s of the trace")

    def check_devices(self, count: int, where: str) -> None:
        """Raise BadUsage when an event names a device that a cluster does not have.

        Args:
            count: Its devices.
            where: Its name, for the sentence.
        """
        for event in self.events:
            last = max(event.devices) if isinstance(event, Failure) else event.device
            if last >= count:
                raise BadUsage(
                    f"{self.name}: the event at {event.at_s:g} s is of device {last}, and {where} has devices "
                    f"0 to {count - 1}: choose another trace or a larger cluster"
                )

    def cut(self, seconds: float) -> Trace:
        """The same trace for another length; what begins later is left out."""
        return replace(self, seconds=seconds, events=tuple(event for event in self.events if event.at_s < seconds))
