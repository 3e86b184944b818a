"""A job without processes and without Megatron: workers are threads with real links, sessions and groups.

The "model" is one layer per stage at launch, each one parameter of ``NUMEL`` numbers, cut over the replicas like an
optimizer shard; a step adds ``step + 1`` to every one, so version ``v`` is ``v (v + 1) / 2`` everywhere, whoever
computed it. In a *patterned* job every element of every slot has a value of its own, and changes at its own speed.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megatron_elas.planner.backups import place_backups
from megatron_elas.planner.fallback import fall_back
from megatron_elas.planner.plan import initial_plan, replan
from megatron_elas.planner.settle import settle
from megatron_elas.runtime.communicator.communicator import Communicator
from megatron_elas.runtime.communicator.membership import GroupMembers
from megatron_elas.runtime.session import Dispensable, Session
from megatron_elas.runtime.snapshots import SnapshotMode
from megatron_elas.runtime.transport.sockets import SocketTransport
from megatron_elas.runtime.verification.inspection import UNKNOWN, Counters, Inspection, inspect_piece, weight_sums
from megatron_elas.spec.catalogue import Catalogue, Parameter, StageContents
from megatron_elas.spec.errors import EpochChanged, StateInvalid, VerificationFailed
from megatron_elas.spec.events import LossReason, WorkerLost
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.layout import Cell, Placement
from megatron_elas.spec.migration import MigrationMode, MigrationReport
from megatron_elas.spec.plan import ElasticPlan, Settlement
from megatron_elas.spec.report import RecoveryReport, SettleReport
from megatron_elas.spec.shards import ShardLayout
from megatron_elas.spec.transaction import Update

NUMEL = 1200
PATIENCE_S = 40.0


def value_of(version: int) -> float:
    """Of every parameter in the state before step ``version``."""
    return version * (version + 1) / 2


def make_catalogue(layers: int) -> Catalogue:
    """Layer ``i`` has the parameter ``i``."""
    middle = ((Parameter(name=str(layer), count=NUMEL),) for layer in range(layers))
    return Catalogue(units=((), *middle, ()))


@functools.cache
def pattern_of(name: str, slot: int) -> torch.Tensor:
    """(NUMEL,) what is in a slot of the parameter before step 0."""
    return int(name) * 10_000.0 + slot * 3_000.0 + torch.arange(NUMEL)


@functools.cache
def speed_of(name: str) -> torch.Tensor:
    """(NUMEL,) how much faster than in a job without pattern each element changes."""
    return 1.0 + (int(name) + torch.arange(NUMEL)) % 3


class Activations:
    """What a step that runs keeps in memory."""


class Vanished(BaseException):
    """Raised in a worker that is lost: nothing of it may run on."""


@dataclass
class Announced:
    """As the control link gives it."""

    epoch: int
    lost: Sequence[WorkerLost]


@dataclass
class GoOver:
    """As the control link gives it."""

    plan: ElasticPlan
    addresses: dict[int, str]


class Released(BaseException):
    """Raised in a drained worker that is told to leave."""


@dataclass
class Order:
    """As the control link gives it."""

    plan: ElasticPlan
    settlement: Settlement
    base: ElasticPlan | None
    addresses: dict[int, str]


class Job:
    """Plays the controller, with the real planner."""

    def __init__(
        self,
        folder: Path,
        *,
        stages: int,
        rows: int,
        mode: SnapshotMode = SnapshotMode.REPLAY,
        copies: int = 1,
        lanes: int = 1,
        verify_interval: int = 0,
        lazy: bool = True,
        beside: bool = True,
        layers: Sequence[int] = (),
        patterned: bool = False,
        migration: MigrationMode = "off",
    ) -> None:
        self.mode = mode
        self.verify_interval = verify_interval
        self.lazy = lazy
        """Steps leave the gather of parameters to the next one, as with overlapped gathers."""
        self.beside = beside
        self.patterned = patterned
        self.migration_mode = migration
        self.spec = JobSpec(
            tensor_parallel=lanes,
            pipeline_parallel=stages,
            data_parallel=rows,
            micro_batch_size=1,
            num_microbatches=4 * rows,
            snapshot_replicas=copies,
            stage_layers=tuple(layers),
            migration=migration,
        )
        self.plan = initial_plan(self.spec, {})
        self.plans = {0: self.plan}
        self.epoch = 0
        self.in_force = self.plan
        """The newest plan that all have gone over to, or recovered under."""
        self.staged: GoOver | None = None
        self.reserved = 0
        """Newest epoch that an order has."""
        self.migrated: dict[int, dict[int, MigrationReport]] = defaultdict(dict)
        self.drained: set[int] = set()
        self.declined: list[tuple[int, int, str]] = []
        """Worker, epoch and why."""
        self.spoils_prebuild = False
        """Whether layers cannot be made ahead."""
        self.left: set[int] = set()
        """Drained workers that were told to leave."""
        self.decided: Update | None = None
        self.lost: set[int] = set()
        self.finished: set[int] = set()
        self.ended: StateInvalid | None = None
        self.replaced: list[tuple[int, int, int, str]] = []
        """Copies that differed: who kept it, owner, step, slot."""
        self.unverified: list[VerificationFailed] = []
        """Since the beginning; a real controller forgets them with the outage."""
        self.void: list[VerificationFailed] = []
        """Of migrations, which are void then."""
        self.recovered: dict[int, list[RecoveryReport]] = defaultdict(list)
        self.reports: dict[int, dict[int, SettleReport]] = defaultdict(dict)
        self.orders: dict[int, Order] = {}
        self.changed = threading.Condition()
        self.workers = [ToyWorker(self, worker, folder) for worker in range(self.spec.world_size)]
        addresses = {worker.id: worker.transport.address for worker in self.workers}
        for worker in self.workers:
            worker.transport.set_addresses(addresses)

    @property
    def survivors(self) -> list[int]:
        return [worker.id for worker in self.workers if worker.id not in self.lost | self.left]

    def migrate(
        self,
        layers: Sequence[tuple[int, int]],
        stages: Sequence[Sequence[int]] | None = None,
        drain: Sequence[int] = (),
    ) -> ElasticPlan:
        """Order to go over to a plan with these layers, and if asked for with these workers on each stage."""
        with self.changed:
            base = self.in_force
            placement = base.placement
            if stages is not None:
                row_of = {cell.workers[0]: cell.row for stage in placement.stages for cell in stage}
                cells = tuple(tuple(Cell(row=row_of[w], workers=(w,)) for w in stage) for stage in stages)
                spares = tuple(sorted({*placement.spares, *drain}))
                placement = Placement(stages=cells, spares=spares)
            self.reserved = max(self.epoch, self.reserved) + 1
            plan = replace(
                base,
                epoch=self.reserved,
                placement=placement,
                layers=tuple(layers),
                items=base.items[:1] * len(placement.stages),
                warmups=(),
                backups=place_backups(placement, {}, self.spec.snapshot_replicas),
            )
            self.plans[plan.epoch] = plan
            living = {worker: self.workers[worker].transport.address for worker in self.survivors}
            self.staged = GoOver(plan=plan, addresses=living)
            return plan

    def has_migrated(self, report: MigrationReport) -> None:
        """A worker has finished a step under the plan; drained ones leave when all have."""
        with self.changed:
            plan = self.plans[report.epoch]
            self.migrated[report.epoch][report.worker] = report
            if report.epoch > self.in_force.epoch:
                self.in_force = plan
            if self.migrated[report.epoch].keys() == set(plan.placement.workers) and self.epoch < report.epoch:
                self.left |= self.drained
            self.changed.notify_all()

    def lose(self, worker: int) -> None:
        """The controller notices that the worker is gone."""
        with self.changed:
            if worker not in self.lost:
                self.lost.add(worker)
                self._begin_epoch()

    def leave_out(self, epoch: int) -> None:
        """A new epoch with the same workers, unless this one has ended already."""
        with self.changed:
            if epoch == self.epoch:
                self._begin_epoch()

    def distrust(self, epoch: int, error: VerificationFailed) -> None:
        """A check failed; all workers say so."""
        with self.changed:
            if epoch == self.reserved > self.in_force.epoch and epoch > self.epoch:  # the old layout is whole
                self.void.append(error)
                self._begin_epoch()
            elif epoch == self.epoch:
                self.unverified.append(error)
                self._begin_epoch()

    def _begin_epoch(self) -> None:
        """Cancels before anybody can have been told how to go on, as the control link does."""
        self.epoch = max(self.epoch, self.reserved) + 1
        for survivor in self.survivors:
            self.workers[survivor].transport.cancel()
        self.changed.notify_all()

    def settled(self, report: SettleReport) -> None:
        """One survivor has unwound; the last one lets all go on."""
        with self.changed:
            self.reports[report.epoch][report.worker] = report
            reports = self.reports[report.epoch]
            if report.epoch == self.epoch and reports.keys() >= set(self.survivors) and report.epoch not in self.orders:
                plan = replan(self.spec, self.in_force, self.lost, self.epoch, {})
                self.drained.clear()
                self.plans[self.epoch] = plan
                said = [reports[worker] for worker in self.survivors]
                try:
                    if any(not error.renewable for error in self.unverified):
                        raise StateInvalid(str(self.unverified[-1]))
                    settlement = settle(said, self.plans, self.decided)
                    self.decided = settlement.commit
                except StateInvalid as error:
                    fallback = fall_back(said, plan)
                    if fallback is None:
                        self.ended = error
                        self.changed.notify_all()
                        raise
                    settlement = fallback
                addresses = {worker: self.workers[worker].transport.address for worker in self.survivors}
                self.orders[self.epoch] = Order(
                    plan=plan,
                    settlement=settlement,
                    base=self.plans.get(settlement.base_epoch),
                    addresses=addresses,
                )
                self.changed.notify_all()

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        """Until the condition is true, and that value; it is looked at again when a worker is lost, settled or done."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.ended or condition(), PATIENCE_S), f"nobody said {what}"
            if self.ended is not None:
                raise self.ended
            return condition()

    def run(self, *, steps: int, between: Callable[[ToyWorker, int], None] | None = None) -> None:
        """Train on all workers; ends when all but the lost ones have finished. Raises their errors."""
        threads = [threading.Thread(target=worker.train, args=(steps, between), daemon=True) for worker in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S * 2)
            for other in self.workers:
                if other.error is not None:
                    raise other.error
            stuck = [w.id for w, t in zip(self.workers, threads, strict=True) if t.is_alive()]
            assert not thread.is_alive(), f"workers {stuck} hang; places {[(w.id, w.place) for w in self.workers]}"


@dataclass
class ToyMirror:
    """Follows a toy's shard."""

    flat: torch.Tensor

    def apply(self, gradients: torch.Tensor, update: Update, settings: object) -> None:
        assert self.flat[-1] == update.step
        assert isinstance(settings, int)
        self.flat[:-1].view(3, -1).add_(gradients)
        self.flat[-1] += 1


@dataclass
class ToyWorker:
    """One thread: a session, its host and its control line in one object."""

    job: Job
    id: int
    folder: Path
    transport: SocketTransport = field(init=False)
    communicator: Communicator = field(init=False)
    session: Session = field(init=False)
    error: BaseException | None = None
    place: str = ""
    evaluated: list[tuple[int, float]] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    unsaved: list[int] = field(default_factory=list)
    checkpoint: int | None = None
    """Iteration of the newest one that this worker knows of."""
    loaded: list[int] = field(default_factory=list)
    """Iterations of the checkpoints it has loaded."""
    logged: list[int] = field(default_factory=list)
    """Steps that were logged after they had been run."""
    activations: Callable[[], Activations | None] = lambda: None
    """Of the last step: a weak reference."""
    steps_run: list[int] = field(default_factory=list)
    steps_missed: list[int] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    """Steps before which another worker has told how those before went."""
    anywhere: dict[str, Callable[[], None]] = field(default_factory=dict)
    """By phase: the same, in whichever step it is first there."""
    crashes: type[Exception] | None = None
    """An error of this kind loses this worker and is no failure of the test."""
    hears_from: int = 0
    """The step before which this worker hears of no migration."""
    prebuilt: list[int] = field(default_factory=list)
    asked: list[Collection[str]] = field(default_factory=list)
    """Of every gather of some parameters: which."""
    """Epochs of plans that it was told to make ready for."""
    hooks: dict[tuple[str, int], Callable[[], None]] = field(default_factory=dict)
    """By (phase, step), or (phase, epoch) of a recovery: called when this worker is there, once."""

    def __post_init__(self) -> None:
        self.transport = SocketTransport(self.id, f"unix:{self.folder}/{self.id}", "token")
        world = self.job.plan.placement.workers
        self.communicator = Communicator(self.transport, world)
        self.world = self.communicator.open_group("0", world)
        self.replicas = self.communicator.open_group("1", self.members(self.job.plan))
        self.session = Session(
            self.id,
            self.job.plan,
            self.transport,
            self.communicator,
            self,
            self.strike,
            self.job.mode,
            self.job.verify_interval,
            moves_beside=self.job.beside,
            migration=self.job.migration_mode,
        )
        self.gathered = True
        """Whether the gather after the last update is over."""
        self.shard = self.expected_shard(self.job.plan, 0)
        self.fitted = self.job.plan.layers_of(self.id)
        self.parameters = self.expected_parameters(self.job.plan, 0)
        """Of all layers of the stage, one after the other."""
        self.step = 0
        self.tally = 0
        """Grows with every step, but who had no seat in one has to be told how: stands for a loss scaler's state."""

    def members(self, plan: ElasticPlan) -> tuple[int, ...]:
        seat = plan.placement.seat(self.id)
        return plan.placement.replicas(seat.stage, seat.lane)

    def layout(self, plan: ElasticPlan) -> ShardLayout:
        return make_catalogue(self.job.spec.num_layers).layout(plan, self.id)

    def expected(self, name: str, slot: int, version: int) -> torch.Tensor:
        """(NUMEL,) a slot of a parameter in the state before step ``version``."""
        if not self.job.patterned:
            return torch.full((NUMEL,), value_of(version))
        return pattern_of(name, slot) + value_of(version) * speed_of(name)

    def expected_shard(self, plan: ElasticPlan, version: int, owner: int | None = None) -> torch.Tensor:
        """The flat shard of a worker, this one or another, in an undisturbed run."""
        layout = make_catalogue(self.job.spec.num_layers).layout(plan, self.id if owner is None else owner)
        parts = [
            self.expected(piece.name, slot, version)[piece.start : piece.stop]
            for slot in range(3)
            for piece in layout.pieces
        ]
        return torch.cat([*parts, torch.tensor([float(version)])])

    def expected_parameters(self, plan: ElasticPlan, version: int) -> torch.Tensor:
        """Of the own stage, in an undisturbed run."""
        return torch.cat([self.expected(str(layer), 0, version) for layer in range(*plan.layers_of(self.id))])

    # ------------------------------------------------------------ training

    def train(self, steps: int, between: Callable[[ToyWorker, int], None] | None) -> None:
        try:
            self.session.attach(self, 0)
            for step in range(steps):
                self.place = f"step {step}"
                self.session.run_step(step, self.run_step)
                if between is not None:
                    self.place = f"after step {step}"
                    between(self, step)
            self.place = "finish"
            self.session.finish()
            self.place = "done"
        except (Vanished, Released):
            pass
        except BaseException as error:
            if self.crashes is None or not isinstance(error, self.crashes):
                self.error = error
            else:
                self.transport.close()
                self.job.lose(self.id)

    def run_step(self, step: int) -> int:
        self.steps_run.append(step)
        activations = Activations()
        self.activations = weakref.ref(activations)
        self.strike(step, "forward", None)
        if self.job.lazy:  # until now they were those of the step before
            self.sync_parameters()
        self.strike(step, "backward", None)
        assert torch.equal(self.parameters, self.expected_parameters(self.session.plan, step))
        self.communicator.barrier()  # stands for the pipeline and the reduction
        self.gradient = torch.full((len(self.shard) // 3,), step + 1.0)
        if self.job.patterned:
            pieces = self.layout(self.session.plan).pieces
            self.gradient *= torch.cat([speed_of(piece.name)[piece.start : piece.stop] for piece in pieces])
        self.strike(step, "reduce", None)
        ahead = self.session._migrating_in_use._ahead
        if ahead is not None:  # so that it is in the same step whether the machine is busy or not
            ahead.result()
        own = self.session.ballot()
        ballots = self.communicator.all_gather_rows(own)
        known, complete = (
            column.count(vote) if vote else 0 for column, vote in zip(zip(*ballots, strict=True), own, strict=True)
        )
        self.session.count_ballots((known, complete), len(ballots))
        self.session.exchange_gradients()
        self.strike(step, "norm", None)
        norms = self.communicator.all_gather_rows((self.id, step))
        assert {row[1] for row in norms} == {step}, f"workers are in steps {norms}"
        self.strike(step, "optimizer", None)
        self.session.prepare(Update.of(step, norm=float(step)))
        self.apply_update(self.gradient, Update.of(step, norm=float(step)))
        self.session.applied()
        self.gathered = False
        self.strike(step, "gather", None)
        if not self.job.lazy:
            self.sync_parameters()
        self.communicator.barrier()  # stands for what ends Megatron's step
        self.step, self.tally = step + 1, self.tally + 1
        self.strike(step, "stepped", None)
        return step

    def log(self, step: int) -> None:
        """As the training loop does after a step: a collective that is no joint activity."""
        self.strike(step, "log", None)
        self.communicator.all_gather_rows((self.id, step))
        self.logged.append(step)

    def evaluate(self, step: int) -> None:
        """Something that all must join, with the parameters as they are."""

        def body() -> None:
            self.strike(step, "evaluate", None)
            self.communicator.barrier()
            self.evaluated.append((step, float(self.parameters.min())))
            assert torch.equal(self.parameters, self.expected_parameters(self.session.plan, self.step))

        self.session.run_between(body, missed=lambda: None)

    def save(self, step: int) -> None:
        """Something that all must join and that may fail."""

        def body() -> None:
            self.strike(step, "save", None)
            self.communicator.barrier()
            self.saved.append(step)

        instead = Dispensable(purpose="save", instead=lambda: self.unsaved.append(step))
        self.session.run_between(body, instead, missed=lambda: None)
        if step not in self.unsaved:
            self.checkpoint = step + 1

    def strike(self, step: int, phase: str, microbatch: int | None) -> None:
        for hook in (self.hooks.pop((phase, step), None), self.anywhere.pop(phase, None)):
            if hook is not None:
                hook()

    def vanish(self) -> None:
        """Be lost, here and now: links break, and the controller hears of it."""
        self.transport.close()
        self.job.lose(self.id)
        raise Vanished

    def fall_silent(self) -> None:
        """Be lost with links that stay open, as a stopped process; called from another worker's thread."""
        self.job.lose(self.id)
        self.transport.cancel()

    # ------------------------------------------------------------ runtime.ports.Host

    def describe_parameters(self) -> StageContents:
        units = make_catalogue(self.job.spec.num_layers).units
        stage = self.session.plan.placement.seat(self.id).stage
        first, last = self.session.plan.layers[stage]
        ends = {number: () for number in (0, len(units) - 1)}
        return StageContents(stage=stage, units={n: units[n] for n in range(first + 1, last + 1)} | ends)

    def take_catalogue(self, catalogue: Catalogue) -> None:
        assert catalogue == make_catalogue(self.job.spec.num_layers)

    def read_shard(self, flat: torch.Tensor) -> None:
        flat.copy_(self.shard)

    def shard_reader(self) -> Callable[[torch.Tensor], None]:
        shard = self.shard

        def read(flat: torch.Tensor) -> None:
            flat.copy_(shard)

        return read

    def piece_reader(self, layout: ShardLayout) -> Callable[[torch.Tensor], None]:
        own, shard = self.layout(self.session.plan), self.shard
        places = dict(zip(own.pieces, own.offsets(), strict=True))
        spans = [slice(places[piece], places[piece] + piece.numel) for piece in layout.pieces]

        def read(flat: torch.Tensor) -> None:
            torch.cat([slot[span] for slot in shard[:-1].view(3, -1) for span in spans], out=flat[:-1])
            flat[-1] = shard[-1]

        return read

    def write_shard(self, flat: torch.Tensor) -> None:
        self.strike(self.session.plan.epoch, "write", None)
        self.shard.copy_(flat)
        self._cast()

    def _cast(self) -> None:
        """Write the masters into the own slice of the parameters."""
        plan = self.session.plan
        layout, (first, _) = self.layout(plan), plan.layers_of(self.id)
        for piece, offset in zip(layout.pieces, layout.offsets(), strict=True):
            start = (int(piece.name) - first) * NUMEL
            self.parameters[start + piece.start : start + piece.stop] = self.shard[offset : offset + piece.numel]

    def read_gradients(self, flat: torch.Tensor) -> None:
        flat.copy_(self.gradient)

    def apply_update(self, gradients: torch.Tensor, update: Update) -> None:
        assert update.norm == update.step and self.shard[-1] == update.step
        self.shard[:-1].view(3, -1).add_(gradients)
        self.shard[-1] += 1
        self._cast()

    def conclude_step(self, step: int, captured: object, update: Update) -> int:
        assert isinstance(captured, tuple) and captured[0] == step == update.step
        self.step, self.tally = step + 1, captured[1] + 1
        return step

    def update_settings(self) -> object:
        return self.id

    def make_mirror(self, layout: ShardLayout, flat: torch.Tensor) -> ToyMirror:
        assert len(flat) == layout.flat_numel
        return ToyMirror(flat)

    def plan_groups(self, plan: ElasticPlan) -> dict[str, GroupMembers]:
        return {
            "0": GroupMembers(members=plan.placement.workers),
            "1": GroupMembers(members=self.members(plan)),
        }

    def follow_groups(self, plan: ElasticPlan) -> None:
        pass

    def rebuild(self, plan: ElasticPlan) -> None:
        self.shard = torch.full((self.layout(plan).flat_numel,), float("nan"))
        first, last = plan.layers_of(self.id)
        if plan.layers_of(self.id) != self.fitted:
            kept = dict(zip(range(*self.fitted), self.parameters.split(NUMEL), strict=True))
            lacking = torch.full((NUMEL,), float("nan"))
            self.parameters = torch.cat([kept.get(layer, lacking) for layer in range(first, last)])
            self.fitted = (first, last)

    def begin_activity(self, activity: int) -> None:
        pass

    def clear_step(self) -> None:
        pass

    def sync_parameters(self, names: Collection[str] | None = None) -> None:
        if names is not None:
            self.asked.append(names)
        if self.communicator.silent:
            return
        catalogue, plan = make_catalogue(self.job.spec.num_layers), self.session.plan
        layouts = {worker: catalogue.layout(plan, worker) for worker in self.replicas.members}
        outputs = [torch.zeros(layouts[worker].numel) for worker in self.replicas.members]
        first, _ = plan.layers_of(self.id)
        slices = [
            self.parameters[(at := (int(piece.name) - first) * NUMEL) + piece.start : at + piece.stop]
            for piece in layouts[self.id].pieces
        ]
        mine = torch.cat([torch.empty(0), *slices])  # nothing but padding, with many replicas
        if len({output.numel() for output in outputs}) == 1:
            self.replicas.allgather([outputs], [mine]).wait()
        else:
            for output, worker in zip(outputs, self.replicas.members, strict=True):
                output.copy_(mine) if worker == self.id else None
                self.replicas.broadcast([output], _Root(self.replicas.members.index(worker))).wait()
        for layout, output in zip(layouts.values(), outputs, strict=True):
            for piece, offset in zip(layout.pieces, layout.offsets(), strict=True):
                start = (int(piece.name) - first) * NUMEL
                if names is None or piece.name in names:
                    self.parameters[start + piece.start : start + piece.stop] = output[offset : offset + piece.numel]
        self.gathered = True

    def has_gathered(self, *, in_step: bool) -> bool:
        return self.gathered and (in_step or not self.job.lazy)

    def capture(self) -> object:
        return self.step, self.tally

    def rewind(self, captured: object) -> None:
        assert isinstance(captured, tuple)
        self.step, self.tally = captured

    def catch_up(self, step: int) -> None:
        assert step >= self.step
        self.step = step

    def read_history(self) -> list[int]:
        return [self.step, self.tally]

    def write_history(self, history: Sequence[int]) -> None:
        step, self.tally = history
        assert step == self.step
        self.told.append(self.step)

    def missed_step(self, step: int, update: Update | None) -> int:
        assert update is None or update.step == step
        self.steps_missed.append(step)
        return step

    def load_checkpoint(self, step: int) -> None:
        assert self.checkpoint is None or step >= self.checkpoint
        self.loaded.append(step)
        self.shard.copy_(self.expected_shard(self.session.plan, step))
        self.step = self.tally = step
        self._cast()

    def inspect(self) -> Inspection:
        slots, layout = self.shard[:-1].view(3, -1), self.layout(self.session.plan)
        first, last = self.session.plan.layers_of(self.id)
        weights = {str(first + number): part for number, part in enumerate(self.parameters.split(NUMEL))}
        pieces = [
            inspect_piece(
                piece,
                offset,
                [slot[offset : offset + piece.numel] for slot in slots],
                weights[piece.name][piece.start : piece.stop],
            )
            for piece, offset in zip(layout.pieces, layout.offsets(), strict=True)
        ]
        known = pieces and not self.shard[-1].isnan()  # not between a rebuild and what is written then
        updates = (int(self.shard[-1]), int(self.shard[-1])) if known else (UNKNOWN, UNKNOWN)
        return Inspection(
            parameters={str(layer): NUMEL for layer in range(first, last)},
            weights=weight_sums(weights),
            pieces=pieces,
            counters=Counters(
                consumed_samples=self.step * 8,
                schedule_samples=self.step * 8,
                loss_scale=self.tally,
                optimizer_steps=updates,
                streams=0,
            ),
        )

    # ------------------------------------------------------------ runtime.ports.Control

    @property
    def latest_epoch(self) -> int:
        return self.job.epoch

    def progress(self, epoch: int, step: int) -> None:
        pass

    def peer_unreachable(self, epoch: int, peer: int, detail: str) -> None:
        if self.id not in self.job.lost:
            self.job.lose(peer)

    def leave_out(self, epoch: int, culprit: int, detail: str) -> None:
        self.job.leave_out(epoch)

    def copy_differed(self, epoch: int, owner: int, step: int, slot: str) -> None:
        self.job.replaced.append((self.id, owner, step, slot))

    def unverified(self, epoch: int, error: VerificationFailed) -> None:
        self.job.distrust(epoch, error)

    def wait_quiesce(self, newer_than: int, *, idle: bool = False) -> Announced:
        if self.id in self.job.lost:
            raise Vanished
        left = self.job.left
        self.job.wait(lambda: self.job.epoch > newer_than or self.id in left, f"an epoch after {newer_than}")
        if self.id in left:
            raise Released
        lost = tuple(
            WorkerLost(worker=worker, reason=LossReason.EXITED, detail="", at_s=0.0) for worker in sorted(self.job.lost)
        )
        return Announced(epoch=self.job.epoch, lost=lost)

    def settled(self, report: SettleReport) -> None:
        if self.id in self.job.lost:
            raise Vanished
        self.job.settled(report)

    def wait_recover(self, epoch: int) -> Order:
        self.strike(epoch, "settled", None)
        found = self.job.wait(lambda: self.job.epoch > epoch or self.job.orders.get(epoch), f"the plan of {epoch}")
        if found is True:
            raise EpochChanged(f"epoch {self.job.epoch} was announced")
        assert isinstance(found, Order)
        self.strike(epoch, "ordered", None)
        return found

    def recovered(self, report: RecoveryReport) -> None:
        with self.job.changed:
            self.job.recovered[report.epoch].append(report)
            if report.epoch > self.job.in_force.epoch:
                self.job.in_force = self.job.plans[report.epoch]

    @property
    def migration(self) -> GoOver | None:
        staged = self.job.staged
        if self.step < self.hears_from:
            return None
        return staged if staged is not None and staged.plan.epoch > self.job.epoch else None

    def migrated(self, report: MigrationReport) -> None:
        self.job.has_migrated(report)

    def drained(self) -> None:
        with self.job.changed:
            self.job.drained.add(self.id)

    def forget_prebuilt(self) -> None:
        pass

    def prebuild(self, plan: ElasticPlan, most: int = 1) -> bool:
        self.prebuilt.append(plan.epoch)
        if self.job.spoils_prebuild:
            raise MemoryError("no room for another layer")
        return True

    def declined(self, epoch: int, sentence: str) -> None:
        with self.job.changed:
            self.job.declined.append((self.id, epoch, sentence))
            self.job.changed.notify_all()

    def finished(self, steps: int) -> None:
        with self.job.changed:
            self.job.finished.add(self.id)
            self.job.changed.notify_all()


@dataclass
class _Root:
    """Options of a broadcast."""

    rootRank: int
    asyncOp: bool = False


@contextmanager
def job_of(
    folder: Path,
    *,
    stages: int = 1,
    rows: int = 3,
    mode: SnapshotMode = SnapshotMode.REPLAY,
    copies: int = 1,
    lanes: int = 1,
    verify_interval: int = 0,
    lazy: bool = True,
    beside: bool = True,
    layers: Sequence[int] = (),
    patterned: bool = False,
    migration: MigrationMode = "off",
) -> Iterator[Job]:
    """A job whose links are closed at the end."""
    job = Job(
        folder, stages=stages, rows=rows, mode=mode, copies=copies, lanes=lanes, verify_interval=verify_interval,
        lazy=lazy, beside=beside, layers=layers, patterned=patterned, migration=migration,
    )  # fmt: skip
    try:
        yield job
    finally:
        for worker in job.workers:
            worker.transport.close()


def check_end(job: Job, steps: int) -> None:
    """All survivors finished, with the state of an undisturbed run and the same parameters."""
    assert job.finished == set(job.survivors)
    for worker in job.survivors:
        toy = job.workers[worker]
        plan = toy.session.plan
        assert torch.equal(toy.shard, toy.expected_shard(plan, steps)), f"worker {worker}"
        assert torch.equal(toy.parameters, toy.expected_parameters(plan, steps)), f"worker {worker}"
