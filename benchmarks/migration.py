"""How long a migration of layers holds training up: beside steps, at once, and by stopping and copying everything.

    make bench-migration
    make bench-migration ARGS="--layers 1 2 --turns 3"

Real training jobs on emulated accelerators (docs/emulation.md): state goes over emulated links; all else that a switch
does takes the time of this machine's processors, which eight workers share: with ``--speed 0.25`` links take as much
longer as the rest does where two cores do the work of eight. ``elasrun --rebalance`` has the second stage give its
last layers to the third. The modes take turns in one run:

* ``async``: ``--elastic-migration async``: state goes beside steps;
* ``blocking``: ``--elastic-migration blocking``: it goes at the switch;
* ``stop-and-copy``: at the switch all shards of all workers come anew from their backups (stop_and_copy_worker.py).

Blocked time is that from the end of the last step under the old plan to the begin of the first one under the new, of
the worker where it is longest; what that step then waits for state to be compared; and with ``async`` how much longer
the steps before took to hand gradients over. Beside it ``longer`` is what the steps around the switch took more than
those before and after it, by the wall clock: it has everything in it, and the machine's noise. Lines
``RESULT name=value unit``, medians of the turns:

    migration_blocking_async_vs_blocking@LAYERS   blocked time, async / blocking
    migration_blocking_async_vs_stopcopy@LAYERS   async / stop-and-copy
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from emulated_jobs import Case, Course, claimed_processors, read_course
from machine import describe_machine
from results import format_all, print_ratio, print_table
from training_jobs import Grid, run_elastic

from megatron_elas.spec.migration import MIGRATION_PHASES

CASE = Case(grid=Grid(stages=4, rows=2), model="llama2-7b", hardware="npu-96", row_batches=4, size=1, hidden=64)
ASKED = 3
"""The step in which the migration is asked for."""
MODES = ("async", "blocking", "stop-and-copy")
WORKER = Path(__file__).resolve().parent / "stop_and_copy_worker.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrated:
    """What a migration took."""

    blocked_ms: float
    """All together."""
    phases_ms: dict[str, float]
    verify_ms: float
    hand_over_ms: float
    longer_ms: float
    streamed_steps: int
    moved_mb: float
    """Beside steps and at the switch, of the tiny model."""


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 3, 4], help="that move (default: 1 2 3 4)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="default: all")
    parser.add_argument("--speed", type=float, default=1.0, help="of the emulation (default: 1)")
    parser.add_argument("--turns", type=int, default=3, help="jobs of each mode (default: 3)")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the jobs' logs there")
    options = parser.parse_args()
    most = CASE.layers // CASE.grid.stages - 1
    if wrong := [count for count in options.layers if not 0 < count <= most]:
        parser.error(f"--layers {wrong[0]}: a stage of {most + 1} layers can give 1 to {most}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started is ended
    with claimed_processors() as priority, tempfile.TemporaryDirectory(prefix="elas-bench-") as temporary:
        print(f"{describe_machine()}; {priority}")
        case = replace(CASE, speed=options.speed)
        print(f"{case.grid}, {case.model} on {case.hardware}, {case.speed:g} times as fast", flush=True)
        for count in options.layers:
            measure_layers(case, count, options, (options.logs or Path(temporary)) / str(count))


def measure_layers(case: Case, count: int, options: argparse.Namespace, folder: Path) -> None:
    """All modes with so many layers."""
    found: dict[str, list[Migrated]] = {mode: [] for mode in options.modes}
    for turn in range(options.turns):
        for mode in options.modes if turn % 2 else reversed(options.modes):
            found[mode].append(migrate(case, mode, count, folder / f"{mode}-{turn}"))
    columns = ("blocked, ms", *MIGRATION_PHASES, "verify", "hand over", "longer, ms", "steps beside", "MB moved")
    rows = {mode: describe(turns) for mode, turns in found.items()}
    print_table(f"{count} layers, each turn's sum, and medians of its parts in ms", columns, rows)
    blocked = {mode: [turn.blocked_ms for turn in turns] for mode, turns in found.items()}
    if "async" in blocked:
        for mode, name in (("blocking", "blocking"), ("stop-and-copy", "stopcopy")):
            if mode in blocked:
                print_ratio(f"migration_blocking_async_vs_{name}@{count}", blocked["async"], blocked[mode])


def describe(turns: Sequence[Migrated]) -> list[str]:
    """Cells of a mode."""
    return [
        format_all([turn.blocked_ms for turn in turns], 0),
        *(f"{statistics.median(turn.phases_ms[phase] for turn in turns):.1f}" for phase in MIGRATION_PHASES),
        f"{statistics.median(turn.verify_ms for turn in turns):.1f}",
        f"{statistics.median(turn.hand_over_ms for turn in turns):.1f}",
        format_all([turn.longer_ms for turn in turns], 0),
        format_all([turn.streamed_steps for turn in turns], 0),
        f"{statistics.median(turn.moved_mb for turn in turns):.2f}",
    ]


def migrate(case: Case, mode: str, count: int, folder: Path) -> Migrated:
    """A job in which so many layers move."""
    each = case.layers // case.grid.stages
    layers = f"{ASKED}:{each},{each - count},{each + count}" + f",{each}" * (case.grid.stages - 3)
    steps = ASKED + count + 6
    run = run_elastic(
        case.grid.workers,
        [*case.flags(steps), f"--elastic-migration={'async' if mode == 'async' else 'blocking'}"],
        folder,
        script=WORKER if mode == "stop-and-copy" else None,
        preload=True,
        launcher_flags=["--costs", "profile", f"--rebalance={layers}"],
    )
    return read_migration(read_course(run), mode, count)


def read_migration(course: Course, mode: str, count: int) -> Migrated:
    """Of a job's events and steps. Ends the program where another migration than the one asked for was made."""
    events = course.of_kind("migration")
    moved = [move["layers"][1] - move["layers"][0] for event in events for move in event["moved"]]
    if len(events) != 1 or moved != [count]:
        sys.exit(f"{mode}: one migration of {count} layers was to be made; made were {moved or 'none'}")
    (event,) = events
    return Migrated(
        blocked_ms=event["total"] + event["verify_ms"] + event["hand_over_ms"],
        phases_ms={phase: event[phase] for phase in MIGRATION_PHASES},
        verify_ms=event["verify_ms"],
        hand_over_ms=event["hand_over_ms"],
        longer_ms=longer_ms(course, event),
        streamed_steps=event["streamed_steps"],
        moved_mb=(event["streamed_bytes"] + event["gradient_bytes"] + event["moved_bytes"]) / 1e6,
    )


def longer_ms(course: Course, event: dict[str, Any]) -> float:
    """From the end of the last step before the migration was asked for to that of the first one under the new plan:
    what it takes more than as many steps in steady state.
    """
    first = event["resume_step"]
    ends = {step.step: step.ended_s for step in course.steps}
    before = statistics.median(step.seconds for step in course.steps if step.step <= ASKED and step.is_steady)
    after = statistics.median(step.seconds for step in course.steps if step.step > first and step.is_steady)
    return 1e3 * (ends[first] - ends[ASKED - 1] - (first - ASKED) * before - after)


if __name__ == "__main__":
    main()
