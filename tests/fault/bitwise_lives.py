"""Random jobs at ``--elastic-consistency bitwise`` that end early, and are started again from their checkpoints.

A job has several lives. Each has a grid of its own, on the same lanes, and begins from the newest checkpoint; all but
the last are ended: by Megatron at an iteration that is saved, by a signal to the launcher (also in the middle of a
save), or because all workers are lost. In each life things happen as in ``bitwise_cases.py``, some of them soon after
the load, and others besides: losses in a save, a save that fails, an owner that is lost together with its backup, so
that the survivors go back to the checkpoint in place, and a controller that is killed. All follow from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from megatron_elas.spec.faults import Fault, FaultKind, FaultPhase
from tests.fault.bitwise_cases import (
    EVENT_KINDS,
    FIRST,
    GRIDS,
    LOSSES,
    TRIES,
    Case,
    Event,
    Outlook,
    draw_job,
    micro_batch_size,
    phases_of_a_step,
    strike,
    undisturbed,
)
from tests.fault.migrations import Job

APART, CALM = 6, 6
"""Most steps from one event of a life to the next, and besides from the last one to the end of the life."""
MOST_WORKERS = 8
EXIT, WORKERS, LAUNCHER, SAVING = "exit", "workers", "launcher", "save launcher"
"""Ends of a life; the last three as in ``job_killer.py``."""


@dataclass(frozen=True, kw_only=True)
class Saves:
    """Which iterations are saved."""

    every: int
    failing: frozenset[int]
    """Iterations whose save fails, as there is something in its place."""

    def newest(self, begin: int, end: int) -> int:
        """Of a life that began from the checkpoint of ``begin`` (0: none), and has done ``end`` iterations."""
        return max(
            (i for i in range(begin + 1, end + 1) if not i % self.every and i not in self.failing), default=begin
        )


@dataclass(frozen=True, kw_only=True)
class Life:
    """From a start of the job to its end."""

    case: Case
    begin: int
    """Iteration of the checkpoint that it begins from; 0: from nothing."""
    end: int
    """Iterations that are done when it ends."""
    saves: Saves
    how: str = ""
    """It ends; empty: training is over."""
    kills: tuple[str, ...] = ()
    """As in ``job_killer.py``."""
    lost: frozenset[int] = frozenset()
    """Workers that are lost while it goes on."""
    returns: tuple[int, ...] = ()
    """Iterations of the checkpoints that survivors go back to."""
    controller: tuple[str, ...] = ()
    """Moments at which the controller is killed, as in ``controller_killer.py``."""

    @property
    def goes_on_from(self) -> int:
        """Iteration of the checkpoint that it leaves."""
        if self.how in ("", EXIT):
            return self.end
        return self.saves.newest(self.begin, self.end - 1 if self.how.startswith(SAVING) else self.end)

    @property
    def flags(self) -> tuple[str, ...]:
        """Beside the job's and ``--save``."""
        flags = ["--ckpt-format=torch_dist", f"--save-interval={self.saves.every}"]
        return (*flags, *([f"--exit-interval={self.end}"] if self.how == EXIT else []))

    def __str__(self) -> str:
        told = [str(self.case), *(f"kill '{text}'" for text in self.kills)]
        told += [f"controller killed at {moment}" for moment in self.controller]
        told += [f"back to the checkpoint of {iteration}" for iteration in self.returns]
        told += [f"no save of {', '.join(map(str, sorted(self.saves.failing)))}"] if self.saves.failing else []
        return f"iterations {self.begin + 1} to {self.end} ({self.how or 'done'}): {'; '.join(told)}"


@dataclass(kw_only=True)
class _Draft:
    """A life that is being drawn."""

    outlook: Outlook
    begin: int
    saves: Saves
    faults: list[Fault] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    kills: list[str] = field(default_factory=list)
    controller: list[str] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    returns: list[int] = field(default_factory=list)

    def saved(self, step: int) -> int:
        """Iteration of the checkpoint that is there before a step; 0: none."""
        return self.saves.newest(self.begin, step)

    def add(self, event: Event) -> None:
        """It happens."""
        faults, asked, self.outlook = event
        self.faults += faults
        self.asked += asked
        self.lost |= {fault.worker for fault in faults}


def draw_lives(seed: int) -> tuple[Life, ...]:
    """The lives of that seed."""
    rng = random.Random(f"lives {seed}")
    job = draw_job(seed)
    saves = Saves(every=rng.choice((3, 4)), failing=frozenset())
    number = rng.choice((2, 2, 3))
    lives: list[Life] = []
    for last in (*(False for _ in range(number - 1)), True):
        life = _draw_life(rng, job if not lives else _other_grid(rng, job), lives[-1:], saves, last=last)
        lives.append(life)
        saves = life.saves
    steps = lives[-1].end
    return tuple(
        replace(each, case=replace(each.case, seed=seed, job=replace(each.case.job, steps=steps))) for each in lives
    )


def calm_case(lives: Sequence[Life]) -> Case:
    """The same job, started once, on the first grid; nothing happens to it, and nothing is saved."""
    return undisturbed(lives[0].case)


def _other_grid(rng: random.Random, job: Job) -> Job:
    """The same model, batch and lanes; other stages and rows, if there are any."""
    size, total = micro_batch_size(job), sum(job.layers)
    grids = [
        (stages, data)
        for _, stages, data in [*GRIDS, (0, 4, 1), (0, 4, 2)]
        if stages <= total and not job.batch % (size * data) and job.tensor * stages * data <= MOST_WORKERS
    ]
    stages, data = rng.choice(sorted(set(grids)))
    cuts = [0, *sorted(rng.sample(range(1, total), stages - 1)), total]
    layers = tuple(stop - start for start, stop in pairwise(cuts))
    return replace(job, layers=layers, data=data, per_row=job.batch // data)


def _draw_life(rng: random.Random, job: Job, before: Sequence[Life], saves: Saves, *, last: bool) -> Life:
    begin = before[0].goes_on_from if before else 0
    draft = _Draft(outlook=Outlook(job), begin=begin, saves=saves)
    step = begin + (rng.choice((0, 0, 1)) if begin else FIRST)
    for number in range(rng.choice((1, 2))):
        if not any(rng.choice(_KINDS if number else _FIRST_KINDS)(rng, draft, step) for _ in range(TRIES)):
            break
        step += APART - rng.randrange(2)
    end = max(step, saves.every + 1) + CALM - rng.randrange(3)
    how = "" if last else _draw_end(rng, draft)
    apart = saves.every if how.startswith(SAVING) else 1
    end += -end % apart
    while end in draft.saves.failing:
        end += apart
    kills = [*draft.kills, *([f"{end - how.startswith(SAVING)} {how}"] if how not in ("", EXIT) else [])]
    faults = tuple(map(str, draft.faults))
    return Life(
        case=Case(seed=0, job=job, faults=faults, asked=tuple(draft.asked)), begin=begin, end=end, saves=draft.saves,
        how=how, kills=tuple(kills), lost=frozenset(draft.lost), returns=tuple(draft.returns),
        controller=tuple(draft.controller),
    )  # fmt: skip


def _draw_end(rng: random.Random, draft: _Draft) -> str:
    signals = ("SIGKILL", "SIGTERM")
    left = sorted(set(range(draft.outlook.job.workers)) - draft.lost)
    kinds = [EXIT, f"{LAUNCHER} {rng.choice(signals)}", f"{SAVING} {rng.choice(signals)}"]
    return rng.choice([*kinds, f"{WORKERS} {','.join(map(str, left))}"])


# ---------------------------------------------------------------- events; each tells whether it could be had


def _as_ever(rng: random.Random, draft: _Draft, step: int) -> bool:
    return _had(draft, rng.choice(EVENT_KINDS)(rng, draft.outlook, step))


def _loss_or_move(rng: random.Random, draft: _Draft, step: int) -> bool:
    return _had(draft, rng.choice(LOSSES)(rng, draft.outlook, step))


def _had(draft: _Draft, event: Event | None) -> bool:
    if event is not None:
        draft.add(event)
    return event is not None


def _lose_one_in_a_save(rng: random.Random, draft: _Draft, step: int) -> bool:
    worker = rng.choice(sorted(draft.outlook.seated))
    after = draft.outlook.without([worker])
    at = step + -(step + 1) % draft.saves.every
    if after is None or at + 1 in draft.saves.failing:
        return False
    kind = rng.choice((FaultKind.KILL, FaultKind.EXIT))  # an exception in a save loses nobody
    fault = Fault(kind=kind, worker=worker, step=at, phase=FaultPhase.SAVE, microbatch=rng.choice((None, 0)))
    draft.add(([fault], [], after))
    return True


def _fail_a_save(rng: random.Random, draft: _Draft, step: int) -> bool:
    """There is a checkpoint before it, so a life can go on from that."""
    iteration = step + 1 + -(step + 1) % draft.saves.every
    if not draft.saved(iteration - 1):
        return False
    draft.saves = replace(draft.saves, failing=draft.saves.failing | {iteration})
    return True


def _lose_one_and_its_backup(rng: random.Random, draft: _Draft, step: int) -> bool:
    """One after the other, the second in the recovery from the first, before it has given anything away."""
    saved, outlook = draft.saved(step), draft.outlook
    if not saved or not outlook.pairs:
        return False
    first, second = rng.choice(sorted(outlook.pairs))
    between, after = outlook.without([first]), outlook.without([first, second], saved=True)
    if between is None or after is None or second not in between.seated:
        return False
    faults = [strike(rng, first, step, rng.choice((FaultPhase.FORWARD, FaultPhase.BACKWARD)))]
    draft.add(([*faults, strike(rng, second, step, FaultPhase.RECOVERY)], [], after))
    draft.returns.append(saved)
    return True


def _lose_many(rng: random.Random, draft: _Draft, step: int) -> bool:
    """At once; an owner and its backup are among them."""
    saved, outlook = draft.saved(step), draft.outlook
    if not saved or not outlook.pairs:
        return False
    pair = rng.choice(sorted(outlook.pairs))
    lost = {*pair, *(worker for worker in outlook.seated if rng.random() < 0.5)}
    after = outlook.without(sorted(lost), saved=True)
    if after is None:
        return False
    draft.kills.append(f"{step} workers {','.join(map(str, sorted(lost)))}")
    draft.lost |= lost
    draft.returns.append(saved)
    draft.outlook = after
    return True


def _kill_the_controller(rng: random.Random, draft: _Draft, step: int) -> bool:
    """And something happens two steps later."""
    moment = f"{rng.choice(sorted(draft.outlook.seated))}@{step}"
    happens = _loss_or_move(rng, draft, step + 2)
    draft.controller += [moment] if happens else []
    return happens


def _kill_the_controller_in_a_recovery(rng: random.Random, draft: _Draft, step: int) -> bool:
    """The first worker tells it when; it is there, and nobody has been lost yet."""
    worker = rng.choice(sorted(draft.outlook.seated))
    after = draft.outlook.without([worker])
    if worker == 0 or after is None or draft.lost:
        return False
    draft.controller.append(rng.choice(("settling", "resuming")))
    draft.add(([strike(rng, worker, step, rng.choice(phases_of_a_step(draft.outlook.job)))], [], after))
    return True


_FIRST_KINDS = (
    *(_loss_or_move, _loss_or_move, _loss_or_move),
    *(_lose_one_and_its_backup, _lose_many, _lose_one_in_a_save, _kill_the_controller_in_a_recovery),
)
_KINDS = (
    *(_as_ever, _as_ever, _as_ever, _as_ever),
    *(_lose_one_and_its_backup, _lose_many, _lose_one_in_a_save, _fail_a_save, _kill_the_controller),
)
