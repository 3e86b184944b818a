"""What elasticity costs while nothing happens, and what a lost worker costs: ours against a restart.

    python benchmarks/recovery.py [--quick] [--only grids copies growth] [--grids 2x2 2x4] [--turns 3] [--kills 5]

A grid PxD has P pipeline stages and D data-parallel rows. All figures of a grid come from one run of this program, the
variants taking turns, on this machine's CPU. Takes about ten minutes on two idle cores. Prints tables, and lines
``RESULT name=value unit``:

    steady and recovery, tiny Llama, for every grid:
    elastic_on_vs_stock@GRID     step time with --elastic / stock Megatron on gloo
    recovery_beyond_step_s@GRID  fault to the next committed step, less one normal step of the grid that is left
    verify_share@GRID            the checks before resuming / the recovery up to its first step, which is left out
    recovery_vs_restart@GRID     work lost to a restart by torchrun from the last checkpoint / work lost to us

    copies, a larger model on P 2 x D 2:
    elastic_on_vs_stock@pp2dp2_larger  as above
    snapshot_on_vs_off@pp2dp2_larger   step time with --elastic / the same without backups

    growth, a line through the times of each phase (recovery_growth.py):
    recovery_PHASE_ms_per_layer, _per_mb, _per_worker   slopes: per layer and per MB of optimizer state of a stage
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
from recovery_growth import measure_growth
from results import format_all, print_ratio
from step_times import time_in_turns, time_steady
from training_jobs import LINE, Grid, Model, Torchrun, run_elastic, train_flags

STEPS = 40
FAULT_STEP = 15
SAVE_INTERVAL = 5
LARGER = Model(layers=4, hidden=512)
LARGER_STEPS = 14
LARGER_WARM_UP = 5
PARTS = ("grids", "copies", "migration", "growth")


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one turn and kill each, fewer sizes: about four minutes")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (default: all)")
    parser.add_argument("--grids", nargs="+", default=["2x2", "2x4"], metavar="PxD")
    parser.add_argument("--turns", type=int, help="runs of each variant for the step time (default 3, quick 1)")
    parser.add_argument("--kills", type=int, help="kills per grid (default 5, quick 1)")
    parser.add_argument("--growth-kills", type=int, help="kills per size (default 3, quick 1)")
    options = parser.parse_args()
    turns, kills, growth_kills = (
        given or (1 if options.quick else default)
        for given, default in ((options.turns, 3), (options.kills, 5), (options.growth_kills, 3))
    )
    with tempfile.TemporaryDirectory(prefix="elas-bench-") as folder:
        if "grids" in options.only:
            for grid in map(Grid.parse, options.grids):
                measure_steady(Path(folder), grid, turns)
                measure_recovery(Path(folder), grid, kills, max(1, turns - 1))
        if "copies" in options.only:
            measure_copies(Path(folder), max(1, turns - 1))
        if "migration" in options.only:
            measure_migration(Path(folder), kills)
        if "growth" in options.only:
            measure_growth(Path(folder), growth_kills, options.quick)


def measure_steady(folder: Path, grid: Grid, turns: int) -> None:
    """Step time of undisturbed runs."""
    print_ratio(f"elastic_on_vs_stock@{grid}", *time_steady(folder, grid, train_flags(Model(), grid, STEPS), turns))


def measure_copies(folder: Path, turns: int) -> None:
    """Step time of a larger model: stock, with --elastic, and with --elastic but no backups."""
    grid = Grid(stages=2, rows=2)
    flags = train_flags(LARGER, grid, LARGER_STEPS)
    variants: dict[str, tuple[list[str], dict[str, str]]] = {
        "stock": (flags, {}),
        "elastic": ([*flags, "--elastic"], {}),
        "elastic without backups": ([*flags, "--elastic", "--elastic-snapshot", "off"], {}),
    }
    times = time_in_turns(folder / "copies", grid, variants, turns, LARGER_WARM_UP)
    print(f"\n{grid}, {LARGER.layers} layers of hidden size {LARGER.hidden}: ms per step, ", end="")
    print(", ".join(f"{name} {format_all(values)}" for name, values in times.items()))
    print_ratio(f"elastic_on_vs_stock@{grid}_larger", times["elastic"], times["stock"])
    print_ratio(f"snapshot_on_vs_off@{grid}_larger", times["elastic"], times["elastic without backups"])


def measure_recovery(folder: Path, grid: Grid, kills: int, restarts: int) -> None:
    """A lost worker: ours against a restart."""
    flags = train_flags(Model(), grid, STEPS)
    tables, beyond_s = [], []
    for kill in range(kills):
        worker = (kill * 3 + 1) % grid.workers
        fault = f"kill:worker={worker}@step={FAULT_STEP},phase=forward,microbatch=1"
        run = run_elastic(grid.workers, [*flags, "--elastic", "--elastic-inject", fault], folder / f"{grid}-kill{kill}")
        (event,) = run.events
        tables.append({key: value for key, value in event.items() if isinstance(value, float) and key != "time_s"})
        beyond_s.append((event["total"] - statistics.median(run.step_times_ms(FAULT_STEP + 3))) / 1e3)
    print(f"{grid}: recovery in ms, median of {kills} kills, each of another worker")
    for phase in tables[0]:
        print(f"    {phase:>10}  {statistics.median(table[phase] for table in tables):8.1f}")
    ours_s = statistics.median(beyond_s)
    print(f"RESULT recovery_beyond_step_s@{grid}={ours_s:.3f} s", flush=True)

    shares = [table["verify"] / (table["total"] - table["first_step"]) for table in tables]
    print(f"RESULT verify_share@{grid}={statistics.median(shares):.3f} ratio", flush=True)

    restarts_s = [lose_and_restart(folder / f"{grid}-restart{turn}", grid.workers, flags) for turn in range(restarts)]
    print(f"{grid}: lost to a restart {format_all(restarts_s, 2)} s, to a recovery {format_all(beyond_s, 3)} s")
    print(f"RESULT recovery_vs_restart@{grid}={statistics.median(restarts_s) / ours_s:.0f} ratio", flush=True)


def measure_migration(folder: Path, kills: int) -> None:
    """A lost worker of a larger model, with optimizer state that moves beside the first step and before it in turns."""
    grid = Grid(stages=1, rows=4)
    flags = train_flags(LARGER, grid, LARGER_STEPS)
    beyond_s: dict[str, list[float]] = {"async": [], "blocking": []}
    blocked_ms: dict[str, list[float]] = {"async": [], "blocking": []}
    for kill in range(kills):
        worker = (kill * 3 + 1) % grid.workers
        fault = f"kill:worker={worker}@step={LARGER_WARM_UP + 1},phase=backward,microbatch=1"
        for mode in beyond_s:
            elastic = ["--elastic", f"--elastic-migration={mode}", "--elastic-inject", fault]
            run = run_elastic(grid.workers, [*flags, *elastic], folder / f"migration-{mode}{kill}")
            (event,) = run.events
            moved_beside = event["beside"]["background_s"] > 0
            assert moved_beside == (mode == "async"), f"{mode}: {event}"
            beyond_s[mode].append((event["total"] - statistics.median(run.step_times_ms(LARGER_WARM_UP + 3))) / 1e3)
            blocked_ms[mode].append(event["restore"] + event["rebuild"] + event["verify"])
    name = f"{grid}_larger"
    print(f"\n{name}: moves beside the first step, and before it")
    print("    restore to verify, ms:", " / ".join(format_all(values) for values in blocked_ms.values()))
    print("    beyond a step, s:", " / ".join(format_all(values, 3) for values in beyond_s.values()))
    print_ratio(f"recovery_beyond_step_async_vs_blocking@{name}", beyond_s["async"], beyond_s["blocking"])
    print_ratio(f"blocked_async_vs_blocking@{name}", blocked_ms["async"], blocked_ms["blocking"])


def lose_and_restart(folder: Path, workers: int, flags: list[str]) -> float:
    """Kill a worker of a stock job under torchrun, start the job again from its last checkpoint.

    Returns:
        Seconds from the kill to the end of the step that was under way, less the time that one step takes: what the
        loss has cost.
    """
    checkpoints = ["--save", str(folder), "--save-interval", str(SAVE_INTERVAL), "--ckpt-format", "torch_dist"]
    with Torchrun(workers, [*flags, *checkpoints]) as (first, lines):
        times = []
        for line in lines:
            if match := LINE.search(line):
                times.append(float(match[2]))
                if int(match[1]) == FAULT_STEP + SAVE_INTERVAL // 2:  # between two checkpoints
                    break
        killed_s = time.monotonic()
        victims = [p for p in psutil.Process(first.pid).children(recursive=True) if is_worker(p)]
        victims[-2].send_signal(signal.SIGKILL)
        for _ in lines:  # torchrun ends the other workers
            pass
    target = FAULT_STEP + SAVE_INTERVAL // 2 + 1
    with Torchrun(workers, [*flags, *checkpoints, "--load", str(folder)]) as (_, lines):
        for line in lines:
            if (match := LINE.search(line)) and int(match[1]) >= target:
                return time.monotonic() - killed_s - statistics.median(times) / 1e3
    sys.exit("the restarted job did not come to the step in which it was killed")


def is_worker(process: psutil.Process) -> bool:
    """Whether it trains (torchrun's other children do not)."""
    return "megatron_elas.pretrain_gpt" in process.cmdline() and "torch.distributed.run" not in process.cmdline()


if __name__ == "__main__":
    main()
