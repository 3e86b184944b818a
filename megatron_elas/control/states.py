"""States of the controller, as types.

::

    Gathering --all joined, plan made--> Running --a worker is lost--> Settling --all settled--> Resuming
        |                                   ^                            ^  |                       |   |
        |                                   +----------------------------|--|--- all recovered -----+   |
        |                                                                +--+---- another is lost ------+
        +-------- cannot go on, or asked to end (from any state) --> Stopping --workers gone--> Ended

While ``Running``, a better plan may be looked for (``Search``), and all go over to it (``Migration``): nobody stops for
that, so it is no state of its own. ``Ended`` is terminal. A job whose workers never join (no ``Hello``) stays in
``Gathering`` until its processes end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from megatron_elas.control.crashes import describe_crash
from megatron_elas.control.launch import Launch
from megatron_elas.control.messages import Crashed, FaultFired, Hello, Migrate, Recover
from megatron_elas.spec.events import ActivityFailed, LossReason, WorkerLost
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.job_profile import JobProfile
from megatron_elas.spec.layout import Placement
from megatron_elas.spec.migration import MigrationReport
from megatron_elas.spec.plan import ElasticPlan, Settlement
from megatron_elas.spec.report import RecoveryReport, SettleReport
from megatron_elas.spec.transaction import Update


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """What is known about the processes, in every state."""

    launch: Launch
    agents: frozenset[int] = frozenset()
    """Nodes whose agent is connected."""
    started: bool = False
    """All nodes joined once, so that their agents were told to start the workers."""
    hellos: Mapping[int, Hello] = field(default_factory=dict)
    """Of the workers that joined."""
    lost: Mapping[int, WorkerLost] = field(default_factory=dict)
    drained: frozenset[int] = frozenset()
    """Workers that have handed over what they had and leave; the others need them no more."""
    finished: frozenset[int] = frozenset()
    exited: Mapping[int, int] = field(default_factory=dict)
    """Exit statuses of the processes that ended; minus the signal number for a signal."""
    faults: Mapping[int, FaultFired] = field(default_factory=dict)
    """The newest scripted fault of each worker."""
    struck: tuple[str, ...] = ()
    """All scripted faults that have struck."""
    injected: tuple[str, ...] = ()
    """Faults that were added while the job ran."""
    steps: int = 0
    """That training has done, once it has reached its end."""
    copies_replaced: int = 0
    """Copies of shards that differed from what their owners used, while training went on."""
    unverified: frozenset[tuple[str, int, bool]] = frozenset()
    """Checks before resuming that failed once, each with the step that was to be run next and whether another try with
    what the survivors hold was possible."""
    crashes: Mapping[int, Crashed] = field(default_factory=dict)
    """Of the workers that said which error they end because of."""
    settled_down: bool = False
    """A migration did not stand its checks, a worker declined one, or workers were lost on the way twice: none is begun
    any more unless somebody asks for it."""
    cut_short: int = 0
    """How many migrations ended with a loss before anybody had gone over."""
    scripted: int = 0
    """How many of ``Launch.rebalances`` were ordered."""

    @property
    def job(self) -> JobSpec | None:
        """What the workers said; they all said the same. None before the first joined."""
        return next(iter(self.hellos.values())).job if self.hellos else None

    @property
    def profile(self) -> JobProfile | None:
        """What the workers said of their model; None where they cannot, or before the first joined."""
        hello = next(iter(self.hellos.values()), None)
        if hello is None or hello.shape is None or hello.training is None:
            return None
        return JobProfile(
            name="job", spec=hello.job, shape=hello.shape, training=hello.training, emulated=hello.emulated
        )

    @property
    def survivors(self) -> tuple[int, ...]:
        """Workers that joined, were neither lost nor drained and have not finished, ascending."""
        return tuple(sorted(self.hellos.keys() - self.lost.keys() - self.drained - self.finished))

    @property
    def remaining(self) -> tuple[int, ...]:
        """Launched processes that were neither lost nor seen to end, ascending."""
        gone = self.lost.keys() | self.exited.keys()
        return tuple(worker for worker in range(self.launch.world_size) if worker not in gone)

    @property
    def watched(self) -> tuple[int, ...]:
        """Those of ``remaining`` that were started and whose agent can still report their end."""
        return tuple(worker for worker in self.remaining if self.started and self.launch.node_of(worker) in self.agents)

    def explain(self, worker: int, detail: str) -> str:
        """How a worker was lost, with the error it named, if it did."""
        return f"{detail}, {describe_crash(self.crashes[worker])}" if worker in self.crashes else detail

    @property
    def unstruck(self) -> tuple[str, ...]:
        """Scripted faults that have not struck, in the order of workers; those that were added later at the end."""
        left = Counter(self.struck)
        waiting = []
        for fault in (*(text for _, hello in sorted(self.hellos.items()) for text in hello.faults), *self.injected):
            if left[fault]:
                left[fault] -= 1
            else:
                waiting.append(fault)
        return tuple(waiting)

    def addresses_of(self, workers: tuple[int, ...]) -> dict[int, str]:
        """Data-plane addresses."""
        return {worker: self.hellos[worker].address for worker in workers}

    @property
    def domains(self) -> dict[int, str]:
        """Failure domain of every worker that joined."""
        return {worker: hello.domain for worker, hello in self.hellos.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """Waiting for workers. The last ``Hello`` asks for the plan, and the plan moves on to ``Running``."""

    roster: Roster
    deadline_s: float | None = None
    """For the last worker to join; counts from the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The planner looks for a plan that is better than the one in force, or lacks some workers, or was asked for."""

    epoch: int
    """Of the plan that it would be."""
    drained: tuple[int, ...] = ()
    """Workers that are to have no part in it, ascending."""
    layers: tuple[int, ...] | None = None
    """Transformer layers that every stage is to have; None: as the planner likes."""
    request: int | None = None
    """Of the tool that waits for the answer; None: nobody waits."""
    wait: bool = True
    """Whether it waits until those who are drained are let go, not only for a plan."""

    @property
    def asked(self) -> bool:
        """Whether somebody has asked for it."""
        return bool(self.drained) or self.layers is not None or self.request is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """All go over to another plan. It is under way until the last worker has reported, or the next epoch begins."""

    before: ElasticPlan
    target: ElasticPlan
    """Those who leave are spares in it."""
    plan_s: float
    in_force_s: float | None = None
    """What a step takes under ``before``, by the costs that the target's ``predicted_s`` is of."""
    leaving: tuple[int, ...] = ()
    """Workers that are drained by it, ascending."""
    request: int | None = None
    """Of the tool that waits until they are let go; None: nobody waits."""
    reports: Mapping[int, MigrationReport] = field(default_factory=dict)
    """The first one proves that all are there."""

    @property
    def epoch(self) -> int:
        """Of the plan that is gone over to."""
        return self.target.epoch

    @property
    def after(self) -> ElasticPlan:
        """The target without those who leave: what is in force once a step was finished under it."""
        placement = self.target.placement
        spares = tuple(worker for worker in placement.spares if worker not in self.leaving)
        return replace(self.target, placement=replace(placement, spares=spares))

    @property
    def arrived(self) -> bool:
        """Whether a step was finished under the new plan."""
        return bool(self.reports)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Training. A loss moves on to ``Settling``; the last process to end moves on to ``Ended``."""

    roster: Roster
    plan: ElasticPlan
    """Every survivor has committed a step under it, or takes part in one that somebody has finished, or it is the first
    one."""
    search: Search | None = None
    migration: Migration | None = None
    declined: int = -1
    """Newest epoch of a plan that a worker would not go over to; -1: none. It is not given to another one."""

    @property
    def epoch(self) -> int:
        """Of the current membership."""
        return self.plan.epoch

    @property
    def epochs(self) -> frozenset[int]:
        """That workers may be in: two while they go over to another plan."""
        return frozenset({self.epoch} if self.migration is None else {self.epoch, self.migration.epoch})

    @property
    def next_epoch(self) -> int:
        """The next one to begin. That of a migration is taken, whether or not anybody has come to it."""
        return max(*self.epochs, self.declined) + 1

    @property
    def migrate(self) -> Migrate:
        """What all with a seat were told when the migration under way began."""
        assert self.migration is not None
        return Migrate(plan=self.migration.target, addresses=self.roster.addresses_of(self.roster.survivors))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """One or more losses that are being recovered from together."""

    began_in: Placement
    """Before the first of them."""
    plans: Mapping[int, ElasticPlan]
    """By epoch: the last one that all had recovered under, and any that was sent out since.

    A worker holds state in the layout of one or two of these.
    """
    losses: tuple[WorkerLost, ...] = ()
    """Since the oldest of ``plans``."""
    failures: tuple[ActivityFailed, ...] = ()
    """What was left out since then. There is a loss, a failure, or a check that failed."""
    commit: Update | None = None
    """What the last settlement said of an open step. Perhaps none of those who heard of it is left."""
    unverified: tuple[str, ...] = ()
    """Sentences of the checks that failed since then."""
    began_s: float | None = None
    """When the first of these failed, where it is what the outage began with."""
    distrusted: bool = False
    """What the survivors hold did not stand the checks: only a checkpoint will do."""
    checkpoint: int | None = None
    """Iteration of the one that the state comes from; None when it comes from the survivors."""

    @property
    def base(self) -> ElasticPlan:
        """The oldest plan; ``losses`` are relative to it."""
        return self.plans[min(self.plans)]

    @property
    def detected_s(self) -> float:
        """When the controller knew of the first."""
        times = [*(loss.at_s for loss in self.losses), *(failure.at_s for failure in self.failures)]
        return min([*times, *([] if self.began_s is None else [self.began_s])])

    @property
    def struck_s(self) -> float:
        """When the first fault struck, where a fault script told, or was noticed."""
        return min([self.detected_s, *(loss.fault_s for loss in self.losses if loss.fault_s is not None)])

    @property
    def lost(self) -> tuple[int, ...]:
        """Ids of the lost workers, ascending."""
        return tuple(sorted(loss.worker for loss in self.losses))

    def with_fault(self, fired: FaultFired) -> Outage:
        """The outage with the time when the worker's fault struck, if it is one of the losses."""
        return self._amend(fired.worker, lambda loss: replace(loss, fault_s=fired.at_s))

    def with_exit(self, worker: int, detail: str) -> Outage:
        """The outage with how the process ended, where only a broken link was known."""
        return self._amend(
            worker,
            lambda loss: (
                replace(loss, detail=f"{loss.detail}; {detail}") if loss.reason is LossReason.UNREACHABLE else loss
            ),
        )

    def with_crash(self, crash: Crashed) -> Outage:
        """The outage with the error that the worker named, if it is one of the losses."""
        return self._amend(crash.worker, lambda loss: replace(loss, detail=f"{loss.detail}, {describe_crash(crash)}"))

    def _amend(self, worker: int, change: Callable[[WorkerLost], WorkerLost]) -> Outage:
        return replace(self, losses=tuple(change(loss) if loss.worker == worker else loss for loss in self.losses))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settling:
    """Survivors unwind to the step boundary while the plan is made.

    The plan and the last report move on to ``Resuming``; another loss to a new ``Settling``; no
    feasible plan, or no whole state, to ``Stopping``.
    """

    roster: Roster
    epoch: int
    outage: Outage
    deadline_s: float
    """For the last report."""
    reports: Mapping[int, SettleReport] = field(default_factory=dict)
    plan: ElasticPlan | None = None
    plan_s: float = 0.0

    @property
    def epochs(self) -> frozenset[int]:
        """The one that begins."""
        return frozenset({self.epoch})

    @property
    def next_epoch(self) -> int:
        """The next one to begin."""
        return self.epoch + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Resuming:
    """Survivors restore and run their first step under the new plan.

    The last ``Recovered`` moves on to ``Running``; a loss, or the deadline, goes back to ``Settling``.
    """

    roster: Roster
    plan: ElasticPlan
    plan_s: float
    settlement: Settlement
    outage: Outage
    deadline_s: float
    """For the last report."""
    reports: Mapping[int, RecoveryReport] = field(default_factory=dict)

    @property
    def epoch(self) -> int:
        """Of the new membership."""
        return self.plan.epoch

    @property
    def epochs(self) -> frozenset[int]:
        """The one that has begun."""
        return frozenset({self.epoch})

    @property
    def next_epoch(self) -> int:
        """The next one to begin."""
        return self.epoch + 1

    @property
    def order(self) -> Recover:
        """What every survivor was told, and is told again if it comes back without it."""
        placement = self.plan.placement
        return Recover(
            plan=self.plan,
            settlement=self.settlement,
            base=self.outage.plans.get(self.settlement.base_epoch),
            addresses=self.roster.addresses_of(tuple(sorted((*placement.workers, *placement.spares)))),
            plan_s=self.plan_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """All agents were told to end their workers; the last one to end moves on to ``Ended``."""

    roster: Roster
    exit_code: int
    sentence: str
    worker: int | None = None
    """Whose output has more."""
    deadline_s: float | None = None
    """For agents that do not answer; counts from the first tick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Terminal."""

    roster: Roster
    exit_code: int
    sentence: str
    worker: int | None = None


State = Gathering | Running | Settling | Resuming | Stopping | Ended
