"""The whole protocol as a value: modelled workers, messages under way, and the real controller, planner and settling.

``World.goes_on`` and ``World.faults`` say what may happen next, ``World.after`` gives the world in which it has
happened, and checks in it what must hold. Nothing is random and nothing has a clock, so a walk through worlds can be
searched or replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache

from megatron_elas.control.commands import Command, ImprovePlan, MakePlan, Tell, TellAgent
from megatron_elas.control.controller import step as control_step
from megatron_elas.control.events import (
    ChangeAsked,
    Event,
    PlanImproved,
    PlanKept,
    PlanMade,
    PlanRefused,
    Tick,
    WorkerSilent,
)
from megatron_elas.control.messages import (
    Drained,
    Finished,
    KillWorker,
    LeaveOut,
    Migrate,
    Migrated,
    PeerUnreachable,
    Quiesce,
    Recover,
    Recovered,
    Settled,
    Stop,
    WorkerExited,
    decode_from_client,
    decode_to_worker,
    encode,
)
from megatron_elas.control.service import make_plan
from megatron_elas.control.states import Ended, Resuming, Running, Settling, State, Stopping
from megatron_elas.planner.plan import replan
from megatron_elas.spec.errors import ElasticError, ExitCode
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.migration import MigrationReport
from megatron_elas.spec.plan import ElasticPlan, Settlement
from megatron_elas.spec.report import RecoveryReport
from megatron_elas.spec.transaction import FOLLOWS, StepPhase, Update
from tests.control.jobs import Director
from tests.control.worker_model import (
    BETWEEN,
    STEP,
    History,
    Mode,
    Place,
    Store,
    Worker,
    advance_ward,
    changed,
    describe,
    find_version,
    finish_open_step,
    keeps_shard,
    replicas_of,
    seated_in,
    settle_report,
    sources_of,
    stop_of,
    wards_of,
)

Action = tuple[str, int, int]
"""Kind, and two numbers: a worker, and what the kind says."""

BETWEEN_PLACES = frozenset({Place.SETTLED, Place.SPARE, Place.FINISHED})
"""Where the main thread waits for the controller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What may happen in a world; fixed."""

    job: JobSpec
    program: tuple[str, ...]
    mode: Mode
    upstream_at_once: bool = False
    """Messages to the controller arrive when they are sent, but for news of deaths; and plans are made in no time."""
    links_break: bool = False
    """Also between living workers."""


class Table:
    """Controller states by number, and what follows from each event: worlds then compare numbers, not states."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._states: list[State] = []
        self._steps: dict[tuple[int, object, float], tuple[int, tuple[Command, ...]]] = {}

    def number(self, state: State) -> int:
        """The number of the state."""
        number = self._numbers.setdefault(repr(state), len(self._states))
        if number == len(self._states):
            self._states.append(state)
        return number

    def state(self, number: int) -> State:
        """The state of the number."""
        return self._states[number]

    def step(self, number: int, key: object, event: Event, now: float) -> tuple[int, tuple[Command, ...]]:
        """What the controller makes of the event."""
        if (number, key, now) not in self._steps:
            state, commands = control_step(self._states[number], event, now)
            self._steps[number, key, now] = self.number(state), tuple(commands)
        return self._steps[number, key, now]


Answer = PlanMade | PlanRefused | PlanImproved | PlanKept
"""Of the planner."""

Post = tuple[int, str, int, int]
"""Epoch, kind, number (step, version or activity) and worker of a contribution."""

Parcel = tuple[Post, tuple[tuple[int, History], ...]]
"""A contribution with shards by owner."""


@dataclass(frozen=True)
class World:
    """A moment."""

    rules: Rules = field(compare=False)
    table: Table = field(compare=False)
    workers: tuple[Worker, ...]
    controller: int
    now: float
    upstream: tuple[str | Answer, ...] = ()
    """Messages on their way to the controller, as text, and answers of the planner; in no order."""
    downstream: tuple[tuple[int, str], ...] = ()
    """Messages on their way, by worker; of one worker the oldest first."""
    posts: frozenset[Post] = frozenset()
    parcels: frozenset[Parcel] = frozenset()
    doomed: frozenset[int] = frozenset()
    """Workers whose agents were told to kill them."""
    settled_on: tuple[int, int, int] | None = None
    """Base epoch, resume step and committed step (-1: none) of the last settlement of this outage."""

    # ------------------------------------------------------------ views

    @property
    def state(self) -> State:
        """The controller's."""
        return self.table.state(self.controller)

    @property
    def over(self) -> bool:
        """Nothing that matters happens any more: the job ends, or has been done."""
        return isinstance(self.state, Stopping | Ended) or bool(self.state.roster.finished)

    @property
    def living(self) -> tuple[Worker, ...]:
        """Processes that run and are not lost."""
        survivors = self.state.roster.survivors
        return tuple(worker for worker in self.workers if worker.alive and worker.me in survivors)

    def have_posted(self, kind: str, number: int, epoch: int, workers: Iterable[int]) -> bool:
        """Whether all of them have contributed."""
        return all((epoch, kind, number, worker) in self.posts for worker in workers)

    def parcel(self, kind: str, number: int, epoch: int, owner: int) -> History | None:
        """The owner's shard, if somebody has sent it."""
        for (in_epoch, of_kind, of_number, _), shards in self.parcels:
            if (in_epoch, of_kind, of_number) == (epoch, kind, number):
                for of_owner, history in shards:
                    if of_owner == owner:
                        return history
        return None

    # ------------------------------------------------------------ what may happen

    def _possible(self) -> list[tuple[Action, World | None]]:
        """Everything that may happen by itself, with the world after it where that had to be found out."""
        if self.over:
            return []
        found: list[tuple[Action, World | None]] = []
        for worker in self.workers:
            if worker.alive:
                me = worker.me
                ahead = self._advance(worker)
                if ahead is not None:
                    found.append((("advance", me, 0), ahead._checked(self)))
                if worker.quiesced > max(worker.epoch, worker.settling) and worker.place is not Place.FINISHED:
                    found.append((("unwind", me, 0), None))
                found += [(("follow", me, ward), None) for ward in worker.following]
                found += [(("arrive", me, ward), None) for ward in self._arriving(worker)]
        found += [(("hear", me, 0), None) for me in sorted({me for me, _ in self.downstream})]
        found += [(("tell", index, 0), None) for index in range(len(self.upstream))]
        found += [(("fence", me, 0), None) for me in sorted(self.doomed)]
        return found

    def goes_on(self) -> list[tuple[Action, World]]:
        """Everything that may happen by itself, and the worlds in which it has; faults are extra."""
        return [(action, after or self.after(action)) for action, after in self._possible()]

    def pick(self, choice: int) -> tuple[Action, World] | None:
        """One of these; None when nothing goes on."""
        found = self._possible()
        if not found:
            return None
        action, after = found[choice % len(found)]
        return action, after or self.after(action)

    def faults(self) -> list[Action]:
        """Kills, and what else may go wrong."""
        if self.over:
            return []
        found: list[Action] = [("kill", worker.me, 0) for worker in self.workers if worker.alive]
        if self.rules.links_break:
            for worker in self.living:
                peers = self.state.roster.survivors
                found += [("break", worker.me, peer) for peer in peers if peer != worker.me]
                found += [("silence", worker.me, 0), ("kill mutely", worker.me, 0)]
                if self._could_fail(worker):
                    found.append(("fail", worker.me, 0))
            if isinstance(self.state, Settling | Resuming):
                found.append(("deadline", 0, 0))
            found += [("repeat", index, 0) for index in range(len(self.upstream))]
            found += [("repeat order", index, 0) for index in range(len(self.downstream))]
        return found

    def changes(self) -> list[Action]:
        """Changes of plan that somebody may ask for."""
        state = self.state
        if self.over or not isinstance(state, Running) or self.rules.job.migration == "off":
            return []
        if state.search is not None or state.migration is not None:
            return []
        return [("rebalance", 0, 0), *(("drain", worker, 0) for worker in seated_in(state.plan))]

    def after(self, action: Action) -> World:
        """The world in which it has happened; AssertionError when that is not allowed to be."""
        kind, first, second = action
        match kind:
            case "unwind":
                world = self._unwind(self.workers[first])
            case "follow":
                world = self._put(_follow(self.workers[first], second))
            case "arrive":
                world = self._arrive(self.workers[first], second)
            case "hear":
                world = self._hear(first)
            case "tell":
                message = self.upstream[first]
                world = changed(self, upstream=self.upstream[:first] + self.upstream[first + 1 :])._tell(message)
            case "kill" | "fence":
                world = self._kill(first)
            case "kill mutely":
                world = self._kill(first, mutely=True)
            case "break":
                world = self._break(first, second)
            case "silence":
                world = self._step(WorkerSilent(worker=first, silent_s=11.0), key=action)
            case "deadline":
                world = self._deadline()
            case "rebalance":
                world = self._step(ChangeAsked(request=1), key=action)
            case "drain":
                world = self._step(ChangeAsked(drained=self._cell_of(first), request=1), key=action)
            case "fail":
                world = self._fail(self.workers[first])
            case "repeat":
                world = changed(self, upstream=(*self.upstream, self.upstream[first]))
            case "repeat order":
                world = changed(
                    self, downstream=tuple(sorted((*self.downstream, self.downstream[first]), key=_receiver))
                )
            case _:
                raise ValueError(kind)
        return world._checked(self)

    def _cell_of(self, worker: int) -> tuple[int, ...]:
        state = self.state
        assert isinstance(state, Running)
        seat = state.plan.placement.seat(worker)
        return state.plan.placement.stages[seat.stage][seat.cell].workers

    # ------------------------------------------------------------ faults

    def _kill(self, me: int, *, mutely: bool = False, status: int = -9) -> World:
        """It is gone, what it had sent is not, unless all that was on its way to the controller is lost as well."""
        victim = self.workers[me]
        upstream = self.upstream
        if mutely:
            upstream = tuple(m for m in upstream if not isinstance(m, str) or _sender(m) != me)
        # What it reported last may still be decided on; the rest of it nobody can know.
        dead = changed(
            Worker(me=me, plan=victim.plan, live=None, stores=(), base_plans=()),
            alive=False,
            stores=victim.stores if victim.place is Place.SETTLED else (),
            base_plans=victim.base_plans if victim.place is Place.SETTLED else (),
            settling=victim.settling,
        )
        world = self._put(dead)
        world = changed(
            world,
            upstream=upstream,
            downstream=tuple(entry for entry in self.downstream if entry[0] != me),
            doomed=self.doomed - {me},
        )
        return world._send(WorkerExited(worker=me, status=status, at_s=0.0), late=True)

    def _break(self, me: int, peer: int) -> World:
        worker = self.workers[me]
        if worker.place in BETWEEN_PLACES or worker.cut:
            return self
        world = self._put(changed(worker, cut=True))
        return world._send(PeerUnreachable(worker=me, epoch=worker.epoch, peer=peer, detail="broke"))

    def _could_fail(self, worker: Worker) -> bool:
        """Whether it is in something between steps that training can do without."""
        activity, program = worker.activity, self.rules.program
        if worker.place is not Place.ENTER or worker.interrupted or activity + 1 == len(program):
            return False
        return program[activity] == BETWEEN and worker.live is not None and worker.lead <= activity > worker.waived

    def _fail(self, worker: Worker) -> World:
        """What it does between steps fails, and is left out."""
        message = LeaveOut(worker=worker.me, epoch=worker.epoch, culprit=worker.me, detail="no space")
        return self._put(changed(worker, waived=worker.activity, cut=True))._send(message)

    def _deadline(self) -> World:
        state = self.state
        assert isinstance(state, Settling | Resuming)
        return changed(self, now=max(self.now, state.deadline_s))._step(Tick(), key="tick")

    # ------------------------------------------------------------ messages

    def _send(self, message: object, *, late: bool = False) -> World:
        text = encode(message)  # type: ignore[arg-type]
        if self.rules.upstream_at_once and not late:
            return self._tell(text)
        return changed(self, upstream=tuple(sorted((*self.upstream, text), key=repr)))

    def _tell(self, message: str | Answer) -> World:
        event = _read_upstream(message) if isinstance(message, str) else message
        return self._step(event, key=message)

    def _step(self, event: Event, key: object) -> World:
        """Let the real controller act."""
        before = self.state
        number, commands = self.table.step(self.controller, key, event, self.now)
        world = changed(self, controller=number)
        training = [state for state in (before, world.state) if isinstance(state, Running | Settling | Resuming)]
        epochs = [state.epoch for state in training if not state.roster.finished]  # after the end none begins
        assert epochs == sorted(epochs), f"an epoch went back: {epochs}"
        if isinstance(world.state, Running) and not isinstance(before, Running):
            world = changed(world, settled_on=None)
        if isinstance(world.state, Stopping) and not isinstance(before, Stopping | Ended):
            self._check_end(before, world.state)
        for command in commands:
            match command:
                case Tell(workers=workers, message=message):
                    if isinstance(message, Recover):
                        world = world._check_settlement(before, message)
                    leaves = isinstance(message, Stop) and set(workers) <= world.state.roster.drained
                    if isinstance(message, Quiesce | Recover | Migrate) or leaves:
                        text = encode(message)
                        orders = tuple((me, text) for me in workers if self.workers[me].alive)
                        world = changed(world, downstream=tuple(sorted((*world.downstream, *orders), key=_receiver)))
                case TellAgent(message=KillWorker(worker=victim)):
                    if self.workers[victim].alive:
                        world = changed(world, doomed=world.doomed | {victim})
                case MakePlan() | ImprovePlan():
                    answer = _ask_planner(command)
                    if self.rules.upstream_at_once:
                        world = world._tell(answer)
                    else:
                        world = changed(world, upstream=(*world.upstream, answer))
                case _:
                    pass
        return world

    def _hear(self, me: int) -> World:
        """The worker's link thread reads one message."""
        index = next(i for i, (to, _) in enumerate(self.downstream) if to == me)
        text, worker = self.downstream[index][1], self.workers[me]
        message = _read_downstream(text)
        downstream = self.downstream[:index] + self.downstream[index + 1 :]
        if isinstance(message, Stop):
            return changed(self, downstream=downstream)._kill(me, status=0)
        if isinstance(message, Migrate):
            worker = changed(worker, migrate=text)
        elif isinstance(message, Quiesce):
            worker = changed(worker, quiesced=max(worker.quiesced, message.epoch))
        else:
            worker = changed(worker, order=text)
        return changed(self, downstream=downstream)._put(worker)

    # ------------------------------------------------------------ workers

    def _put(self, worker: Worker) -> World:
        workers = tuple(worker if other.me == worker.me else other for other in self.workers)
        return changed(self, workers=workers)

    def _post(self, worker: Worker, kind: str, number: int) -> World:
        post = (worker.epoch, kind, number, worker.me)
        return changed(self, posts=self.posts | {post})

    def _parcel(self, worker: Worker, kind: str, number: int, shards: Iterable[tuple[int, History]]) -> World:
        post = (worker.epoch, kind, number, worker.me)
        return changed(self, parcels=self.parcels | {(post, tuple(shards))})

    def _advance(self, worker: Worker) -> World | None:
        """The main thread's next stretch, or None when it waits."""
        place = worker.place
        if place is Place.APPLY:
            return self._apply(worker)
        if place is Place.SETTLED:
            order = None if worker.order is None else _read_downstream(worker.order)
            if isinstance(order, Recover) and order.plan.epoch == worker.settling == worker.quiesced:
                return self._adopt(worker, order)
            return None
        if worker.interrupted or place in BETWEEN_PLACES:
            return None
        return _STRETCHES[place](self, worker)

    def _go_on(self, worker: Worker) -> World | None:
        """Run steps until the activity's version is there, then end the activity."""
        program, activity = self.rules.program, worker.activity
        assert worker.live is not None
        if len(worker.live) < stop_of(program, activity):
            return self._begin_step(worker)
        if program[activity] == STEP:
            step = stop_of(program, activity) - 1
            assert worker.outcome == step or worker.idled, f"worker {worker.me} has no result of step {step}"
            if self.rules.mode is Mode.REPLAY:
                before = worker.counted
                assert worker.live[: len(before)] == before, f"worker {worker.me} counted {before}, has {worker.live}"
            left = changed(worker, counted=worker.live, activity=activity + 1, place=Place.ENTER)
            return self._put(left)
        world = self
        if worker.owes_report:
            world, worker = self._report_recovery(worker)
        if worker.lead > activity:  # others have left its barrier
            assert worker.done or worker.idled, f"worker {worker.me} has not done what others have left"
            return world._leave_barrier(worker)
        worker = changed(worker, done=True, place=Place.BARRIER)
        verdict = "waived" if worker.waived >= activity else "whole"
        world = world._post(worker, verdict, activity)
        return world._post(worker, "barrier", activity)._put(worker)

    def _report_recovery(self, worker: Worker) -> tuple[World, Worker]:
        worker = changed(worker, owes_report=False)
        if worker.crossing:
            worker, step = changed(worker, crossing=False), len(worker.live or ()) - 1
            crossed = MigrationReport(worker=worker.me, epoch=worker.epoch, step=step)
            return self._put(worker)._send(Migrated(report=crossed)), worker
        report = RecoveryReport(worker=worker.me, epoch=worker.epoch, resume_step=len(worker.live or ()))
        return self._put(worker)._send(Recovered(report=report)), worker

    def _begin_step(self, worker: Worker) -> World | None:
        assert worker.live is not None
        if worker.due:
            return self._cross(worker)
        step, store = len(worker.live), changed(worker.store, ready=None)
        copied = find_version(store.kept, step) is not None
        wards = wards_of(worker.plan, worker.me)
        if self.rules.mode is Mode.COPY:
            needed = not copied
        else:
            needed = store.update is None and not copied and bool(wards or worker.plan.backups_of(worker.me))
        world = self
        if needed:
            store = changed(store, kept=(*store.kept, worker.live)[-2:])
            for ward in wards:  # the buffer of the version before last is filled anew
                left = tuple(copy for copy in store.ward(ward) if len(copy) > step - 2)
                store = store.with_ward(ward, left)
            worker = changed(worker, receiving=step if wards else None)
            world = self._parcel(worker, "copy", step, [(worker.me, worker.live)])
        worker = worker.with_store(worker.epoch, store)
        if not worker.copied:
            return world._put(changed(worker, place=Place.SEED))
        return world._compute(worker)

    def _compute(self, worker: Worker) -> World:
        assert worker.live is not None
        step = len(worker.live)
        worker = changed(worker, place=Place.COMPUTE, phase=StepPhase.COMPUTE, running=step)
        return self._post(worker, "compute", step)._put(worker)

    def _seed(self, worker: Worker) -> World | None:
        if worker.receiving is not None:
            return None
        assert worker.live is not None
        worker = changed(worker, place=Place.SEEDED)
        return self._post(worker, "seeded", len(worker.live))._put(worker)

    def _seeded(self, worker: Worker) -> World | None:
        assert worker.live is not None
        if not self.have_posted("seeded", len(worker.live), worker.epoch, seated_in(worker.plan)):
            return None
        return self._compute(changed(worker, copied=True))

    def _arriving(self, worker: Worker) -> list[int]:
        """Wards whose whole copies can come in now."""
        if worker.receiving is None or worker.interrupted:
            return []
        return [
            ward
            for ward in wards_of(worker.plan, worker.me)
            if find_version(worker.store.ward(ward), worker.receiving) is None
            and self.parcel("copy", worker.receiving, worker.epoch, ward) is not None
        ]

    def _arrive(self, worker: Worker, ward: int) -> World:
        assert worker.receiving is not None
        version = worker.receiving
        copy = self.parcel("copy", version, worker.epoch, ward)
        assert copy is not None
        store = worker.store.with_ward(ward, (*worker.store.ward(ward), copy))
        missing = [w for w in wards_of(worker.plan, worker.me) if find_version(store.ward(w), version) is None]
        worker = changed(worker.with_store(worker.epoch, store), receiving=version if missing else None)
        return self._put(worker)

    def _reduce(self, worker: Worker) -> World | None:
        """Gradients are reduced: they go to the backups."""
        step = worker.running
        assert step is not None
        if worker.following or worker.receiving is not None:
            return None
        if not self.have_posted("compute", step, worker.epoch, replicas_of(worker.plan, worker.me)):
            return None
        worker = _enter(worker, StepPhase.REDUCE)
        if _known_target(worker) is not None:
            self = self._post(worker, "ballot", step)
        if self.rules.mode is Mode.COPY:
            worker = changed(worker, place=Place.NORM)
            return self._post(worker, "norm", step)._put(worker)
        store = changed(worker.store, ready=None).with_gradient(worker.me, (step, worker.epoch))
        worker = changed(worker.with_store(worker.epoch, store), place=Place.DUTY)
        return self._post(worker, "gradient", step)._put(worker)

    def _duty(self, worker: Worker) -> World | None:
        """The wards' gradients come in: now the worker may join the norm."""
        step, wards = worker.running, wards_of(worker.plan, worker.me)
        assert step is not None
        if not self.have_posted("gradient", step, worker.epoch, wards):
            return None
        store = changed(worker.store, ready=step)
        for ward in wards:
            store = store.with_gradient(ward, (step, worker.epoch))
        worker = changed(worker.with_store(worker.epoch, store), place=Place.NORM)
        return self._post(worker, "norm", step)._put(worker)

    def _norm(self, worker: Worker) -> World | None:
        """PREPARED, and on to the optimizer."""
        step = worker.running
        assert step is not None
        if not self.have_posted("norm", step, worker.epoch, seated_in(worker.plan)):
            return None
        store = changed(worker.store, update=Update.of(step, norm=float(worker.epoch)))
        worker = _enter(_enter(worker, StepPhase.PREPARED), StepPhase.APPLY)
        assert worker.live is not None
        if self.have_posted("ballot", step, worker.epoch, seated_in(worker.plan)):
            target = _known_target(worker)
            assert target is not None, f"worker {worker.me} agreed to what it does not know"
            worker = changed(worker, due=target.plan.epoch)
        if self.rules.mode is Mode.COPY:
            worker = changed(worker, working=worker.live, live=None)
        else:
            worker = changed(worker, working=worker.live, following=wards_of(worker.plan, worker.me))
        return self._put(changed(worker.with_store(worker.epoch, store), place=Place.APPLY))

    def _apply(self, worker: Worker) -> World:
        """The optimizer; it waits for nobody, so that it ends also when the epoch has."""
        step = worker.running
        assert step is not None
        gradient = (step, worker.epoch)
        if self.rules.mode is Mode.REPLAY:
            assert dict(worker.store.gradients)[worker.me] == gradient
        worker = changed(_enter(worker, StepPhase.SYNC), live=(*worker.working, gradient), place=Place.SYNC, working=())
        return self._post(worker, "applied", step)._put(worker)

    def _sync(self, worker: Worker) -> World | None:
        """Parameters are gathered; the step's body returns."""
        step = worker.running
        assert step is not None
        if not self.have_posted("applied", step, worker.epoch, replicas_of(worker.plan, worker.me)):
            return None
        worker = changed(_enter(worker, StepPhase.COMPUTE), running=None, outcome=step).keeping([worker.epoch])
        if self.rules.mode is Mode.REPLAY:
            worker = worker.with_store(worker.epoch, changed(worker.store, kept=()))
        world: World = self
        if worker.owes_report:
            world, worker = self._report_recovery(worker)
        return world._go_on(worker)

    def _barrier(self, worker: Worker) -> World | None:
        if not self.have_posted("barrier", worker.activity, worker.epoch, seated_in(worker.plan)):
            return None
        verdicts = {kind for epoch, kind, number, _ in self.posts if (epoch, number) == (worker.epoch, worker.activity)}
        assert not verdicts >= {"waived", "whole"}, "some have left out what others have done"
        return self._leave_barrier(worker)

    def _leave_barrier(self, worker: Worker) -> World:
        ended = worker.activity + 1 == len(self.rules.program)
        worker = changed(
            worker, activity=worker.activity + 1, done=False, place=Place.FINISHED if ended else Place.ENTER
        )
        world = self._put(worker)
        if not ended:
            return world
        assert worker.live is not None and [step for step, _ in worker.live] == list(range(len(worker.live)))
        assert len(worker.live) == self.rules.program.count(STEP), f"finished with {worker.live}"
        return world._send(Finished(worker=worker.me))

    # ------------------------------------------------------------ going over to another plan

    def _cross(self, worker: Worker) -> World | None:
        """All have agreed: enter the epoch, and send what the new layout needs. The old one stays whole."""
        if worker.receiving is not None:
            return None
        for ward in worker.following:
            worker = _follow(worker, ward)
        assert worker.live is not None and worker.migrate is not None
        order = _read_downstream(worker.migrate)
        assert isinstance(order, Migrate) and order.plan.epoch == worker.due
        plan, base, version = order.plan, worker.epoch, len(worker.live)
        store = worker.store
        if find_version(store.kept, version) is None:
            store = changed(store, kept=(*store.kept, worker.live)[-2:])
        worker = changed(
            worker.with_store(base, store), plan=plan, epoch=plan.epoch, resume=version, due=0, crossing=True
        )
        own = worker.live
        assert own is not None
        world = self._parcel(worker, "source", version, [(worker.me, own)])
        if worker.me in seated_in(plan):
            return world._put(changed(worker, place=Place.RESTORE))
        worker = changed(
            worker,
            place=Place.SPARE,
            idled=True,
            live=None,
            crossing=False,
            stores=(*worker.stores, ((plan.epoch,), None)),
            base_plans=(*worker.base_plans, plan),
        )
        return world._put(worker)._send(Drained(worker=worker.me))

    # ------------------------------------------------------------ recovery

    def _unwind(self, worker: Worker) -> World:
        """Wait for what is in flight, and report."""
        for ward in worker.following:
            worker = _follow(worker, ward)
        worker = changed(worker, receiving=None, place=Place.SETTLED, settling=worker.quiesced, due=0, crossing=False)
        return self._put(worker)._send(Settled(report=settle_report(worker, self.rules.program)))

    def _adopt(self, worker: Worker, order: Recover) -> World:
        """Finish the open step, enter the epoch, and send what the new layout needs."""
        plan, settlement = order.plan, order.settlement
        base, version = settlement.base_epoch, settlement.resume_step
        worker = finish_open_step(worker, settlement)
        lead = max(worker.lead, settlement.lead_activity)
        worker = changed(worker, waived=max(worker.waived, settlement.waived_activity))
        worker = changed(worker, plan=plan, epoch=plan.epoch, resume=version, cut=False, order=None, lead=lead)
        worker = changed(worker.keeping([base]), working=())
        store = worker.store_of(base)
        world = changed(  # frames of older epochs are dropped
            self,
            posts=frozenset(post for post in self.posts if post[0] >= plan.epoch),
            parcels=frozenset(parcel for parcel in self.parcels if parcel[0][0] >= plan.epoch),
        )
        if store is not None:
            if find_version(store.kept, version) is None:
                assert worker.live is not None and len(worker.live) == version, f"{worker.me} cannot reach {version}"
                store = changed(store, kept=(*store.kept, worker.live)[-2:])
            store = store.forget_after(version)
            worker = worker.with_store(base, store)
            own = find_version(store.kept, version)
            assert own is not None
            shards = [(worker.me, own)]
            for owner, copies in store.wards:
                copy = find_version(copies, version)
                if owner not in self.state.roster.survivors and copy is not None:
                    shards.append((owner, copy))
            world = world._parcel(worker, "source", version, shards)
        if plan.placement.find_seat(worker.me) is not None:
            return world._put(changed(worker, place=Place.RESTORE))
        worker = changed(
            worker,
            place=Place.SPARE,
            idled=True,
            live=None,
            stores=(*worker.stores, ((plan.epoch,), None)),
            base_plans=(*worker.base_plans, plan),
        )
        report = RecoveryReport(worker=worker.me, epoch=plan.epoch, resume_step=version)
        return world._put(worker)._send(Recovered(report=report))

    def _restore(self, worker: Worker) -> World | None:
        """Put the own shard of the new layout together."""
        plan, version = worker.plan, worker.resume
        base = next((p for p in worker.base_plans if p.epoch != plan.epoch), None)
        assert base is not None, f"worker {worker.me} knows no layout that the state is in"
        store = worker.store_of(base.epoch)
        if store is not None and keeps_shard(base, plan, worker.me):
            own = find_version(store.kept, version)
            assert own is not None
        else:
            pieces = [self.parcel("source", version, plan.epoch, owner) for owner in sources_of(base, plan, worker.me)]
            if None in pieces:
                return None
            assert len(set(pieces)) == 1, f"shards of one version differ: {set(pieces)}"
            own = pieces[0]
            assert own is not None
            store = Store(kept=(own,), wards=tuple((ward, ()) for ward in wards_of(plan, worker.me)))
            worker = changed(worker, stores=(*worker.stores, ((-plan.epoch,), store)))  # counts after verification
        worker = changed(worker, live=None, place=Place.RENEW)
        return self._parcel(worker, "copy", version, [(worker.me, own)])._put(worker)

    def _new_store(self, worker: Worker) -> tuple[int, Store]:
        """The store that becomes that of the epoch, and under which number it is kept until then."""
        fresh = worker.store_of(-worker.epoch)
        if fresh is not None:
            return -worker.epoch, fresh
        (epochs, store), *_ = worker.stores
        assert store is not None
        return epochs[0], store

    def _renew(self, worker: Worker) -> World | None:
        """The wards' copies come in, where they are missing; then the state is in use."""
        version = worker.resume
        epoch, store = self._new_store(worker)
        for ward in wards_of(worker.plan, worker.me):
            if find_version(store.ward(ward), version) is None:
                copy = self.parcel("copy", version, worker.epoch, ward)
                if copy is None:
                    return None
                store = store.with_ward(ward, (*store.ward(ward), copy))
        worker = changed(worker.with_store(epoch, store), place=Place.VERIFY)
        return self._post(worker, "verify", version)._put(worker)

    def _verify(self, worker: Worker) -> World | None:
        """All have the same state, and the layout counts."""
        version, plan = worker.resume, worker.plan
        if not self.have_posted("verify", version, plan.epoch, seated_in(plan)):
            return None
        shards = {self.parcel("copy", version, plan.epoch, owner) for owner in seated_in(plan)}
        assert len(shards) == 1, f"after the recovery to epoch {plan.epoch} shards differ: {shards}"
        number, store = self._new_store(worker)
        for owner, copies in store.wards:
            assert find_version(copies, version) in shards, f"copy of {owner} at {worker.me}: {copies}, not {shards}"
        stores = []
        for epochs, other in worker.stores:
            if number in epochs:  # the store of the old layout too, where that is taken along
                epochs = (*(e for e in epochs if e >= 0), plan.epoch)
            stores.append((epochs, other))
        worker = changed(
            worker,
            stores=tuple(stores),
            base_plans=(*worker.base_plans, plan),
            live=find_version(store.kept, version),
            copied=True,
            owes_report=True,
            place=Place.ENTER,
        )
        assert worker.store_of(plan.epoch) is not None
        return self._put(worker)

    # ------------------------------------------------------------ what must hold

    def _checked(self, before: World) -> World:
        """Of every worker, at any moment: each copy has seen every step once, in order."""
        for worker, same in zip(self.workers, before.workers, strict=True):
            for history in _histories(worker) if worker is not same else ():
                steps = [step for step, _ in history]
                assert steps == list(range(len(steps))), f"worker {worker.me} holds a shard that has seen {history}"
                epochs = [epoch for _, epoch in history]
                assert epochs == sorted(epochs), f"worker {worker.me}: an older epoch's gradients came last: {history}"
        return self

    def _check_settlement(self, before: State, order: Recover) -> World:
        """What the controller decided can be done, and loses nothing; by what workers hold, not by what they said."""
        assert isinstance(before, Settling)
        settlement, survivors = order.settlement, before.roster.survivors
        base, version, commit = settlement.base_epoch, settlement.resume_step, settlement.commit
        plan = {**before.outage.plans, order.plan.epoch: order.plan}[base]
        present = [worker for worker in self.workers if worker.alive and worker.me in survivors]
        for worker in present:
            store = worker.store_of(base)
            if worker.me not in seated_in(plan):
                continue
            assert store is not None, f"worker {worker.me} does not hold the layout of epoch {base}"
            live = worker.live if base == max(worker.epochs) else None
            own = {len(h) for h in (*store.kept, *((live,) if live is not None else ()))}
            assert version in own or (_can_finish(store, settlement) and version - 1 in own), (
                f"worker {worker.me} cannot reach version {version}:\n{describe(self.workers)}"
            )
            prepared = store.update is not None and self.rules.mode is Mode.REPLAY
            if prepared and store.update is not None:
                assert version > store.update.step, f"{worker.me} is PREPARED for {store.update.step}, {settlement}"
            finished = self.rules.program[: worker.activity].count(STEP)
            spared = 0 if self.rules.mode is Mode.REPLAY else 1
            assert version >= finished - spared, f"worker {worker.me} has left step {finished - 1}, {version} is next"
        for owner in set(seated_in(plan)) - set(survivors):
            holder = self.workers[dict(settlement.holders)[owner]]
            assert holder.me in survivors
            if holder in present:
                store = holder.store_of(base)
                held = {len(history) for history in store.ward(owner)} if store is not None else set()
                assert version in held or (
                    store is not None and _can_finish(store, settlement) and version - 1 in held
                ), f"worker {holder.me} cannot make version {version} of {owner}'s shard:\n{describe(self.workers)}"
        if self.settled_on is not None and self.rules.mode is Mode.REPLAY:
            before_base, before_version, _ = self.settled_on
            if before_base == base:
                assert version == before_version, f"settled on {self.settled_on}, then on {settlement}"
        assert order.plan.epoch == before.epoch
        assert set(seated_in(order.plan)) <= set(survivors)
        if commit is not None:
            assert commit.step + 1 == version
        return changed(self, settled_on=(base, version, -1 if commit is None else commit.step))

    def _check_end(self, before: State, state: Stopping) -> None:
        """The job may end early only if it cannot go on."""
        assert isinstance(before, Running | Settling | Resuming)
        if state.exit_code == ExitCode.GAVE_UP:
            left, lanes = len(state.roster.survivors), self.rules.job.tensor_parallel
            assert left < lanes, f"gave up although {left} workers are left: {state.sentence}"
        else:
            assert state.exit_code == ExitCode.STATE_INVALID, state.sentence
            assert isinstance(before, Settling)
            assert self._is_state_gone(before), f"{state.sentence}\n{describe(self.workers)}"

    def _is_state_gone(self, before: Settling) -> bool:
        """Whether no layout that the survivors share has a copy of everything.

        The newest one is broken if some owner and all its backups are lost. Then an older one would do as long as
        nobody has changed anything under the newest.
        """
        survivors = [self.workers[me] for me in before.roster.survivors]
        plans = {plan.epoch: plan for worker in survivors for plan in worker.base_plans}
        shared = [
            epoch
            for epoch, plan in sorted(plans.items())
            if all(epoch in worker.epochs or worker.me not in seated_in(plan) for worker in survivors)
        ]
        assert shared, f"survivors share no layout:\n{describe(survivors)}"
        *older, newest = shared
        if not self._is_broken(plans[newest], survivors):
            return False
        changed = any(
            store is not None and store.update is not None and any(e == store.update.norm for e in (newest,))
            for store in (worker.store_of(newest) for worker in survivors)
        )
        return changed or all(self._is_broken(plans[epoch], survivors) for epoch in older)

    def _is_broken(self, plan: ElasticPlan, survivors: Iterable[Worker]) -> bool:
        left = {worker.me: worker for worker in survivors}
        for owner in seated_in(plan):
            if owner not in left:
                stores = [left[b].store_of(plan.epoch) for b in plan.backups_of(owner) if b in left]
                if not any(store is not None and store.ward(owner) for store in stores):
                    return True
        return False


_STRETCHES: dict[Place, Callable[[World, Worker], World | None]] = {
    Place.ENTER: World._go_on,
    Place.SEED: World._seed,
    Place.SEEDED: World._seeded,
    Place.COMPUTE: World._reduce,
    Place.DUTY: World._duty,
    Place.NORM: World._norm,
    Place.SYNC: World._sync,
    Place.BARRIER: World._barrier,
    Place.RESTORE: World._restore,
    Place.RENEW: World._renew,
    Place.VERIFY: World._verify,
}


def _receiver(entry: tuple[int, str]) -> int:
    return entry[0]


def _enter(worker: Worker, phase: StepPhase) -> Worker:
    assert phase in FOLLOWS[worker.phase], f"{phase} does not follow {worker.phase}"
    return changed(worker, phase=phase)


def _follow(worker: Worker, ward: int) -> Worker:
    """The ward's copy goes through the update."""
    store = worker.store
    assert store.update is not None
    following = tuple(other for other in worker.following if other != ward)
    return changed(worker.with_store(worker.epoch, advance_ward(store, ward, store.update)), following=following)


def _can_finish(store: Store, settlement: Settlement) -> bool:
    return settlement.commit is not None and store.ready == settlement.commit.step


def _histories(worker: Worker) -> Iterable[History]:
    if worker.live is not None:
        yield worker.live
    for _, store in worker.stores:
        if store is not None:
            yield from store.kept
            for _, copies in store.wards:
                yield from copies


@cache
def _read_upstream(text: str) -> Event:
    return decode_from_client(text)  # type: ignore[return-value]


@cache
def _sender(text: str) -> int:
    event = _read_upstream(text)
    reports = Settled | Recovered | Migrated
    return event.report.worker if isinstance(event, reports) else event.worker  # type: ignore[union-attr]


@cache
def _read_downstream(text: str) -> Quiesce | Recover | Migrate | Stop:
    message = decode_to_worker(text)
    assert isinstance(message, Quiesce | Recover | Migrate | Stop)
    return message


def _known_target(worker: Worker) -> Migrate | None:
    """The order to go over to another plan that the worker would follow."""
    order = None if worker.migrate is None else _read_downstream(worker.migrate)
    if not isinstance(order, Migrate) or order.plan.epoch <= max(worker.epoch, worker.quiesced):
        return None
    return order


def _ask_planner(command: MakePlan | ImprovePlan) -> Answer:
    """In no time."""
    if isinstance(command, MakePlan):
        made = make_plan(command)
        return replace(made, seconds=0.0) if isinstance(made, PlanMade) else made
    search, plan = command.search, command.plan
    if not search.drained:
        return PlanImproved(search=search, plan=_reshape(plan, search.epoch), seconds=0.0)
    try:
        left = replan(command.job, plan, search.drained, search.epoch, command.domains)
    except ElasticError as error:
        return PlanKept(search=search, sentence=str(error), failed=True)
    return PlanImproved(search=search, plan=left, seconds=0.0)


def _reshape(plan: ElasticPlan, epoch: int) -> ElasticPlan:
    """The same seats with other shards where that can be: a layer goes back and forth, or copies go to others."""
    layers = list(plan.layers)
    if len(layers) > 1:
        (first, cut), (_, end) = layers[:2]
        cut = cut + 1 if cut - first <= end - cut - 1 else cut - 1
        layers[:2] = [(first, cut), (cut, end)]
    backups = []
    for owner, backup in plan.backups:
        seat = plan.placement.seat(owner)
        others = [w for w in plan.placement.replicas(seat.stage, seat.lane) if w not in (owner, backup)]
        backups.append((owner, others[0] if others and len(plan.backups_of(owner)) == 1 else backup))
    return replace(plan, epoch=epoch, layers=tuple(layers), backups=tuple(backups))


def begin(rules: Rules) -> World:
    """All have joined, and nobody has begun."""
    director = Director(rules.job).start()
    table, state = Table(), director.state
    assert isinstance(state, Running)
    plan = state.plan
    workers = tuple(
        Worker(
            me=me,
            plan=plan,
            live=(),
            stores=(((0,), Store(wards=tuple((ward, ()) for ward in wards_of(plan, me)))),),
            base_plans=(plan,),
        )
        for me in range(rules.job.world_size)
    )
    return World(rules=rules, table=table, workers=workers, controller=table.number(state), now=director.now)


def program_of(steps: int, evaluate_after: Iterable[int] = ()) -> tuple[str, ...]:
    """Joint activities: the steps, an evaluation after some of them, and the last barrier."""
    program: list[str] = []
    for step in range(steps):
        program.append(STEP)
        if step in set(evaluate_after):
            program.append(BETWEEN)
    return (*program, BETWEEN)
