"""Tensor factories called with ``device="cuda"``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device

from megatron_elas.platform.cpu.availability import CPU
from megatron_elas.platform.cpu.devices import on_cpu
from megatron_elas.platform.cpu.substitution import Substitutions

FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "scalar_tensor",
    "tensor",
    "zeros",
    "zeros_like",
)
"""Functions of ``torch`` that Megatron hands a device."""

METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
"""The same on tensors."""


def substitute(substitutions: Substitutions) -> None:
    """Wrap every factory so that a CUDA device means the CPU and pinning memory means nothing."""
    # ``with torch.device("meta")`` knows the factories by identity, from a set made at its first use: make it now,
    # while they are the originals.
    torch.utils._device._device_constructors()
    for name in FACTORIES:
        substitutions.put(torch, name, _read_device(getattr(torch, name)))
    for name in METHODS:
        substitutions.put(torch.Tensor, name, _read_device(getattr(torch.Tensor, name)))


def _read_device(factory: Callable[..., Any]) -> Callable[..., Any]:
    """``factory`` with its ``device`` and ``pin_memory`` keywords read for the CPU. Adds about 0.1 us."""

    @functools.wraps(factory)
    def on_this_platform(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            device = kwargs.get("device")
            if device is not None and device is not CPU:
                kwargs["device"] = on_cpu(device)
            if "pin_memory" in kwargs:
                kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return on_this_platform
