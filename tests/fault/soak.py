"""A random fault campaign: job after job, until so many faults have struck.

    python -m tests.fault.soak --faults 200 --seed 1            make soak FAULTS=200 SEED=1
    python -m tests.fault.soak --seed 1 --case 17               make soak SEED=1 CASE=17: that job alone, again

Grids of up to 8 workers, flags, kinds, phases and victims are drawn from the seed and the number of the case alone, so
a case is the same job whenever it is run. Each job is compared with an undisturbed one of its setting (``verdict.py``
says how). Most events are one loss, some are two in one step, some have the second in the recovery from the first. Now
and then a last event leaves nothing to go on with; then the exit code has to be the one for that.

Exit status 1 when anything was wrong, with the line that runs the failing case again.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from megatron_elas.spec.errors import ExitCode
from megatron_elas.spec.faults import MIGRATION_PHASES, RECOVERY_PHASES, Fault, FaultKind, FaultPhase
from tests.fault.runs import Run
from tests.fault.scenarios import (
    APART,
    KINDS,
    UNPREPARED_PHASES,
    UNVERIFIED_PHASES,
    Scenario,
    calm_scenario,
    judge_scenario,
    may_strike_second,
    run_scenario,
    step_of,
    strike,
)
from tests.fault.settings import Outlook, Setting
from tests.fault.verdict import Verdict
from tests.fault.warm_launcher import WarmLauncher, running_warm_launcher

EVENTS = 5
"""Of one job, at most."""
STEPS = step_of(EVENTS - 1) + APART + 1
GRIDS = ((1, 2, 2), (1, 1, 4), (1, 2, 3), (1, 3, 2), (2, 1, 3), (1, 2, 4), (2, 2, 2), (1, 4, 2), (1, 1, 8))
"""Lanes, stages, rows."""
DOUBLE, SAME_STEP, FATAL = 0.45, 0.25, 0.06
"""Shares: of events with two losses, of those with the second not in the recovery, of jobs that end fatally."""
SAVING = 0.15
"""Share of jobs in which a save may be struck."""
_APART = (*RECOVERY_PHASES, *MIGRATION_PHASES, FaultPhase.SAVE)
STEP_PHASES = tuple(p for p in FaultPhase if p not in _APART)
TRIES = 40
"""Draws for an event before a job is left as it is."""


def draw_setting(seed: int, case: int) -> Setting:
    """Grids take turns; features are drawn once per grid and seed, so that undisturbed runs serve often."""
    tensor, pipeline, data = GRIDS[case % len(GRIDS)]
    rng = random.Random(f"setting {seed} {tensor}x{pipeline}x{data}")
    return Setting(
        tensor=tensor, pipeline=pipeline, data=data, tied=rng.random() < 0.5, bf16=rng.random() < 0.3,
        overlap=rng.random() < 0.5, clip=rng.choice((1.0, 0.1, 0.0)), recompute=rng.random() < 0.3,
        sequence_parallel=tensor > 1 and rng.random() < 0.5, copy=rng.random() < 0.15, batch=data * rng.choice((2, 3)),
    )  # fmt: skip


def draw_scenario(seed: int, case: int, phases: tuple[FaultPhase, ...]) -> Scenario:
    """The job of that number."""
    setting = draw_setting(seed, case)
    rng = random.Random(f"case {seed} {case}")
    step_phases = (*phases, *([FaultPhase.SAVE] * 2 if rng.random() < SAVING else []))
    last = rng.random() < FATAL
    outlook, faults = Outlook.of(setting), list[Fault]()
    for event in range(rng.randint(2, EVENTS)):
        drawn = _draw_event(rng, outlook, event, step_phases)
        if drawn is None:
            break
        new, after = drawn
        faults += new
        outlook = after.recovered
    code = ExitCode.FINISHED
    if last and (final := _draw_fatal(rng, outlook, len({f.step for f in faults}))) is not None:
        faults += final[0]
        code = final[1].exit_code
    return Scenario(setting=setting, faults=tuple(faults), steps=STEPS, code=code)


def _draw_event(
    rng: random.Random, outlook: Outlook, event: int, phases: tuple[FaultPhase, ...]
) -> tuple[list[Fault], Outlook] | None:
    """One or two losses that the job survives."""
    double = rng.random() < DOUBLE
    for attempt in range(TRIES):
        double = double and attempt < TRIES // 2
        faults, after = (_draw_two if double else _draw_one)(rng, outlook, event, phases)
        if faults and after.exit_code is ExitCode.FINISHED:
            return faults, after
    return None


def _draw_one(
    rng: random.Random, outlook: Outlook, event: int, phases: tuple[FaultPhase, ...]
) -> tuple[list[Fault], Outlook]:
    worker, phase = rng.choice(outlook.seated), rng.choice([p for p in phases if p not in RECOVERY_PHASES])
    plan = outlook.next_plan
    cells = plan.placement.stages[plan.placement.seat(worker).stage]
    # Evaluations deal whole micro-batches. A save has no micro-batch but "about to write".
    runs = min(len(plan.items_of(worker)), outlook.setting.batch // len(cells))
    microbatch = None if phase is FaultPhase.SAVE else rng.randrange(runs)
    return [strike(rng.choice(KINDS), worker, event, phase, microbatch)], outlook.without(worker)


def _draw_two(
    rng: random.Random, outlook: Outlook, event: int, phases: tuple[FaultPhase, ...]
) -> tuple[list[Fault], Outlook]:
    same_step = rng.random() < SAME_STEP
    (first,), before = _draw_one(rng, outlook, event, UNPREPARED_PHASES if same_step else phases)
    if before.exit_code is not ExitCode.FINISHED:
        return [], before
    kind, worker = rng.choice(KINDS), rng.choice((*before.seated, *before.spares))
    after = before.without(worker)
    if same_step:
        # Either may come first: each must have a seat without the other, so that it comes to its place all the same.
        alone = outlook.without(worker)
        fits = worker in before.seated and not alone.exit_code and first.worker in alone.seated
        if not fits or kind is first.kind is FaultKind.EXCEPTION:  # which would end the job as one error of all
            return [], after
        return [first, strike(kind, worker, event, rng.choice(UNPREPARED_PHASES), 0)], after
    places = [p for p in phases if p in RECOVERY_PHASES and may_strike_second(p, before, worker)]
    if not places:
        return [], after
    return [first, strike(kind, worker, event, rng.choice(places))], after


def _draw_fatal(rng: random.Random, outlook: Outlook, event: int) -> tuple[list[Fault], Outlook] | None:
    """Losses that end the job: the last of a stage, or an owner and its backup before its copies are renewed."""
    for _ in range(TRIES):
        victim = rng.choice(outlook.seated)
        first, before = strike(FaultKind.KILL, victim, event, FaultPhase.BACKWARD, 0), outlook.without(victim)
        if before.exit_code is not ExitCode.FINISHED:
            return [first], before
        worker, phase = rng.choice((*before.seated, *before.spares)), rng.choice(UNVERIFIED_PHASES)
        after = before.without(worker)
        if after.exit_code is not ExitCode.FINISHED and may_strike_second(phase, before, worker):
            return [first, strike(FaultKind.KILL, worker, event, phase)], after
    return None


# ---------------------------------------------------------------- running


class Soak:
    """Runs cases and adds up what came of them."""

    def __init__(self, seed: int, folder: Path, warm: WarmLauncher) -> None:
        self._seed = seed
        self._folder = folder
        self._warm = warm
        self._calm: dict[Setting, Run] = {}
        self.total = Verdict()
        self.failed: dict[int, Verdict] = {}
        self.struck: Counter[tuple[str, str]] = Counter()
        self.ended: Counter[int] = Counter()
        self.jobs = 0

    def run_case(self, case: int, phases: tuple[FaultPhase, ...]) -> Verdict:
        """One job, and the undisturbed one of its setting if there is none yet."""
        scenario = draw_scenario(self._seed, case, phases)
        started_s = time.monotonic()
        folder = self._folder / f"c{case}"
        try:
            calm = self._undisturbed(scenario)
            run = run_scenario(scenario, folder, self._warm)
            verdict = judge_scenario(scenario, run, calm)
            for text in run.fired:
                kind, _, rest = text.partition(":")
                self.struck[rest.partition("phase=")[2].partition(",")[0], kind] += 1
            self.ended[run.code] += 1
        except AssertionError as error:
            verdict = Verdict(problems=[str(error)])
        self.jobs += 1
        print(
            f"case {case}, {time.monotonic() - started_s:.1f} s, {'good' if verdict.good else 'BAD'}: {scenario}",
            flush=True,
        )
        self._add(case, verdict)
        if verdict.good:
            shutil.rmtree(folder)
        return verdict

    def _undisturbed(self, scenario: Scenario) -> Run:
        if scenario.setting not in self._calm:
            folder = self._folder / f"u{len(self._calm)}"
            self._calm[scenario.setting] = run_scenario(calm_scenario(scenario), folder, self._warm)
        return self._calm[scenario.setting]

    def _add(self, case: int, verdict: Verdict) -> None:
        self.total.steps += verdict.steps
        self.total.samples_lost += verdict.samples_lost
        self.total.samples_doubled += verdict.samples_doubled
        self.total.wrong_bits += verdict.wrong_bits
        self.total.leaks += verdict.leaks
        self.total.problems += verdict.problems
        if not verdict.good:
            self.failed[case] = verdict
            print(f"{verdict}\nagain: {again(self._seed, case)}", flush=True)

    @property
    def fired(self) -> int:
        """Faults that have struck."""
        return self.struck.total()

    def print_table(self) -> None:
        """Faults by phase and kind, what they came to, and RESULT lines."""
        kinds = KINDS
        print(f"\n{'phase':18}" + "".join(f"{kind:>10}" for kind in kinds) + f"{'all':>8}")
        for phase in FaultPhase:
            row = [self.struck[phase, kind] for kind in kinds]
            print(f"{phase:18}" + "".join(f"{count:10}" for count in row) + f"{sum(row):8}")
        sums = [sum(self.struck[phase, kind] for phase in FaultPhase) for kind in kinds]
        print(f"{'all':18}" + "".join(f"{count:10}" for count in sums) + f"{self.fired:8}")
        codes = ", ".join(f"{count} with {code}" for code, count in sorted(self.ended.items()))
        total, failed = self.total, ", ".join(map(str, sorted(self.failed))) or "none"
        print(f"\njobs {self.jobs} (ended {codes}), steps {total.steps}, bad cases {failed}")
        print(f"RESULT soak_faults={self.fired} faults")
        print(f"RESULT soak_samples_lost={total.samples_lost} samples")
        print(f"RESULT soak_samples_doubled={total.samples_doubled} samples")
        print(f"RESULT soak_wrong_bits={len(total.wrong_bits)} findings")
        print(f"RESULT soak_leaks={len(total.leaks)} findings", flush=True)
        for case in self.failed:
            print(f"again: {again(self._seed, case)}")


def again(seed: int, case: int) -> str:
    """The line that runs a case alone."""
    return f"make soak SEED={seed} CASE={case}"


def _cases(first: int | None) -> Iterator[int]:
    if first is not None:
        yield first
        return
    case = 0
    while True:
        yield case
        case += 1


def main() -> int:
    """Run; gives the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200, help="stop when so many have struck (default 200)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="only the case of this number")
    parser.add_argument("--show", action="store_true", help="print the cases, run nothing")
    parser.add_argument("--keep", type=Path, help="folder for what failing cases have left (short path)")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    phases = (*STEP_PHASES, *RECOVERY_PHASES)
    if options.show:
        drawn = 0
        for case in _cases(options.case):
            scenario = draw_scenario(options.seed, case, phases)
            print(f"case {case}: {scenario}")
            drawn += len(scenario.faults)
            if drawn >= options.faults:
                break
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = options.keep or Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        with running_warm_launcher() as warm:
            soak = Soak(options.seed, folder, warm)
            for case in _cases(options.case):
                soak.run_case(case, phases)
                if soak.fired >= options.faults:
                    break
            soak.print_table()
    finally:
        if options.keep is None:
            shutil.rmtree(folder)
    return 1 if soak.failed else 0


if __name__ == "__main__":
    sys.exit(main())
