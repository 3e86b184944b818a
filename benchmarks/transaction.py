"""What the step as a transaction costs: step time with and without backups, bytes on the wire, and recoveries.

    python benchmarks/transaction.py [--quick] [--only steady wire recovery] [--grids 2x2 2x4] [--turns 3] [--kills 5]

A grid PxD has P pipeline stages and D data-parallel rows. All figures of a grid come from one run of this program, the
variants taking turns, on this machine's CPU. Prints tables, and lines ``RESULT name=value unit``:

    steady, the tiny Llama and (``_larger``) 4 layers of hidden size 512:
    snapshot_on_vs_off@GRID        step time with --elastic-snapshot replay / with off; 1 is free
    snapshot_copy_vs_off@GRID      the same for copy

    wire, counted by the transports of all workers over whole steps:
    wire_bytes_vs_reduce_scatter@GRID       bytes to backups / bytes of the gradients' reduce-scatter, replay
    wire_bytes_copy_vs_reduce_scatter@GRID  the same for copy
    With D replicas of P parameters an owner sends its backup 4 P / D bytes of gradients, or 12 P / D of state, and its
    replicas 4 P (D - 1) / D in the reduce-scatter: 1 / (D - 1) and 3 / (D - 1), padding aside.

    recovery, the tiny Llama, kills in the same places in both modes:
    recovery_beyond_step_s@GRID       fault to the end of the next step, less one normal step; replay
    recovery_copy_beyond_step_s@GRID  the same for copy
    verify_share@GRID                 from rebuilt to verified / from the fault to the end of the next step; replay
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results import format_all, print_ratio, print_result, print_table
from step_times import WARM_UP, time_in_turns
from training_jobs import Grid, Model, Run, run_elastic, train_flags

STEPS = 40
FAULT_STEP = 15
LARGER = Model(layers=4, hidden=512)
LARGER_STEPS, LARGER_WARM_UP = 14, 5
WIRE_STEPS = (4, 10)
"""Two lengths of a job; the difference is that many whole steps, without start and end."""
PARTS = ("steady", "wire", "recovery")
MODES = ("replay", "copy")


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one turn and kill each, and no larger model")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (default: all)")
    parser.add_argument("--grids", nargs="+", default=["2x2", "2x4"], metavar="PxD")
    parser.add_argument("--turns", type=int, help="runs of each variant for the step time (default 3, quick 1)")
    parser.add_argument("--kills", type=int, help="kills per grid and mode (default 5, quick 1)")
    options = parser.parse_args()
    turns, kills = (
        given or (1 if options.quick else default) for given, default in ((options.turns, 3), (options.kills, 5))
    )
    with tempfile.TemporaryDirectory(prefix="elas-bench-") as folder:
        for grid in map(Grid.parse, options.grids):
            if "steady" in options.only:
                measure_steady(Path(folder), grid, Model(), "", STEPS, WARM_UP, turns)
                if not options.quick:
                    measure_steady(Path(folder), grid, LARGER, "_larger", LARGER_STEPS, LARGER_WARM_UP, turns)
            if "wire" in options.only:
                measure_wire(Path(folder), grid)
            if "recovery" in options.only:
                measure_recovery(Path(folder), grid, kills)


def elastic(flags: Sequence[str], mode: str) -> list[str]:
    """Flags of an elastic job whose backups are kept in this way."""
    return [*flags, "--elastic", "--elastic-snapshot", mode]


def measure_steady(folder: Path, grid: Grid, model: Model, suffix: str, steps: int, warm_up: int, turns: int) -> None:
    """Step time of undisturbed runs."""
    flags = train_flags(model, grid, steps)
    variants: dict[str, tuple[list[str], dict[str, str]]] = {
        mode: (elastic(flags, mode), {}) for mode in ("off", *MODES)
    }
    times = time_in_turns(folder / f"{grid}-steady{suffix}", grid, variants, turns, warm_up)
    print(f"\n{grid}{suffix}: ms per step, " + ", ".join(f"{mode} {format_all(ms)}" for mode, ms in times.items()))
    print_ratio(f"snapshot_on_vs_off@{grid}{suffix}", times["replay"], times["off"])
    print_ratio(f"snapshot_copy_vs_off@{grid}{suffix}", times["copy"], times["off"])


# ---------------------------------------------------------------- bytes on the wire


def measure_wire(folder: Path, grid: Grid) -> None:
    """Bytes that all workers send in a step, by purpose."""
    per_step: dict[str, Counter[str]] = {}
    for mode in ("off", *MODES):
        sent = []
        for steps in WIRE_STEPS:
            log_dir = folder / f"{grid}-wire-{mode}-{steps}"
            flags = elastic(train_flags(Model(), grid, steps), mode)
            run = run_elastic(grid.workers, flags, log_dir, measured=True, environ={"ELAS_BENCH_WIRE": "count"})
            sent.append(_add_up(run))
        fewer, more = sent
        more.subtract(fewer)
        per_step[mode] = Counter({what: count // (WIRE_STEPS[1] - WIRE_STEPS[0]) for what, count in more.items()})
    kinds = sorted({what for sent in per_step.values() for what in sent})
    print_table(
        f"{grid}: kB that all workers send in a step",
        tuple(per_step),
        {kind: [f"{sent[kind] / 1e3:.1f}" for sent in per_step.values()] for kind in kinds},
    )
    for mode, name in (("replay", "wire_bytes"), ("copy", "wire_bytes_copy")):
        sent = per_step[mode]
        print_result(f"{name}_vs_reduce_scatter@{grid}", sent["backups"] / sent["reduce_scatter"], "ratio")


def _add_up(run: Run) -> Counter[str]:
    total: Counter[str] = Counter()
    for told in run.measured():
        total.update(told["wire_bytes"])
    return total


# ---------------------------------------------------------------- recoveries


def measure_recovery(folder: Path, grid: Grid, kills: int) -> None:
    """The phases of recoveries from kills in a forward pass and around the optimizer, modes taking turns."""
    events: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    beyond_s: dict[str, list[float]] = {mode: [] for mode in MODES}
    for kill in range(kills):
        worker = (kill * 3 + 1) % grid.workers
        fault = f"kill:worker={worker}@step={FAULT_STEP},phase=forward,microbatch=1"
        for mode in MODES:
            flags = [*elastic(train_flags(Model(), grid, STEPS), mode), "--elastic-inject", fault]
            run = run_elastic(grid.workers, flags, folder / f"{grid}-{mode}-kill{kill}")
            (event,) = run.events
            events[mode].append(event)
            beyond_s[mode].append((event["total"] - statistics.median(run.step_times_ms(FAULT_STEP + 3))) / 1e3)
    phases = [key for key, value in events["replay"][0].items() if isinstance(value, float) and key != "time_s"]
    print_table(
        f"{grid}: recovery in ms, medians of {kills} kills, each of another worker",
        MODES,
        {phase: [f"{statistics.median(e[phase] for e in events[mode]):.1f}" for mode in MODES] for phase in phases},
    )
    print(", ".join(f"{mode}: beyond a step {format_all(beyond_s[mode], 3)} s" for mode in MODES))
    for mode, name in (("replay", "recovery"), ("copy", "recovery_copy")):
        print_result(f"{name}_beyond_step_s@{grid}", statistics.median(beyond_s[mode]), "s")
    shares = [event["verify"] / event["total"] for event in events["replay"]]
    print_result(f"verify_share@{grid}", statistics.median(shares), "ratio")


if __name__ == "__main__":
    main()
