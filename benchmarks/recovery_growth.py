"""How each phase of a recovery grows with layers, with the bytes of a stage and with workers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from line_fit import fit_line
from training_jobs import Grid, Model, Run, run_elastic, train_flags

FAULT_STEP = 5
STEPS = 11
STATE_BYTES = 12
"""Of one parameter: fp32 master and two moments."""
PHASES = ("detect", "quiesce", "settle", "groups", "restore", "rebuild", "verify")
"""Of the time line, in order; ``settle`` includes the planner."""
COLUMNS = (*PHASES, "first_step", "beyond", "cpu")
"""``first_step`` and ``beyond`` (the sum) are less one normal step. ``cpu`` is no part of the sum: the most processor
time that a worker spent from the plan to the first step, which does not depend on how many workers share a core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Jobs that differ in one thing."""

    name: str
    """What the slope is per: the end of its RESULT names."""
    what: str
    """Of the varied thing, for people."""
    jobs: Sequence[tuple[Model, Grid, int]]
    """Model, grid and micro-batches in the global batch."""
    x_of: Callable[[Model, Grid, int], float]
    """Where a job lies, from its model, grid and the parameters of the lost worker's stage."""


def sweeps(quick: bool) -> list[Sweep]:
    """Layers and bytes on P 2 x D 2; workers with one stage, whose model and batch stay the same."""
    square = Grid(stages=2, rows=2)
    layers = (2, 8, 16) if quick else (2, 4, 8, 16, 32)
    hidden = (64, 256, 384) if quick else (64, 256, 512, 768)
    rows = (2, 4, 6) if quick else (2, 4, 6, 8, 12)
    return [
        Sweep(
            name="layer",
            what="layers of a stage (P 2 x D 2, hidden size 64)",
            jobs=[(Model(layers=n), square, 8) for n in layers],
            x_of=lambda model, grid, numel: model.layers / grid.stages,
        ),
        Sweep(
            name="MB",
            what="MB of optimizer state of a stage (P 2 x D 2, 4 layers)",
            jobs=[(Model(hidden=n), square, 8) for n in hidden],
            x_of=lambda model, grid, numel: numel * STATE_BYTES / 1e6,
        ),
        Sweep(
            name="worker",
            what="workers (P 1, the tiny Llama, 24 micro-batches)",
            jobs=[(Model(), Grid(stages=1, rows=n), 24) for n in rows],
            x_of=lambda model, grid, numel: grid.workers,
        ),
    ]


def measure_growth(folder: Path, kills: int, quick: bool) -> None:
    """Run all sweeps and print a table and RESULT lines for each."""
    for sweep in sweeps(quick):
        points: list[tuple[float, dict[str, float]]] = []
        for kill in range(kills):  # jobs take turns, so that a slow minute of the machine bends no line
            for model, grid, batch in sweep.jobs:
                victim = (grid.stages - 1) * grid.rows + kill % grid.rows
                fault = f"kill:worker={victim}@step={FAULT_STEP},phase=forward,microbatch=1"
                flags = [*train_flags(model, grid, STEPS, batch), "--elastic", "--elastic-inject", fault]
                log_dir = folder / f"growth-{sweep.name}-{len(points)}"
                run = run_elastic(grid.workers, flags, log_dir, measured=True)
                x = sweep.x_of(model, grid, max(told["stage_numel"] for told in run.measured()))
                points.append((x, phases_ms(run)))
        print_growth(sweep, points, kills)


def phases_ms(run: Run) -> dict[str, float]:
    """COLUMNS of a run with one recovery, on the time line of the worker that was the last to be rebuilt."""
    (event,), told = run.events, run.measured()
    marks = [one["marks_s"] for one in told]
    critical = max(marks, key=lambda each: each["rebuild"])
    before = max(each["first_step"] for each in marks) - event["total"] / 1e3
    normal_ms = statistics.median(run.step_times_ms(FAULT_STEP + 2))
    lengths = {}
    for phase in PHASES:
        end = before + event["detect"] / 1e3 if phase == "detect" else critical[phase]
        lengths[phase] = (end - before) * 1e3
        before = end
    lengths["first_step"] = event["total"] - sum(lengths.values()) - normal_ms
    lengths["beyond"] = event["total"] - normal_ms
    lengths["cpu"] = max(one["cpu_ms"] for one in told)
    return lengths


def print_growth(sweep: Sweep, points: Sequence[tuple[float, dict[str, float]]], kills: int) -> None:
    """Medians at every x, and the line through all points."""
    xs = sorted({x for x, _ in points})
    print(f"\nrecovery in ms by {sweep.what}; medians of {kills} kills, and the line through all {len(points)} points")
    print(" " * 12 + "".join(f"{x:9.4g}" for x in xs) + f"   constant  + slope per {sweep.name:<8}     R2  residual")
    lines = {column: fit_line([x for x, _ in points], [times[column] for _, times in points]) for column in COLUMNS}
    for column, line in lines.items():
        medians = [statistics.median(times[column] for at, times in points if at == x) for x in xs]
        print(
            f"{column:>12}" + "".join(f"{value:9.1f}" for value in medians)
            + f"  {line.constant:9.1f}  {line.slope:+19.3f}  {line.r2:6.2f}  {line.residual:8.1f}"
        )  # fmt: skip
    for column, line in lines.items():
        print(f"RESULT recovery_{column}_ms_per_{sweep.name.lower()}={line.slope:.4f} ms/{sweep.name}", flush=True)
