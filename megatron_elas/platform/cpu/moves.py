"""Moving tensors and modules to the device: they are there already."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_elas.platform.cpu.availability import CPU
from megatron_elas.platform.cpu.devices import on_cpu
from megatron_elas.platform.cpu.substitution import Substitutions

_NAMES_A_DEVICE = frozenset((str, torch.device, int))


def substitute(substitutions: Substitutions) -> None:
    """Let ``cuda()`` and ``pin_memory()`` give the object itself, and ``to`` read CUDA devices as the CPU."""

    def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    def record_stream(self: torch.Tensor, stream: Any) -> None:
        pass

    for owner in (torch.Tensor, torch.nn.Module):
        substitutions.put(owner, "cuda", stay)
        substitutions.put(owner, "to", _read_device(owner.to))
    substitutions.put(torch.Tensor, "pin_memory", stay)
    substitutions.put(torch.Tensor, "record_stream", record_stream)


def _read_device(to: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.to`` or ``Module.to`` with its device argument read for the CPU."""

    @functools.wraps(to)
    def on_this_platform(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) in _NAMES_A_DEVICE and args[0] is not CPU:
            args = (on_cpu(args[0]), *args[1:])
        if kwargs and "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return to(self, *args, **kwargs)

    return on_this_platform
