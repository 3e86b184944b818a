"""Time per step of whole training jobs, variants taking turns."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from results import format_all
from training_jobs import Grid, run_elastic

WARM_UP = 8
"""Steps at the start that are not counted."""


def time_steady(folder: Path, grid: Grid, flags: Sequence[str], turns: int) -> tuple[list[float], list[float]]:
    """Milliseconds per step with --elastic and of stock Megatron on gloo, one each per turn; printed too."""
    variants: dict[str, tuple[list[str], dict[str, str]]] = {
        "stock": ([*flags], {}),
        "elastic": ([*flags, "--elastic"], {}),
    }
    times = time_in_turns(folder / f"{grid}-steady", grid, variants, turns, WARM_UP)
    print(f"{grid}: ms per step, " + ", ".join(f"{name} {format_all(values)}" for name, values in times.items()))
    return times["elastic"], times["stock"]


def time_in_turns(
    folder: Path, grid: Grid, variants: Mapping[str, tuple[list[str], dict[str, str]]], turns: int, warm_up: int
) -> dict[str, list[float]]:
    """Median milliseconds per step of each variant (flags, additions to the environment), one per turn."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(turns):
        order = list(variants) if turn % 2 else list(reversed(variants))
        for name in order:
            flags, environ = variants[name]
            log_dir = folder / f"{len(times[name])}-{name.replace(' ', '-')}"
            run = run_elastic(grid.workers, flags, log_dir, measured=True, environ=environ)
            times[name].append(statistics.median(run.step_times_ms(warm_up)))
    return times
