"""Memory statistics, the device cache and profiler ranges: nothing to count, nothing to empty."""

from __future__ import annotations

import collections
import contextlib
from typing import Any

import torch

from megatron_elas.platform.cpu.availability import CpuProperties
from megatron_elas.platform.cpu.substitution import Substitutions

COUNTERS = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "device_memory_used",
    "utilization",
    "temperature",
    "power_draw",
    "clock_rate",
)
"""Functions of ``torch.cuda`` that give one number."""


def substitute(substitutions: Substitutions) -> None:
    """Let every counter read zero and every request to free memory do nothing."""

    def zero(device: Any = None) -> int:
        return 0

    def memory_stats(device: Any = None) -> collections.defaultdict[str, int]:
        return collections.defaultdict(int)

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return CpuProperties.total_memory, CpuProperties.total_memory

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    def profiler_range(*args: Any, **kwargs: Any) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    for name in COUNTERS:
        substitutions.put(torch.cuda, name, zero)
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "check_error"):
        substitutions.put(torch.cuda, name, nothing)
    for name in ("range_push", "range_pop", "mark"):
        substitutions.put(torch.cuda.nvtx, name, nothing)
    substitutions.put(torch.cuda.nvtx, "range", profiler_range)
    substitutions.put(torch.cuda, "memory_stats", memory_stats)
    substitutions.put(torch.cuda, "mem_get_info", mem_get_info)
