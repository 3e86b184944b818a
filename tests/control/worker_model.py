"""One worker of the protocol as a value: what ``docs/protocol.md`` says that it does, without torch, threads or time.

The state of a shard is modelled by its *history*: for every update that was applied to it the step and the epoch in
which that step's gradients were computed. So a history has version ``len(history)``, two shards have seen the
same updates if their histories are equal, and a step that was left out or applied twice can be read off.

Workers meet on a *board*: what one has contributed to an exchange or a collective stays there when it dies. Each step
of a worker's main thread ends where it would wait for others, so that it can be cut there, or go on.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from megatron_elas.spec.plan import ElasticPlan, Settlement
from megatron_elas.spec.report import Holding, SettleReport
from megatron_elas.spec.transaction import StepPhase, Update

History = tuple[tuple[int, int], ...]
"""(step, epoch of its gradients) of every update, oldest first."""

STEP, BETWEEN = "step", "between"
"""Kinds of joint activities. The last one of a program is the barrier at the end of training."""


class Mode(enum.StrEnum):
    """How backups follow."""

    REPLAY = "replay"
    COPY = "copy"


class Place(enum.StrEnum):
    """What a worker's main thread does next; all but ENTER and APPLY wait for others."""

    ENTER = "enter"
    """Begin the next joint activity, or go on with it after a recovery."""
    SEED = "seed"
    SEEDED = "seeded"
    COMPUTE = "compute"
    DUTY = "duty"
    NORM = "norm"
    APPLY = "apply"
    SYNC = "sync"
    BARRIER = "barrier"
    SETTLED = "settled"
    RESTORE = "restore"
    RENEW = "renew"
    VERIFY = "verify"
    SPARE = "spare"
    FINISHED = "finished"


def changed[T](value: T, **changes: Any) -> T:
    """``dataclasses.replace`` for the models here, which have no slots: a search makes a hundred thousand copies."""
    new = object.__new__(type(value))
    new.__dict__.update(value.__dict__, **changes)
    return new


@dataclass(frozen=True)
class Store:
    """Copies under one layout, as ``runtime/store.py`` keeps them."""

    kept: tuple[History, ...] = ()
    """Complete copies of the own shard, newest last."""
    wards: tuple[tuple[int, tuple[History, ...]], ...] = ()
    gradients: tuple[tuple[int, tuple[int, int]], ...] = ()
    """By owner, the own shard's too: step and epoch of the reduced gradients at hand."""
    ready: int | None = None
    update: Update | None = None

    def ward(self, owner: int) -> tuple[History, ...]:
        """Complete copies of the ward's shard."""
        return dict(self.wards).get(owner, ())

    def with_ward(self, owner: int, copies: tuple[History, ...]) -> Store:
        """The store with these copies of the ward."""
        return changed(self, wards=tuple(sorted({**dict(self.wards), owner: copies}.items())))

    def with_gradient(self, owner: int, gradient: tuple[int, int]) -> Store:
        """The store with these gradients."""
        return changed(self, gradients=tuple(sorted({**dict(self.gradients), owner: gradient}.items())))

    def forget_after(self, version: int) -> Store:
        """Without newer versions, and what is known of steps that will be run again."""
        return changed(
            self,
            kept=_up_to(self.kept, version),
            wards=tuple((owner, _up_to(copies, version)) for owner, copies in self.wards),
            ready=None,
            update=None if self.update is not None and self.update.step >= version else self.update,
        )


def _up_to(copies: Iterable[History], version: int) -> tuple[History, ...]:
    return tuple(copy for copy in copies if len(copy) <= version)


def find_version(copies: Iterable[History], version: int) -> History | None:
    """The copy of this version, if it is among them."""
    return next((copy for copy in copies if len(copy) == version), None)


@dataclass(frozen=True)
class Worker:
    """Everything about one process."""

    me: int
    plan: ElasticPlan = field(compare=False)
    """In force."""
    live: History | None
    stores: tuple[tuple[tuple[int, ...], Store | None], ...]
    """Epochs of the layouts and the copies in them. A stage that lost nobody takes its store along to the new one."""
    base_plans: tuple[ElasticPlan, ...] = field(compare=False)
    """Of the epochs in ``stores``."""
    epoch: int = 0
    """Of the plan in force. In one history an epoch has one plan, so worlds need not compare plans."""
    alive: bool = True
    place: Place = Place.ENTER
    activity: int = 0
    running: int | None = None
    outcome: int | None = None
    """The newest step whose result the loop may take."""
    phase: StepPhase = StepPhase.COMPUTE
    working: History = ()
    """The shard that the optimizer is about to change, in copy mode."""
    copied: bool = False
    receiving: int | None = None
    """Copy mode: the version that travels."""
    following: tuple[int, ...] = ()
    """Wards whose copies are still to follow the newest update."""
    lead: int = 0
    waived: int = -1
    """The newest activity that nobody runs again."""
    done: bool = False
    """The body of the activity between steps was run."""
    idled: bool = False
    """It has been without a seat, so that its loop may have missed what others did."""
    owes_report: bool = False
    quiesced: int = 0
    """The newest epoch that was announced."""
    settling: int = 0
    resume: int = 0
    """The version that the recovery under way leads to."""
    order: str | None = None
    """The newest ``Recover``, as text."""
    migrate: str | None = None
    """The newest ``Migrate``, as text."""
    due: int = 0
    """The epoch that all go over to before the next step; 0: none was agreed on."""
    crossing: bool = False
    """What it reports with its next step is a migration."""
    cut: bool = False
    """A link broke: nothing can be exchanged until the next epoch."""
    counted: History = ()
    """The state when the loop last left a step."""

    @property
    def interrupted(self) -> bool:
        """Whether its communication is cancelled."""
        return self.cut or self.quiesced > self.epoch

    def store_of(self, epoch: int) -> Store | None:
        """The copies in the layout of this epoch."""
        return next((store for epochs, store in self.stores if epoch in epochs), None)

    @property
    def store(self) -> Store:
        """Under the plan in force."""
        store = self.store_of(self.epoch)
        assert store is not None
        return store

    def with_store(self, epoch: int, store: Store) -> Worker:
        """The worker with another store in place of that of this epoch."""
        stores = tuple((epochs, store if epoch in epochs else other) for epochs, other in self.stores)
        return changed(self, stores=stores)

    def keeping(self, epochs_kept: Iterable[int]) -> Worker:
        """Without the layouts of other epochs."""
        kept = set(epochs_kept)
        stores = tuple(
            (left, store) for epochs, store in self.stores if (left := tuple(e for e in epochs if e in kept))
        )
        return changed(self, stores=stores, base_plans=tuple(p for p in self.base_plans if p.epoch in kept))

    @property
    def epochs(self) -> tuple[int, ...]:
        """Of the layouts it knows, ascending."""
        return tuple(sorted(epoch for epochs, _ in self.stores for epoch in epochs))


def stop_of(program: tuple[str, ...], activity: int) -> int:
    """The version with which the activity of this number ends."""
    return program[: activity + 1].count(STEP)


def settle_report(worker: Worker, program: tuple[str, ...]) -> SettleReport:
    """What the worker says when it has unwound."""
    holdings = []
    for epoch in sorted(worker.epochs, reverse=True):
        store = worker.store_of(epoch)
        live = None if worker.live is None or epoch != max(worker.epochs) or store is None else len(worker.live)
        store = store or Store()
        holdings.append(
            Holding(
                epoch=epoch,
                live=live,
                kept=tuple(sorted(len(copy) for copy in store.kept)),
                wards={owner: tuple(sorted(len(copy) for copy in copies)) for owner, copies in store.wards},
                ready=store.ready,
                update=store.update,
            )
        )
    return SettleReport(
        worker=worker.me,
        epoch=worker.quiesced,
        step=program[: worker.activity].count(STEP),
        phase=worker.phase,
        activity=worker.activity,
        waived=worker.waived,
        holdings=tuple(holdings),
    )


def advance_ward(store: Store, owner: int, update: Update) -> Store:
    """The store whose copy of the ward has followed the update, if it was the state before it."""
    copies = store.ward(owner)
    if [len(copy) for copy in copies] != [update.step]:
        return store
    gradient = dict(store.gradients).get(owner)
    check_gradient(gradient, update)
    assert gradient is not None
    return store.with_ward(owner, ((*copies[0], gradient),))


def check_gradient(gradient: tuple[int, int] | None, update: Update) -> None:
    """The gradients that are applied are those of which the update knows the norm."""
    assert gradient == (update.step, int(update.norm or 0)), f"gradients of {gradient} meet the update {update}"


def finish_open_step(worker: Worker, settlement: Settlement) -> Worker:
    """Apply the step that is committed, in the layout it was computed in."""
    update, store = settlement.commit, worker.store_of(settlement.base_epoch)
    if update is not None and store is not None:
        if store.ready == update.step:
            store = changed(store, update=update)
            for owner, _ in store.wards:
                store = advance_ward(store, owner, update)
            if worker.live is not None and len(worker.live) == update.step:
                gradient = dict(store.gradients)[worker.me]
                check_gradient(gradient, update)
                worker = changed(worker, live=(*worker.live, gradient))
            worker = worker.with_store(settlement.base_epoch, store)
        if worker.running == update.step:
            worker = changed(worker, outcome=update.step)
    return changed(worker, running=None, phase=StepPhase.COMPUTE)


@cache
def replicas_of(plan: ElasticPlan, worker: int) -> tuple[int, ...]:
    """Those that hold the same parameters."""
    seat = plan.placement.seat(worker)
    return plan.placement.replicas(seat.stage, seat.lane)


@cache
def wards_of(plan: ElasticPlan, worker: int) -> tuple[int, ...]:
    """Whose copies the worker keeps."""
    return plan.wards_of(worker)


@cache
def seated_in(plan: ElasticPlan) -> tuple[int, ...]:
    """Workers with a seat, ascending."""
    return plan.placement.workers


@cache
def keeps_shard(base: ElasticPlan, plan: ElasticPlan, worker: int) -> bool:
    """Whether the worker has the same shard, wards and backups in both layouts."""
    if worker not in seated_in(base) or worker not in seated_in(plan):
        return False
    return all(
        view(base) == view(plan)
        for view in (
            lambda p: replicas_of(p, worker),
            lambda p: p.layers_of(worker),
            lambda p: p.wards_of(worker),
            lambda p: p.backups_of(worker),
        )
    )


@cache
def sources_of(base: ElasticPlan, plan: ElasticPlan, worker: int) -> tuple[int, ...]:
    """Owners in the base layout that the worker's new shard may be cut out of."""
    if worker in seated_in(base) and base.layers_of(worker) == plan.layers_of(worker):
        return replicas_of(base, worker)
    return seated_in(base)


def describe(workers: Mapping[int, Worker] | Iterable[Worker]) -> str:
    """A line each, for people."""
    values = workers.values() if isinstance(workers, Mapping) else workers
    return "\n".join(
        f"  worker {w.me}: {w.place if w.alive else 'dead'}, epoch {w.epoch}, activity {w.activity}, "
        f"running {w.running}, live {w.live}, stores {w.stores}, quiesced {w.quiesced}"
        for w in values
    )
