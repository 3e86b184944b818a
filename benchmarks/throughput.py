"""Throughput of real jobs on emulated accelerators before and after losses, by policy, and of the real torchft.

    make bench-throughput
    make bench-throughput ARGS="--cases pp4dp3 --policies ours recycle --plot FOLDER"

Each job is a real training job under elasrun whose layers take the time of an accelerator's (docs/emulation.md). A
worker of the middle stage is killed, later one of the first stage: with two rows of the same row, so that a replica
is left. ``elasrun --policy`` says who plans after a loss; the processes, the schedule and the recoveries are the same.
Step times are medians of steady steps: of the newest plan before the next loss, without the first step under it, so
after layers have moved. Beside them stands what the plan was predicted to take, from the profiles alone.

The real torchft runs the same rows as replicas (throughput_torchft.py), with losses at the same steps and places in
them; its batch shrinks, and samples are counted as they are. With two rows nothing more is lost in the second loss:
that worker's replica is out of use, under ``--policy torchft`` as well.

A job is run again when its steady steps differ by more than 3 %: the machine disturbed it. All tries are shown; the one
whose steps differ least counts. Lines ``RESULT name=value unit``, LOSS is 1 or 2:

    measured_share@GRID/LOSS        ours: samples per second, relative to before a loss and the share of workers left
    measured_own_share@GRID/LOSS    the same relative to what ours has without a loss when it is asked to plan: before a
                                    loss a job runs stock 1F1B
    measured_vs_POLICY@GRID/LOSS    ours: samples per second / those under the policy
    predicted_vs_POLICY@GRID/LOSS   the same of the predictions
    real_torchft_ratio@GRID[/2]     ours: samples per second after the first loss [the second] / the real torchft's
    recovery_vs_real_torchft@GRID   the real torchft's time from the loss to the next committed step / ours; both less
                                    one step as it is then (ours: before layers move)
    prediction_error_max            the largest |measured / predicted step - 1| of all jobs and losses
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from emulated_jobs import Case, Course, Stretch, claimed_processors, run_losses
from machine import describe_machine
from replicas import JobFailed
from results import format_all, print_result, print_table
from throughput_plot import Series, plot_rates
from throughput_torchft import TorchftRun, measure_torchft
from torchft_venv import NotAvailable, prepare_torchft
from training_jobs import Grid

POLICIES = ("ours", "elaswave", "recycle", "torchft")
CASES = {
    str(case.grid): case
    for case in (
        Case(grid=Grid(stages=4, rows=3), model="llama2-7b", hardware="npu-96", row_batches=16, size=1),
        Case(grid=Grid(stages=4, rows=2), model="llama2-13b", hardware="npu-96", row_batches=16, size=2, speed=2.0),
        Case(grid=Grid(stages=8, rows=2), model="llama2-34b", hardware="npu-96", row_batches=32, size=1),
    )
}
UNHURT_STEPS = 10
"""Of a job that loses nobody."""
FIRST_LOSS = 4
"""The step in which a worker is lost."""
MOVING = ("ours", "elaswave")
"""Policies after whose losses layers move."""
CALM = 0.03
"""Between the shortest and the longest step of a stretch, relative to the median: more is a disturbed job."""
APART, APART_MOVING = 6, 16
"""Steps from a loss to the next, and from the last one to the end; where layers move beside steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A job under one policy."""

    course: Course
    stretches: tuple[Stretch, ...]
    """Before a loss, and after each."""
    recovery_s: tuple[float, ...]
    """From each loss to the end of the step that it struck."""
    resumed_s: tuple[float, ...]
    """Of a steady step under the plan that each recovery made."""
    struck_after_s: float
    """From the begin of a step to the first loss in it."""
    migrations: int
    """In which layers moved beside steps."""

    @property
    def spread(self) -> float:
        """The largest of its stretches."""
        return max(stretch.spread for stretch in self.stretches)

    def samples_per_s(self, case: Case, loss: int) -> float:
        """After so many losses."""
        return case.batch / self.stretches[min(loss, len(self.stretches) - 1)].step_s

    def predicted_per_s(self, case: Case, loss: int) -> float:
        """Samples per second as the plan says."""
        return case.batch / self.stretches[min(loss, len(self.stretches) - 1)].predicted_s


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="grids (default: all)")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES, help="default: all")
    parser.add_argument("--without-torchft", action="store_true", help="leave the real torchft out")
    parser.add_argument("--speed", type=float, help="of the emulation (default: 1, of pp4dp2 2)")
    parser.add_argument("--first-loss", type=int, default=FIRST_LOSS, metavar="STEP", help="default: 4")
    parser.add_argument(
        "--apart", type=int, nargs=2, default=(APART, APART_MOVING), metavar="STEPS",
        help="from a loss to the next and to the end: where no layers move, and where they do (default: 6 16)",
    )  # fmt: skip
    parser.add_argument("--tries", type=int, default=2, help="of a job that is disturbed (default: 2)")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write GRID.svg there")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the jobs' logs there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started is ended
    errors = []
    with claimed_processors() as priority, tempfile.TemporaryDirectory(prefix="elas-bench-") as temporary:
        print(f"{describe_machine()}; {priority}", flush=True)
        for name in options.cases:
            case = CASES[name] if options.speed is None else replace(CASES[name], speed=options.speed)
            errors += measure_case(case, (options.logs or Path(temporary)) / name, options)
    if errors:
        print_result("prediction_error_max", max(errors), "ratio", 4)


def measure_case(case: Case, folder: Path, options: argparse.Namespace) -> list[float]:
    """All policies on one grid; gives the errors of their predictions."""
    print(
        f"\n{case.grid}: {case.model} on {case.hardware}, {case.speed:g} times as fast, {case.row_batches} "
        f"micro-batches of {case.size} in a row; workers {', '.join(map(str, victims(case.grid)))} are lost",
        flush=True,
    )
    found = {policy: measure_policy(case, policy, folder, options) for policy in options.policies}
    own = measure_unhurt(case, folder / "unhurt") if "ours" in found else None
    real = None if options.without_torchft else measure_real(case, found, folder, options)
    print_throughput(case, found, real)
    print_results(case, found, own, real)
    if options.plot:
        options.plot.mkdir(parents=True, exist_ok=True)
        title = f"{case.grid}, {case.model} on emulated {case.hardware}: samples per second of every step"
        series = [series_of(case, policy, one.course) for policy, one in found.items()]
        series += [real.series] if real else []
        (options.plot / f"{case.grid}.svg").write_text(plot_rates(title, series).svg())
    stretches = [stretch for one in found.values() for stretch in one.stretches] + ([own] if own else [])
    return [abs(stretch.step_s / stretch.predicted_s - 1) for stretch in stretches]


def victims(grid: Grid) -> tuple[int, int]:
    """Workers that are lost, one after the other: of the middle stage, and of the first one."""
    return grid.stages // 2 * grid.rows, 0 if grid.rows == 2 else 1


def measure_policy(case: Case, policy: str, folder: Path, options: argparse.Namespace) -> Measured:
    """A job, run again while it is disturbed and tries are left; the calmest one."""
    apart = options.apart[policy in MOVING]
    losses = losses_under(policy, case.grid, (options.first_loss, options.first_loss + apart))
    faults = [
        f"kill:worker={worker}@step={step},phase=forward,microbatch=1"
        for worker, step in zip(victims(case.grid), losses, strict=False)
    ]
    found = []
    for number in range(1, options.tries + 1):
        course = run_losses(
            case, folder / f"{policy}-{number}", losses[-1] + apart, faults, launcher=launcher_flags(policy)
        )
        found.append(measure_course(course, losses))
        print(f"{policy}, try {number}: {describe(found[-1])}", flush=True)
        if found[-1].spread <= CALM:
            break
    return min(found, key=lambda measured: measured.spread)


def measure_unhurt(case: Case, folder: Path) -> Stretch:
    """Ours without a loss, asked to plan with the layers that stages have: orders need not be those of 1F1B then."""
    layers = ",".join(map(str, case.job().stage_layers))
    launcher = [f"--rebalance={UNHURT_STEPS // 4}:{layers}"]
    (stretch,) = run_losses(case, folder, UNHURT_STEPS, (), launcher=launcher).stretches(())
    print(
        f"ours without a loss, asked to plan: {stretch.step_s:.3f} s ({len(stretch.steps)} steps, "
        f"epoch {stretch.epoch}, spread {stretch.spread:.1%}), {stretch.predicted_s:.3f} s predicted",
        flush=True,
    )
    return stretch


def losses_under(policy: str, grid: Grid, losses: Sequence[int]) -> tuple[int, ...]:
    """Those after which less works than before: with torchft the rest of a lost worker's row is out of use already."""
    return tuple(losses[:1] if policy == "torchft" and grid.rows == 2 else losses)


def launcher_flags(policy: str) -> list[str]:
    """For elasrun, which does as ours unless told otherwise."""
    return [] if policy == "ours" else ["--policy", policy]


def measure_course(course: Course, losses: Sequence[int]) -> Measured:
    """What a job's steps say."""
    recoveries = course.of_kind("recovery")
    if len(recoveries) != len(losses):
        sys.exit(f"{len(losses)} workers were lost, and there were {len(recoveries)} recoveries")
    began_s = max(step.ended_s for step in course.steps if step.step == losses[0] - 1)
    noticed_s = course.of_kind("loss")[0]["time_s"] - recoveries[0]["detect"] / 1e3
    return Measured(
        course=course,
        stretches=tuple(course.stretches(losses)),
        recovery_s=tuple(recovery["total"] / 1e3 for recovery in recoveries),
        resumed_s=tuple(course.step_s_in(recovery["epoch"]) for recovery in recoveries),
        struck_after_s=max(0.0, noticed_s - began_s),
        migrations=len(course.of_kind("migration")),
    )


def describe(measured: Measured) -> str:
    """Step times and what is to be known of them."""
    parts = [
        f"{stretch.step_s:.3f} s ({len(stretch.steps)} steps, epoch {stretch.epoch}, spread {stretch.spread:.1%})"
        for stretch in measured.stretches
    ]
    slow = measured.course.slow
    parts.append(f"{measured.migrations} migrations")
    return f"{'; '.join(parts)}; {f'{len(slow)} workers were too slow' if slow else 'no worker was too slow'}"


def measure_real(
    case: Case, found: Mapping[str, Measured], folder: Path, options: argparse.Namespace
) -> TorchftRun | None:
    """The real torchft, with losses where ours had them."""
    try:
        python = prepare_torchft()
    except NotAvailable as error:
        print(f"torchft cannot be had, so it is left out: {error}")
        return None
    apart = options.apart[0]
    losses = (options.first_loss, options.first_loss + apart)[: case.grid.rows - 1]
    struck_after_s = next(iter(found.values())).struck_after_s
    try:
        return measure_torchft(case, folder / "real-torchft", python, losses, struck_after_s, apart)
    except JobFailed as error:
        print(f"the real torchft did not go on: {error}", flush=True)
        return None


def print_throughput(case: Case, found: Mapping[str, Measured], real: TorchftRun | None) -> None:
    """A line for each system and number of losses."""
    columns = (
        "samples/s",
        "relative",
        "share",
        "step, s",
        "predicted, s",
        "measured / predicted",
        "recovery, s",
        "beyond a step, s",
    )
    rows = {}
    for loss in range(3):
        left = 1 - loss / case.grid.workers
        for policy, one in found.items():
            rate, base = one.samples_per_s(case, loss), one.samples_per_s(case, 0)
            stretch = one.stretches[min(loss, len(one.stretches) - 1)]
            cells = [stretch.step_s, stretch.predicted_s, stretch.step_s / stretch.predicted_s]
            recovered = recovery_cells(one.recovery_s, one.resumed_s, loss)
            rows[f"{policy}, {loss} lost"] = [
                *format_rate(rate, base, left), *(f"{cell:.3f}" for cell in cells), *recovered
            ]  # fmt: skip
        if real is not None:
            at = min(loss, len(real.step_s) - 1)
            rows[f"torchft (real), {loss} lost"] = [
                *format_rate(real.samples_per_s[at], real.samples_per_s[0], left),
                f"{real.step_s[at]:.3f}", "", "", *recovery_cells(real.recovery_s, real.step_s[1:], loss),
            ]  # fmt: skip
    print_table(str(case.grid), columns, rows)


def format_rate(rate: float, base: float, left: float) -> list[str]:
    """Samples per second; relative to those without a loss; and to the share of workers that are left."""
    return [f"{rate:.3f}", f"{rate / base:.3f}", f"{rate / base / left:.3f}"]


def recovery_cells(recovery_s: Sequence[float], resumed_s: Sequence[float], loss: int) -> list[str]:
    """Time of the recovery from this loss, and without a step as it is then; empty without one."""
    if not 0 < loss <= len(recovery_s):
        return ["", ""]
    return [f"{recovery_s[loss - 1]:.2f}", f"{recovery_s[loss - 1] - resumed_s[loss - 1]:.2f}"]


def print_results(case: Case, found: Mapping[str, Measured], own: Stretch | None, real: TorchftRun | None) -> None:
    """Lines for programs."""
    if (ours := found.get("ours")) is None:
        return
    for loss in (1, 2):
        left = 1 - loss / case.grid.workers
        name = f"{case.grid}/{loss}"
        share = ours.samples_per_s(case, loss) / ours.samples_per_s(case, 0) / left
        print_result(f"measured_share@{name}", share, "ratio")
        if own is not None:
            share = ours.samples_per_s(case, loss) * own.step_s / case.batch / left
            print_result(f"measured_own_share@{name}", share, "ratio")
        for policy, one in found.items():
            if policy != "ours":
                ratio = ours.samples_per_s(case, loss) / one.samples_per_s(case, loss)
                print_result(f"measured_vs_{policy}@{name}", ratio, "ratio")
                ratio = ours.predicted_per_s(case, loss) / one.predicted_per_s(case, loss)
                print_result(f"predicted_vs_{policy}@{name}", ratio, "ratio")
    if real is not None:
        for loss, rate in enumerate(real.samples_per_s[1:], 1):
            name = f"{case.grid}" if loss == 1 else f"{case.grid}/{loss}"
            print_result(f"real_torchft_ratio@{name}", ours.samples_per_s(case, loss) / rate, "ratio")
        theirs_s = real.recovery_s[0] - real.step_s[1]
        ours_s = ours.recovery_s[0] - ours.resumed_s[0]
        print(f"beyond a step, s: ours {format_all([ours_s], 2)}, torchft {format_all([theirs_s], 2)}")
        print_result(f"recovery_vs_real_torchft@{case.grid}", theirs_s / ours_s, "ratio", 1)


def series_of(case: Case, policy: str, course: Course) -> Series:
    """For the plot."""
    return Series(
        name=policy,
        ends_s=tuple(step.ended_s for step in course.steps),
        samples=(case.batch,) * len(course.steps),
        losses_s=tuple(event["time_s"] for event in course.of_kind("loss")),
    )


if __name__ == "__main__":
    main()
