"""Names of tensor types. Megatron's optimizers sort parameters by ``torch.cuda.BFloat16Tensor`` and the like."""

from __future__ import annotations

import functools
from typing import Any

import torch

from megatron_elas.platform.cpu.callers import megatron_asks
from megatron_elas.platform.cpu.substitution import Substitutions


def substitute(substitutions: Substitutions) -> None:
    """Let ``Tensor.type()`` name the CUDA type when Megatron asks."""
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        if isinstance(found, str) and found.startswith("torch.") and megatron_asks():
            return found.replace("torch.", "torch.cuda.", 1)
        return found

    substitutions.put(torch.Tensor, "type", type_name)
