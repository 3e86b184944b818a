"""What the figures of a benchmark were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def describe_machine() -> str:
    """Cores, load, memory, kernel and torch, in one line."""
    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{len(os.sched_getaffinity(0))} cores ({_cpu_model()}), load {load} at the start, {gib:.0f} GiB, "
        f"Linux {platform.release()}, Python {platform.python_version()}, torch {torch.__version__}"
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
