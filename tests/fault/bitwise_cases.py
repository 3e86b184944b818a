"""Random jobs at ``--elastic-consistency bitwise``, and what happens to them; a case follows from its seed alone.

Grids of up to eight workers, models and features are drawn, and up to three events at steps apart: the loss of a
worker in any phase of a step, the loss of two, the second in the recovery from the first; layers that move; a loss on
the way of layers; workers that are drained. ``improve`` and ``replan`` say who has a seat after each, so that a fault
strikes somebody who comes to its place.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron_elas.planner.improve import improve
from megatron_elas.planner.plan import initial_plan, replan
from megatron_elas.spec.errors import NoFeasiblePlan
from megatron_elas.spec.faults import (
    MIGRATION_PHASES,
    PHASES_WITH_MICROBATCH,
    RECOVERY_PHASES,
    Fault,
    FaultKind,
    FaultPhase,
)
from megatron_elas.spec.plan import ElasticPlan
from tests.fault.migrations import Job
from tests.fault.settings import RECOMPUTE

GRIDS = (
    (1, 1, 2),
    (1, 1, 3),
    (1, 2, 1),
    (1, 2, 2),
    (1, 2, 3),
    (1, 3, 1),
    (1, 3, 2),
    (2, 1, 2),
    (2, 2, 1),
    (2, 2, 2),
    (2, 1, 3),
    (2, 3, 1),
)
"""Lanes, stages, rows."""
DROPOUT = ("--attention-dropout=0.1", "--hidden-dropout=0.1")
PRECISIONS = (
    (),
    (),
    ("--bf16",),
    ("--bf16",),
    ("--fp16", "--accumulate-allreduce-grads-in-fp32", "--initial-loss-scale=360448", "--loss-scale-window=4"),
)
"""The last has overflows, and scales that grow."""
EVERY = 5
"""Steps from one evaluation to the next."""
EVALUATIONS = ("--split=90,10,0", f"--eval-interval={EVERY}", "--eval-iters=2")
MASKED = ("--data-path=DOCUMENTS", "--split=90,10,0", "--eod-mask-loss")
"""Micro-batches have different numbers of tokens that count; the test puts the path in."""
FIRST, APART, EVENTS = 2, 6, 3
"""Step of the first event, steps from one to the next (or up to two less), most events."""
STEPS = FIRST + APART * EVENTS + 2
KINDS = (FaultKind.KILL, FaultKind.EXIT, FaultKind.EXCEPTION)
"""That are noticed at once."""
STEP_PHASES = tuple(
    phase
    for phase in FaultPhase
    if phase not in (*RECOVERY_PHASES, *MIGRATION_PHASES, FaultPhase.SAVE, FaultPhase.EVALUATE)
)
OF_UPDATES = (FaultPhase.NORM, FaultPhase.OPTIMIZER, FaultPhase.GATHER)
RECOVERING = (FaultPhase.RECOVERY_QUIESCE, FaultPhase.RECOVERY, FaultPhase.RECOVERY_RESTORE, FaultPhase.RECOVERY_VERIFY)
TRIES = 50


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job, and what happens to it."""

    seed: int
    job: Job
    faults: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    """As in ``asker.py``."""

    def __str__(self) -> str:
        job = self.job
        grid = f"tp{job.tensor} layers {'|'.join(map(str, job.layers))} dp{job.data}, batch {job.batch}"
        model = f"{'llama' if job.llama else 'gpt'}{' tied' if job.tied else ''} clip={job.clip:g}"
        happens = [f"--elastic-inject {fault}" for fault in self.faults] + [f"ask '{text}'" for text in self.asked]
        flags = " ".join((*job.data_flags, *job.more))
        return f"seed {self.seed}: {grid}, {model} {flags}: {', '.join(happens) or 'nothing happens'}"


def draw_job(seed: int) -> Job:
    """The features that change arithmetic take turns, each with a period of its own; the others are drawn.

    Tied embeddings: every second. fp32, fp32, bf16, bf16, fp16. Recomputation: none, full, selective. Every fourth a
    GPT. Documents that are masked at their ends: every third; a loss per token: every sixth, of these every second.
    """
    rng = random.Random(f"job {seed}")
    tensor, stages, data = GRIDS[(seed * 5) % len(GRIDS)]
    layers = tuple(rng.randint(1, 3) for _ in range(stages))
    micro_batch = rng.choice((1, 1, 2))
    more = ["--elastic-consistency=bitwise", *DROPOUT, f"--micro-batch-size={micro_batch}", *PRECISIONS[seed % 5]]
    more += [(), RECOMPUTE, ("--recompute-granularity=selective",)][seed % 3]
    more += ["--sequence-parallel"] if tensor > 1 and rng.random() < 0.5 else []
    more += ["--overlap-grad-reduce", "--overlap-param-gather"] if rng.random() < 0.5 else []
    more += ["--log-num-zeros-in-grad", "--log-params-norm"] if rng.random() < 0.3 else []
    more += ["--calculate-per-token-loss"] if seed % 6 in (1, 2) else []
    more += EVALUATIONS if rng.random() < 0.5 else []
    return Job(
        layers=layers if sum(layers) > 1 else (2,), data=data, tensor=tensor, steps=STEPS, llama=seed % 4 != 3,
        tied=seed % 2 == 0, clip=rng.choice((0.0, 1.0, 0.1)), per_row=micro_batch * rng.choice((2, 3)),
        data_flags=MASKED if seed % 3 == 1 else ("--mock-data",), more=tuple(more),
    )  # fmt: skip


class Outlook:
    """What the job has come to, as the planner says."""

    def __init__(self, job: Job, plan: ElasticPlan | None = None) -> None:
        spec, self._costs = job.planning
        size = micro_batch_size(job)
        self._spec = replace(spec, consistency="bitwise", micro_batch_size=size, num_microbatches=job.batch // size)
        self.job = job
        self.plan = plan or initial_plan(self._spec, {}, self._costs)
        self.pairs = set(self.plan.backups)
        """(worker, who keeps its copy), whether or not layers have moved yet."""
        better = improve(self._spec, self.plan, self.plan.epoch + 1, {}, self._costs) if plan else None
        self.stages = {self.plan.placement.num_stages}
        """How many there may be: layers, and with them cells, move after a loss, a few steps later."""
        self.seated = set(self.plan.placement.workers)
        if better is not None:
            self.stages.add(better.placement.num_stages)
            self.seated &= set(better.placement.workers)
            self.pairs &= set(better.backups)
            self.plan = better

    def without(self, workers: Collection[int], *, saved: bool = False) -> Outlook | None:
        """After they are lost, or drained; None where the job cannot go on, with a checkpoint if it has ``saved``."""
        backups = set(self.plan.backups)
        if not saved and any((one, other) in backups for one in workers for other in workers):
            return None
        try:
            return Outlook(self.job, replan(self._spec, self.plan, workers, self.plan.epoch + 1, {}, self._costs))
        except NoFeasiblePlan:
            return None

    @property
    def cells(self) -> list[tuple[int, ...]]:
        """Workers of every cell."""
        return [cell.workers for cells in self.plan.placement.stages for cell in cells]


Event = tuple[list[Fault], list[str], Outlook]


def draw_case(seed: int) -> Case:
    """The case of that seed."""
    job = draw_job(seed)
    rng = random.Random(f"events {seed}")
    outlook = Outlook(job)
    faults: list[Fault] = []
    asked: list[str] = []
    step = FIRST
    for number in range(EVENTS):
        kinds = EVENT_KINDS if number else LOSSES  # a drain leaves little to lose
        drawn = (rng.choice(kinds)(rng, outlook, step) for _ in range(TRIES))
        event = next((event for event in drawn if event is not None), None)
        if event is None:  # nothing more can happen to what is left
            break
        faults += event[0]
        asked += event[1]
        outlook = event[2]
        step += APART - rng.randrange(3)
    return Case(seed=seed, job=job, faults=tuple(map(str, faults)), asked=tuple(asked))


def undisturbed(case: Case) -> Case:
    """The same job, and nothing happens to it."""
    return replace(case, faults=(), asked=())


def micro_batch_size(job: Job) -> int:
    """Samples."""
    (flag,) = (flag for flag in job.more if flag.startswith("--micro-batch-size="))
    return int(flag.partition("=")[2])


# ---------------------------------------------------------------- events


def phases_of_a_step(job: Job) -> tuple[FaultPhase, ...]:
    """Of a step; a fault may come to be in one whose update is left out."""
    return tuple(phase for phase in STEP_PHASES if "--fp16" not in job.more or phase not in OF_UPDATES)


def _lose_one(rng: random.Random, outlook: Outlook, step: int) -> Event | None:
    worker, phase = rng.choice(sorted(outlook.seated)), rng.choice(phases_of_a_step(outlook.job))
    if "--eval-iters=2" in outlook.job.more and rng.random() < 0.3:
        step, phase = step + EVERY - 1 - step % EVERY, FaultPhase.EVALUATE
    after = outlook.without([worker])
    return None if after is None else ([strike(rng, worker, step, phase)], [], after)


def _lose_two(rng: random.Random, outlook: Outlook, step: int) -> Event | None:
    """The second in the recovery from the first."""
    first, second = rng.sample(sorted(outlook.seated), 2) if len(outlook.seated) > 2 else (-1, -1)
    between = outlook.without([first]) if first >= 0 else None
    after = outlook.without([first, second]) if first >= 0 else None
    if between is None or after is None or second not in between.seated:
        return None
    faults = [strike(rng, first, step, rng.choice(phases_of_a_step(outlook.job)))]
    return [*faults, strike(rng, second, step, rng.choice(RECOVERING))], [], after


def _move_layers(rng: random.Random, outlook: Outlook, step: int) -> Event | None:
    layers = _other_layers(rng, outlook)
    return None if layers is None else ([], [f"{step} rebalance {_join(layers)}"], outlook)


def _lose_one_on_the_way(rng: random.Random, outlook: Outlook, step: int) -> Event | None:
    """Layers move, and back: one of both changes something, whatever was in force."""
    layers, others = _other_layers(rng, outlook), _other_layers(rng, outlook)
    worker = rng.choice(sorted(outlook.seated))
    after = outlook.without([worker])
    if layers is None or others is None or layers == others or after is None:
        return None
    fault = strike(rng, worker, step, rng.choice(MIGRATION_PHASES))
    return [fault], [f"{step} rebalance {_join(layers)}", f"{step} rebalance {_join(others)}"], after


def _drain(rng: random.Random, outlook: Outlook, step: int) -> Event | None:
    cell = rng.choice(outlook.cells)
    after = outlook.without(cell)
    return None if after is None else ([], [f"{step} drain {' '.join(map(str, cell))}"], after)


LOSSES = (_lose_one, _lose_two, _move_layers, _lose_one_on_the_way, _lose_one_on_the_way)
EVENT_KINDS = (*LOSSES, _lose_one, _drain)


def strike(rng: random.Random, worker: int, step: int, phase: FaultPhase) -> Fault:
    number = 0 if phase in PHASES_WITH_MICROBATCH else None
    return Fault(kind=rng.choice(KINDS), worker=worker, step=step, phase=phase, microbatch=number)


def _other_layers(rng: random.Random, outlook: Outlook) -> tuple[int, ...] | None:
    """Of every stage, at least one each; None where the number of stages is not known, or is 1."""
    (stages, *unsure), total = sorted(outlook.stages), sum(outlook.job.layers)
    if unsure or stages == 1 or total == stages:
        return None
    cuts = [0, *sorted(rng.sample(range(1, total), stages - 1)), total]
    return tuple(stop - start for start, stop in pairwise(cuts))


def _join(layers: Sequence[int]) -> str:
    return ",".join(map(str, layers))
