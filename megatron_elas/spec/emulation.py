"""Whose time an emulated run takes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_elas.spec.device import require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedTime:
    """What ``--elastic-emulate`` and the flags that belong to it say."""

    hardware: str
    """Profile of ``configs/clusters`` or ``configs/devices``, or the absolute path of a file of either."""
    model: str | None = None
    """Profile of ``configs/jobs``, or the absolute path of a file; None: the run's own model."""
    speed: float = 1.0
    """How much faster than the real ones emulated devices and links are."""

    def __post_init__(self) -> None:
        require_positive(self, "speed")
