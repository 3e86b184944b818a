"""What strikes a job: events, each the loss of one worker or two, as faults of ``--elastic-inject``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_elas.spec.errors import ExitCode
from megatron_elas.spec.faults import PHASES_WITH_MICROBATCH, RECOVERY_PHASES, Fault, FaultKind, FaultPhase
from tests.fault.runs import Run, run_job
from tests.fault.settings import BY_PROFILE, Outlook, Setting
from tests.fault.verdict import Verdict, judge
from tests.fault.warm_launcher import WarmLauncher

FIRST, APART = 2, 3
"""Step of the first event, and steps from one to the next; evaluations and saves come after these steps."""
KINDS = tuple(kind for kind in FaultKind if kind is not FaultKind.HANG)
"""That are noticed within a second; a hang takes as long as the job's limits say, see ``test_hangs.py``."""
SURVIVOR_PHASES = (FaultPhase.RECOVERY_QUIESCE, FaultPhase.RECOVERY, FaultPhase.RECOVERY_RESTORE)
"""Phases of a recovery that a worker comes to which has no seat after it."""
UNVERIFIED_PHASES = (*SURVIVOR_PHASES, FaultPhase.RECOVERY_REBUILD, FaultPhase.RECOVERY_VERIFY)
"""Phases of a recovery that begin before anybody can have the new layout."""
UNPREPARED_PHASES = (FaultPhase.FORWARD, FaultPhase.BACKWARD)
"""Phases of a step that is run again by all when a worker is lost in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A job, what strikes it, and how it must end."""

    setting: Setting
    faults: tuple[Fault, ...]
    steps: int
    code: ExitCode = ExitCode.FINISHED

    def __str__(self) -> str:
        end = "" if self.code is ExitCode.FINISHED else f"; ends with {int(self.code)}"
        return f"{self.setting}: {' '.join(map(str, self.faults))}{end}"

    @property
    def saves(self) -> bool:
        """Whether the job needs to save checkpoints."""
        return any(fault.phase is FaultPhase.SAVE for fault in self.faults)


def step_of(event: int) -> int:
    """The step that the event strikes in."""
    return FIRST + APART * event


def run_scenario(scenario: Scenario, folder: Path, warm: WarmLauncher, *, timeout_s: float = 150) -> Run:
    """Train; ``folder`` is made and filled, and its path must be short: sockets lie in it."""
    flags = (*scenario.setting.flags, "--split=90,10,0", f"--eval-interval={APART}", "--eval-iters=1")
    if scenario.saves:
        flags += ("--ckpt-format=torch_dist", f"--save-interval={APART}", f"--save={folder / 'checkpoints'}")
    temporary = folder / "t"
    temporary.mkdir(parents=True)
    return run_job(
        folder, flags, workers=scenario.setting.workers, faults=[*map(str, scenario.faults)], steps=scenario.steps,
        batch=scenario.setting.batch, model=scenario.setting.model, timeout_s=timeout_s, warm=warm,
        launcher_flags=BY_PROFILE,
        environ={"ELAS_TEST_TRACE": "1", "TMPDIR": str(temporary)},
    )  # fmt: skip


def calm_scenario(scenario: Scenario) -> Scenario:
    """The same job without a fault."""
    return Scenario(setting=scenario.setting, faults=(), steps=scenario.steps)


def judge_scenario(scenario: Scenario, run: Run, calm: Run) -> Verdict:
    """Compare with the undisturbed run."""
    return judge(run, calm, scenario.setting, faults=tuple(map(str, scenario.faults)), code=int(scenario.code))


def strike(kind: FaultKind, worker: int, event: int, phase: FaultPhase, microbatch: int | None = None) -> Fault:
    """A fault of an event."""
    if phase not in PHASES_WITH_MICROBATCH:
        microbatch = None
    return Fault(kind=kind, worker=worker, step=step_of(event), phase=phase, microbatch=microbatch)


def may_strike_second(phase: FaultPhase, before: Outlook, worker: int) -> bool:
    """Whether the worker comes to the phase of the recovery that ``before`` has under way."""
    assert phase in RECOVERY_PHASES
    alive = (*before.seated, *before.spares)
    if phase is FaultPhase.RECOVERY_QUIESCE:  # nobody tells an idle spare of it
        return worker in alive and worker in before.plan.placement.workers
    return worker in (alive if phase in SURVIVOR_PHASES else before.seated)


def count_kinds(faults: Sequence[Fault]) -> dict[tuple[FaultPhase, FaultKind], int]:
    """How often each was struck."""
    counts: dict[tuple[FaultPhase, FaultKind], int] = {}
    for fault in faults:
        counts[fault.phase, fault.kind] = counts.get((fault.phase, fault.kind), 0) + 1
    return counts
