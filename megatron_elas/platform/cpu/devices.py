"""Reading ``cuda`` as ``cpu`` wherever a device is named."""

from __future__ import annotations

from typing import Any

import torch

from megatron_elas.platform.cpu.availability import CPU


def on_cpu(device: Any) -> Any:
    """The CPU for ``"cuda"``, ``"cuda:1"``, such a ``torch.device`` or a device number; all else unchanged."""
    if isinstance(device, str):
        return CPU if device.startswith("cuda") else device
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    return device
