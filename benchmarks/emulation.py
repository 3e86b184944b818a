"""How well emulated accelerators keep to their times on this machine.

    python benchmarks/emulation.py [--grids 4x1 4x2 4x4] [--model llama2-7b] [--hardware npu-96] [--speed 1]

A grid PxD has P pipeline stages and D data-parallel rows, one process for each worker. Each is a real training job of
the tiny Llama under ``elasrun --elastic-emulate``, whose four layers take the time of the model's. Prints a table of
all kinds of operations and, for so many workers, lines ``RESULT name=value unit``:

    emulation_error@WORKERS        distance between asked and achieved time of an operation, all operations together,
                                   as a share of what was asked
    emulation_late_p95_ms@WORKERS  from an operation's planned end to its real one, the 95th percentile over passes
                                   through layers
    emulation_step_error@WORKERS   measured / predicted time of a step, less 1: the schedule's prediction with the same
                                   costs; median over steps
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from machine import describe_machine
from results import print_result, print_table
from training_jobs import Grid, Model, run_elastic, train_flags

from megatron_elas.planner.cost_model import estimate_job
from megatron_elas.planner.job_costs import JobCosts
from megatron_elas.planner.plan import initial_plan, predict_step_s
from megatron_elas.planner.time_model import find_hardware, spread_layers
from megatron_elas.platform.emulated.errors import OpError
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.job_profile import deal_layers, load_job
from megatron_elas.spec.tables import build

MODEL = Model()
WARM_UP = 2
"""Steps at the start that are not counted."""
ROW_BATCHES = 8
"""Micro-batches of a row."""
STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+)\] iteration +(\d+)/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated:
    """What is emulated."""

    hardware: str
    model: str
    speed: float

    def flags(self) -> list[str]:
        """For the training script."""
        return [
            "--elastic", "--elastic-emulate", self.hardware, "--elastic-emulate-model", self.model,
            "--elastic-emulate-speed", str(self.speed),
        ]  # fmt: skip

    def predict_s(self, grid: Grid) -> float:
        """Seconds of a step."""
        job = JobSpec(
            tensor_parallel=1,
            pipeline_parallel=grid.stages,
            data_parallel=grid.rows,
            micro_batch_size=1,
            num_microbatches=ROW_BATCHES * grid.rows,
            stage_layers=deal_layers(MODEL.layers, grid.stages),
        )
        cluster, profile = find_hardware(self.hardware, grid.workers), load_job(self.model)
        cost = spread_layers(estimate_job(profile, cluster), MODEL.layers)
        costs = replace(JobCosts.of(profile, cluster), cost=cost, link=cluster.inside)
        return predict_step_s(job, initial_plan(job, {}), costs) / self.speed


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grids", nargs="+", default=["4x1", "4x2", "4x4"], metavar="PxD")
    parser.add_argument("--hardware", default="npu-96", help="cluster or device (default: npu-96)")
    parser.add_argument("--model", default="llama2-7b", help="whose layers' time is taken (default: llama2-7b)")
    parser.add_argument("--speed", type=float, default=1.0, help="of the emulation (default: 1)")
    parser.add_argument("--steps", type=int, default=10, help="of each job (default: 10)")
    options = parser.parse_args()
    emulated = Emulated(hardware=options.hardware, model=options.model, speed=options.speed)
    print(f"{describe_machine()}; {options.model} on {options.hardware}, {options.speed:g} times as fast")
    with tempfile.TemporaryDirectory(prefix="elas-bench-") as folder:
        for text in options.grids:
            measure(Grid.parse(text), emulated, options.steps, Path(folder) / text)


def measure(grid: Grid, emulated: Emulated, steps: int, folder: Path) -> None:
    """One job."""
    flags = train_flags(MODEL, grid, steps, ROW_BATCHES * grid.rows)
    run = run_elastic(
        grid.workers,
        [*flags, *emulated.flags(), "--elastic-emulate-log", str(folder / "errors")],
        folder / "log",
        preload=True,
    )
    predicted_s = emulated.predict_s(grid)
    measured_s = step_times_s(run.lines, WARM_UP)
    errors = read_errors(folder)
    kinds = dict.fromkeys(error.kind for error in errors)
    print_table(
        f"{grid}: {grid.workers} workers, ms",
        ("count", "asked", "achieved", "off, median", "off, 95%", "late, median", "late, 95%", "real work longer"),
        {kind: describe_kind([error for error in errors if error.kind == kind]) for kind in kinds},
    )
    print(
        f"step: predicted {predicted_s * 1e3:.1f} ms, measured "
        f"{', '.join(f'{seconds * 1e3:.1f}' for seconds in measured_s)}"
    )
    off_s = sum(error.count * error.mean_error_s for error in errors)
    asked_s = sum(error.count * error.asked_s for error in errors)
    print_result(f"emulation_error@{grid.workers}", off_s / asked_s, "ratio", 4)
    late = max(error.p95_late_s for error in errors if error.kind.startswith("layer"))
    print_result(f"emulation_late_p95_ms@{grid.workers}", late * 1e3, "ms", 2)
    print_result(f"emulation_step_error@{grid.workers}", statistics.median(measured_s) / predicted_s - 1, "ratio", 4)


def describe_kind(errors: Sequence[OpError]) -> list[str]:
    """A kind of operation over all workers: medians of the workers' medians, and the worst of their percentiles."""
    medians = ("asked_s", "achieved_s", "median_error_s")
    middle = [statistics.median(getattr(error, name) for error in errors) for name in medians]
    times = [*middle, max(error.p95_error_s for error in errors), statistics.median(error.late_s for error in errors)]
    times.append(max(error.p95_late_s for error in errors))
    overrun = statistics.fmean(error.overrun for error in errors)
    return [str(sum(error.count for error in errors)), *(f"{value * 1e3:.2f}" for value in times), f"{overrun:.0%}"]


def read_errors(folder: Path) -> list[OpError]:
    """What the workers of a job have told in ``errors.WORKER``."""
    paths = sorted(folder.glob("errors.*"), key=lambda path: int(path.suffix[1:]))
    return [build(OpError, json.loads(line), str(path)) for path in paths for line in path.read_text().splitlines()]


def step_times_s(lines: Sequence[str], after: int) -> list[float]:
    """From each iteration's line to the next one's, beginning with the given iteration's."""
    stamps = {
        int(match[2]): datetime.datetime.fromisoformat(match[1]) for line in lines if (match := STAMP.search(line))
    }
    return [(stamps[i + 1] - stamps[i]).total_seconds() for i in sorted(stamps) if i >= after and i + 1 in stamps]


if __name__ == "__main__":
    main()
