"""Availability, device numbers and device properties."""

from __future__ import annotations

import os
from typing import Any

import torch

from megatron_elas.platform.cpu.callers import megatron_asks
from megatron_elas.platform.cpu.substitution import Substitutions

CPU = torch.device("cpu")


class CpuProperties:
    """What ``torch.cuda.get_device_properties`` gives.

    The major number is Blackwell's: for older devices Megatron insists on CUDA_DEVICE_MAX_CONNECTIONS, which means
    nothing here.
    """

    name = "cpu"
    major = 10
    minor = 0
    multi_processor_count = os.cpu_count() or 1
    total_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_PROPERTIES = CpuProperties()


def substitute(substitutions: Substitutions) -> None:
    """Make Megatron believe in one device per worker; everyone else still sees that there is none."""
    original_is_available, original_device_count = torch.cuda.is_available, torch.cuda.device_count

    def is_available() -> bool:
        return True if megatron_asks() else original_is_available()

    def device_count() -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if megatron_asks() else original_device_count()

    def current_device() -> torch.device:
        # A device instead of a number: every ``device=torch.cuda.current_device()`` then works as it stands.
        return CPU

    def set_device(device: Any) -> None:
        pass

    def get_device_capability(device: Any = None) -> tuple[int, int]:
        return _PROPERTIES.major, _PROPERTIES.minor

    def get_device_name(device: Any = None) -> str:
        return _PROPERTIES.name

    def get_device_properties(device: Any = None) -> CpuProperties:
        return _PROPERTIES

    for function in (
        is_available,
        device_count,
        current_device,
        set_device,
        get_device_capability,
        get_device_name,
        get_device_properties,
    ):
        substitutions.put(torch.cuda, function.__name__, function)
