"""How far losses are from the undisturbed run's through losses of workers and migrations, and what each level costs.

    make bench-consistency
    make bench-consistency ARGS="--only convergence --plot FOLDER"

**Convergence.** A small Llama with dropout 0.1 learns real text (Python's own sources) on three rows of two stages,
through five scripted events: a worker is killed, layers move, another is killed, one is drained, one is killed. Each
system is compared with the undisturbed run of its own kind, by the exact loss of every step:

* ``torchft``: what torchft does, in stock Megatron (consistency_worker.py): a row that lost a worker is out of use,
  its samples are left out, and the mean over the other rows takes its place. Layers do not move, and a row out of use
  cannot lose more, so three of the five events do nothing to it. Nobody comes back, here as in the other runs.
  Undisturbed is the elastic run with Megatron's streams, which is stock Megatron's to rounding;
* ``no-rng-resharding``: ours, but masks come from Megatron's streams, so they change when samples or layers move;
* ``statistical``, ``numerical``, ``bitwise``: ours with --elastic-consistency. In fp32, as here, the first two compute
  the same, so they share their undisturbed run, and ``before the first event`` is 0 in both.

**Cost.** Step time of undisturbed jobs of each level, in short jobs that take turns, and the peak memory of their
workers (resident, of the worker where it is largest). Small models on a CPU exaggerate what a level costs.

Lines ``RESULT name=value unit``, over the steps from the first event on:

    deviation_mean@SYSTEM     mean |loss - undisturbed|
    deviation_max@SYSTEM      the largest
    deviation_spike@SYSTEM    the largest loss - undisturbed in the 10 steps from an event on
    deviation_vs_no_rng_resharding@SYSTEM   deviation_mean relative to that without RNG resharding; -100 % is none
    step_cost@LEVEL[/MODEL]   step time / that at numerical, medians of turns; /larger: 4 layers of hidden size 512
    rng_cost@GRID[/MODEL]     step time with resharded streams / with Megatron's (random_streams.py: more closely)
    memory_cost@LEVEL/larger  peak resident memory of a worker / that at numerical
    memory_bytes_per_parameter@LEVEL/larger   what it is more than that, by the parameters of the worker's stage
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from consistency_plot import plot_deviations
from deviations import Deviation, find_deviation, read_losses
from machine import describe_machine
from results import format_all, print_ratio, print_result, print_small, print_table
from training_jobs import ENVIRONMENT, REPO, Grid, Model, Run, run_elastic, train_flags

WORKER = Path(__file__).resolve().parent / "consistency_worker.py"
PARTS = ("convergence", "cost")
GRID = Grid(stages=2, rows=3)
"""Workers 0 to 2 are the rows of stage 0, 3 to 5 those of stage 1."""
STEPS, LEAST_STEPS = 300, 60
JOB_LIMIT_S = 900.0
LEVELS = ("statistical", "numerical", "bitwise")
DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")
TEXT = ("asyncio", "concurrent", "email", "html", "http", "importlib", "json", "logging", "unittest", "xml")
"""Packages of the standard library: some MB of text that is on every machine."""


def flags_of(level: str, streams: str = "resharded") -> tuple[str, ...]:
    """Of an elastic run."""
    return ("--elastic", "--elastic-consistency", level, "--elastic-rng", streams)


NO_RESHARDING = flags_of("statistical", "megatron")
SYSTEMS: dict[str, tuple[str, ...]] = {
    "torchft": (),
    "no-rng-resharding": NO_RESHARDING,
    **{level: flags_of(level) for level in LEVELS},
}
"""Flags of each; without any, it is stock Megatron."""
REFERENCES = {
    "torchft": NO_RESHARDING,
    "no-rng-resharding": NO_RESHARDING,
    "statistical": flags_of("numerical"),
    "numerical": flags_of("numerical"),
    "bitwise": flags_of("bitwise"),
}
"""Flags of the undisturbed run that each is compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Five events of a run of so many steps. In the end worker 2 and worker 5 are left: the last row."""

    steps: int

    @property
    def at(self) -> tuple[int, ...]:
        """Their steps."""
        return tuple(self.steps * sixth // 6 for sixth in range(1, 6))

    @property
    def what(self) -> dict[int, str]:
        """For people, by step."""
        words = ("worker 4 is killed", "layers move", "worker 0 is killed", "worker 3 is drained", "worker 1 is killed")
        return dict(zip(self.at, words, strict=True))

    @property
    def faults(self) -> tuple[str, ...]:
        """For --elastic-inject."""
        return (
            f"kill:worker=4@step={self.at[0]},phase=forward,microbatch=1",
            f"kill:worker=0@step={self.at[2]},phase=backward,microbatch=0",
            f"kill:worker=1@step={self.at[4]},phase=optimizer",
        )

    def elastic(self) -> tuple[list[str], list[str], dict[str, str]]:
        """For the training script, for elasrun, and for the environment."""
        inject = [word for fault in self.faults for word in ("--elastic-inject", fault)]
        return inject, [f"--rebalance={self.at[1]}:1,3"], {"ELAS_BENCH_DRAIN": f"{self.at[3]}:3"}

    def shrinking(self) -> dict[str, str]:
        """The environment of a run whose rows fall out of use: 1 with worker 4, 0 with worker 0."""
        return {"ELAS_BENCH_OUT_OF_USE": f"{self.at[0]}:1,{self.at[2]}:0"}


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (default: all)")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of a run (default {STEPS})")
    parser.add_argument("--turns", type=int, default=3, help="jobs of each level, for step times (default 3)")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write consistency.svg and losses.json there")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the jobs' logs there")
    options = parser.parse_args()
    if options.steps < LEAST_STEPS:
        parser.error(f"--steps must be {LEAST_STEPS} or more, so that recoveries end between events: {options.steps}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started is ended
    print(describe_machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="elas-bench-") as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if "convergence" in options.only:
            measure_convergence(folder, options)
        if "cost" in options.only:
            for name, course in COURSES.items():
                measure_cost(folder / f"cost-{name}", name, course, options.turns)


# ---------------------------------------------------------------- losses


def measure_convergence(folder: Path, options: argparse.Namespace) -> None:
    """All systems through the events, and the undisturbed run of each."""
    began_s = time.monotonic()
    script = Script(steps=options.steps)
    flags = [*prepare_text(folder), *experiment_flags(script.steps)]
    chosen = [name for name in SYSTEMS if name in options.systems]
    calm_flags = list(dict.fromkeys(REFERENCES[name] for name in chosen))
    losses = {name: run_struck(folder / name, flags, name, script) for name in chosen}
    calm = {own: run_undisturbed(folder / f"undisturbed-{number}", flags, own) for number, own in enumerate(calm_flags)}
    calm_of = {name: calm[REFERENCES[name]] for name in chosen}
    found = {name: find_deviation(losses[name], calm_of[name], script.at) for name in chosen}
    print_deviations(found, script)
    print(f"\nconvergence took {time.monotonic() - began_s:.0f} s")
    if options.plot:
        options.plot.mkdir(parents=True, exist_ok=True)
        distances = {
            name: [abs(one - other) for one, other in zip(losses[name], calm_of[name], strict=True)] for name in chosen
        }
        picture = plot_deviations(
            f"{GRID}, dropout 0.1, five events: losses, and how far they are from the undisturbed run's",
            calm_of[chosen[0]],
            {name: losses[name] for name in chosen[:1]},
            distances,
            script.what,
        )
        (options.plot / "consistency.svg").write_text(picture.svg())
        told = {"events": script.what, "losses": losses, "undisturbed": calm_of}
        (options.plot / "losses.json").write_text(json.dumps(told))


def prepare_text(folder: Path) -> list[str]:
    """Tokenize the standard library's sources; gives the flags that train on them."""
    library, prefix = Path(sysconfig.get_paths()["stdlib"]), folder / "text"
    subprocess.run(
        [sys.executable, str(REPO / "scripts/prepare_data.py"), *(str(library / name) for name in TEXT),
         "--ending", ".py", "--max-mb", "4", "--vocab-size", "1000", "--output", str(prefix)],
        env=ENVIRONMENT, stdout=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    return [f"@{prefix}.args", "--split", "100,0,0"]


def experiment_flags(steps: int) -> list[str]:
    """Of the model and its training: 6 micro-batches of 2 samples a step."""
    return [
        f"@{REPO / 'configs/llama/tiny.args'}", *DROPOUT, "--pipeline-model-parallel-size", str(GRID.stages),
        "--micro-batch-size", "2", "--global-batch-size", "12", "--train-iters", str(steps),
    ]  # fmt: skip


def run_undisturbed(folder: Path, flags: Sequence[str], own: Sequence[str]) -> list[float]:
    """Losses of the run in which nothing happens."""
    run = start(folder, [*flags, *own], [], {})
    return losses_of(folder, run)


def run_struck(folder: Path, flags: Sequence[str], name: str, script: Script) -> list[float]:
    """Losses of a system's run through the events; ends the program when one of them did not happen."""
    own = SYSTEMS[name]
    if not own:
        return losses_of(folder, start(folder, flags, [], script.shrinking()))
    inject, launcher, environ = script.elastic()
    run = start(folder, [*flags, *own, *inject], launcher, environ)
    check_events(name, run, script)
    return losses_of(folder, run)


def start(folder: Path, flags: Sequence[str], launcher: Sequence[str], environ: Mapping[str, str]) -> Run:
    """A job of the experiment. Plans are made of a profile's times, so that they are the same in every run."""
    return run_elastic(
        GRID.workers, flags, folder, script=WORKER, preload=True, environ=environ,
        launcher_flags=["--costs", "profile", *launcher], limit_s=JOB_LIMIT_S,
    )  # fmt: skip


def losses_of(folder: Path, run: Run) -> list[float]:
    """Of every step."""
    try:
        return read_losses(run.measured())
    except ValueError as error:
        sys.exit(f"{folder.name}: {error}")


def check_events(name: str, run: Run, script: Script) -> None:
    """Every fault has struck, and workers have been lost, drained and given other layers as scripted."""
    fired = [line.partition("fault strikes: ")[2] for line in run.lines if "fault strikes: " in line]
    if sorted(fired) != sorted(script.faults):
        sys.exit(f"{name}: these faults were to strike: {', '.join(script.faults)}; these did: {', '.join(fired)}")
    events = [json.loads(line) for line in (run.log_dir / "events.jsonl").read_text().splitlines()]
    migrations = [event for event in events if event["event"] == "migration"]
    if len(run.events) != 3 or not any(event["drained"] for event in migrations):
        told = "; ".join(line for line in run.lines if line.startswith("elasrun:"))
        sys.exit(f"{name}: {len(run.events)} recoveries in the place of 3, or nobody was drained: {told}")
    if not any(event["moved"] and script.at[1] <= event["resume_step"] < script.at[2] for event in migrations):
        sys.exit(f"{name}: layers did not move between steps {script.at[1]} and {script.at[2]}")
    changes = [
        f"{event['resume_step']} {event['event']}" for event in events if event["event"] in ("recovery", "migration")
    ]
    print(f"{name}: plans changed before steps {', '.join(changes)}", flush=True)


def print_deviations(found: Mapping[str, Deviation], script: Script) -> None:
    """The table, and lines for programs."""
    print("\nevents: " + "; ".join(f"step {step}: {what}" for step, what in script.what.items()))
    base = found.get("no-rng-resharding")
    columns = ("mean", "max", "spike", "at the end", "before the first event", "steps equal to the last bit")
    rows = {
        name: [
            f"{one.mean:.3g}", f"{one.largest:.3g}", f"{one.spike:.3g}", f"{one.end:+.3g}", f"{one.before:.3g}",
            f"{one.equal}/{one.steps}",
        ]
        for name, one in found.items()
    }  # fmt: skip
    print_table("|loss - undisturbed|, steps from the first event on", columns, rows)
    for name, one in found.items():
        print_small(f"deviation_mean@{name}", one.mean, "nats")
        print_small(f"deviation_max@{name}", one.largest, "nats")
        print_small(f"deviation_spike@{name}", one.spike, "nats")
        if base is not None and name != "no-rng-resharding":
            change = 100 * (one.mean / base.mean - 1)
            print_result(f"deviation_vs_no_rng_resharding@{name}", change, "%", 5)


# ---------------------------------------------------------------- step time and memory


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCourse:
    """A job of which step times are taken."""

    model: Model
    steps: int
    warm_up: int
    suffix: str
    """Of RESULT names."""


COST_GRID = Grid(stages=2, rows=2)
COURSES = {
    "tiny": CostCourse(model=Model(), steps=60, warm_up=10, suffix=""),
    "larger": CostCourse(model=Model(layers=4, hidden=512), steps=16, warm_up=5, suffix="/larger"),
}
VARIANTS = {"megatron streams": NO_RESHARDING, **{level: flags_of(level) for level in LEVELS}}


def measure_cost(folder: Path, name: str, course: CostCourse, turns: int) -> None:
    """Step times and memory of the levels, which take turns; every other turn goes backwards."""
    began_s = time.monotonic()
    flags = [*train_flags(course.model, COST_GRID, course.steps), *DROPOUT]
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    peaks: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    parameters = 0
    for turn in range(turns):
        for variant in list(VARIANTS)[:: -1 if turn % 2 else 1]:
            log_dir = folder / f"{variant.replace(' ', '-')}-{turn}"
            run = run_elastic(COST_GRID.workers, [*flags, *VARIANTS[variant]], log_dir, script=WORKER, preload=True)
            times[variant].append(statistics.median(run.step_times_ms(course.warm_up)))
            ends = [told for told in run.measured() if "peak_rss_mb" in told]
            peaks[variant].append(max(told["peak_rss_mb"] for told in ends))
            parameters = max(told["parameters"] for told in ends)
    rows = {
        variant: [format_all(times[variant]), f"{statistics.median(peaks[variant]):.0f}"] for variant in VARIANTS
    }  # fmt: skip
    model = course.model
    print_table(
        f"{name}, {COST_GRID}, {model.layers} layers of hidden size {model.hidden}, {parameters / 1e6:.2f} million "
        "parameters in the largest stage, undisturbed",
        ("ms per step, turn by turn", "peak resident MB of a worker"),
        rows,
    )
    for level in ("statistical", "bitwise"):
        print_ratio(f"step_cost@{level}{course.suffix}", times[level], times["numerical"])
    print_ratio(f"rng_cost@{COST_GRID}{course.suffix}", times["statistical"], times["megatron streams"])
    if course.suffix:
        base = statistics.median(peaks["numerical"])
        for level in ("statistical", "bitwise"):
            more = statistics.median(peaks[level]) - base
            print_result(f"memory_cost@{level}{course.suffix}", 1 + more / base, "ratio")
            print_result(f"memory_bytes_per_parameter@{level}{course.suffix}", more * 2**20 / parameters, "B", 1)
    print(f"cost of the levels, {name}: took {time.monotonic() - began_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
