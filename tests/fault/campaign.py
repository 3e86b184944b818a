"""Every phase x kind of fault x role once, packed into as few jobs as there are workers to lose."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_elas.spec.errors import ExitCode
from megatron_elas.spec.faults import RECOVERY_PHASES, Fault, FaultKind, FaultPhase
from tests.fault.scenarios import (
    APART,
    KINDS,
    SURVIVOR_PHASES,
    UNVERIFIED_PHASES,
    Scenario,
    may_strike_second,
    step_of,
    strike,
)
from tests.fault.settings import Outlook, Setting

EVENTS = 3
"""Of one job, at most."""
STEPS = step_of(EVENTS - 1) + APART + 1


class Role(enum.StrEnum):
    """Who is struck, in the grid as it is then."""

    FIRST_STAGE = "first-stage"
    LAST_STAGE = "last-stage"
    LOGGING = "logging"
    """The last rank, which tells Megatron's log."""
    WORKER_0 = "worker-0"
    BACKUP = "backup"
    """Who kept the copies of the job's first victim."""
    SPARE = "spare"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What has to be struck once."""

    phase: FaultPhase
    kind: FaultKind
    role: Role

    def __str__(self) -> str:
        return f"{self.phase}/{self.kind}/{self.role}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A scenario and which targets it strikes."""

    scenario: Scenario
    targets: tuple[Target, ...]


def all_targets(setting: Setting, phases: Sequence[FaultPhase]) -> list[Target]:
    """Every one that exists in this grid.

    An idle spare takes no steps, so it is struck in the parts of a recovery that it comes to. The backup of a worker
    that is being recovered from is not struck when the recovery is as good as done: whether others have noticed
    decides then whether the job can go on.
    """
    targets = [Target(phase=p, kind=k, role=r) for p, k, r in itertools.product(phases, KINDS, Role)]

    def exists(target: Target) -> bool:
        if target.role is Role.SPARE:
            idle = {*SURVIVOR_PHASES} - {FaultPhase.RECOVERY_QUIESCE}
            return setting.tensor > 1 and target.phase in idle
        in_doubt = {*RECOVERY_PHASES} - {*UNVERIFIED_PHASES}
        return not (target.role is Role.BACKUP and target.phase in in_doubt)

    return [target for target in targets if exists(target)]


def pack(setting: Setting, targets: Sequence[Target]) -> tuple[list[Job], list[Target]]:
    """Jobs that strike the targets, and those that no job could."""
    left = list(targets)
    jobs = []
    while left:
        job = _fill(setting, left)
        if not job.targets:
            break
        jobs.append(job)
        left = [target for target in left if target not in job.targets]
    return jobs, left


def _fill(setting: Setting, left: Sequence[Target]) -> Job:
    outlook = Outlook.of(setting)
    faults: list[Fault] = []
    struck: list[Target] = []
    backups: tuple[int, ...] = ()
    for event in range(EVENTS):
        found = next(_events(setting, outlook, event, [t for t in left if t not in struck], backups), None)
        if found is None:
            break
        new, its_targets, after = found
        if event == 0:
            backups = outlook.backups_of(new[0].worker)
        faults += new
        struck += its_targets
        if after.exit_code is not ExitCode.FINISHED:
            outlook = after
            break
        outlook = after.recovered
    return Job(
        scenario=Scenario(setting=setting, faults=tuple(faults), steps=STEPS, code=outlook.exit_code),
        targets=tuple(struck),
    )


Event = tuple[list[Fault], list[Target], Outlook]


def _events(
    setting: Setting, outlook: Outlook, event: int, left: Sequence[Target], backups: Sequence[int]
) -> Iterator[Event]:
    """What may strike next, best first: what is hardest to place comes before the rest."""
    in_recovery = [target for target in left if target.phase in RECOVERY_PHASES]
    in_step = [target for target in left if target.phase not in RECOVERY_PHASES]
    in_step.sort(key=lambda target: target.role is not Role.BACKUP)
    in_recovery.sort(key=lambda target: (target.role is not Role.SPARE, target.role is Role.BACKUP))
    firsts: list[tuple[Target | None, int]] = [
        (target, worker) for target in in_step for worker in _find(target.role, outlook, backups)
    ]
    for second in in_recovery:
        anyone = [(None, worker) for worker in outlook.seated]
        for first, victim in [*firsts, *anyone]:
            before = outlook.without(victim)
            if before.exit_code is not ExitCode.FINISHED:
                continue
            for worker in _find_second(second.role, outlook, before, victim):
                after = before.without(worker)
                fatal = second.role is Role.BACKUP
                if may_strike_second(second.phase, before, worker) and fatal == bool(after.exit_code):
                    faults = [_first(first, victim, event), strike(second.kind, worker, event, second.phase)]
                    yield faults, [*([first] if first is not None else []), second], after
    for target, worker in firsts:
        assert target is not None
        after = outlook.without(worker)
        if after.exit_code is ExitCode.FINISHED:
            yield [_first(target, worker, event)], [target], after


def _first(target: Target | None, worker: int, event: int) -> Fault:
    if target is None:
        return strike(FaultKind.KILL, worker, event, FaultPhase.FORWARD)
    return strike(target.kind, worker, event, target.phase)


def _find(role: Role, outlook: Outlook, backups: Sequence[int]) -> list[int]:
    """Who has the role; a worker that has two counts for the rarer one only, where another has the other."""
    seated, stages = outlook.seated, outlook.stages
    match role:
        case Role.FIRST_STAGE:
            return [worker for worker in stages[0] if worker != 0]
        case Role.LAST_STAGE:
            return [worker for worker in stages[-1] if worker != seated[-1]]
        case Role.LOGGING:
            return [seated[-1]]
        case Role.WORKER_0:
            return [0] if 0 in seated else []
        case Role.BACKUP:
            return [worker for worker in backups if worker in seated]
        case Role.SPARE:
            return list(outlook.spares)


def _find_second(role: Role, outlook: Outlook, before: Outlook, victim: int) -> list[int]:
    """Who has the role while ``victim`` is recovered from."""
    if role is Role.SPARE:  # a spare of an earlier loss, or the victim's cell mate
        return list(before.spares)
    if role is Role.BACKUP:
        return list(outlook.backups_of(victim))
    return [worker for worker in _find(role, before, ()) if worker not in outlook.backups_of(victim)]
