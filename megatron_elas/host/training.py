"""Megatron as the runtime's host: one worker's model, optimizer, schedules and counters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.training import get_args, get_timers

from megatron_elas.host.audit import Audit
from megatron_elas.host.contents import describe_parameters
from megatron_elas.host.data import SeekableLoader
from megatron_elas.host.gradient_sums import Captured as CapturedSums
from megatron_elas.host.gradient_sums import GradientSums
from megatron_elas.host.groups import plan_groups, write_globals
from megatron_elas.host.inspection import Inspector
from megatron_elas.host.layer_modules import keeps_layers
from megatron_elas.host.log_handover import Log
from megatron_elas.host.loss_scale import LossScale, read_loss_scale, write_loss_scale
from megatron_elas.host.losses import sum_losses
from megatron_elas.host.model import (
    bucket_groups_of,
    clear_communication,
    fit_buffers,
    gather_parameters,
    named_parameters,
    sum_gradients,
)
from megatron_elas.host.one_thread import one_thread
from megatron_elas.host.optimizer import OptimizerFactory, ShardAccess
from megatron_elas.host.pipeline import Route, RoutedPipeline
from megatron_elas.host.restage import ModelFactory, has_room, seed_streams
from megatron_elas.host.saved import Checkpoints, load_into
from megatron_elas.host.split_backward import forget
from megatron_elas.host.updates import OptimizerMirror, Settings, finish_update, read_settings, tell_losses
from megatron_elas.runtime.communicator.communicator import Communicator
from megatron_elas.runtime.communicator.membership import GroupMembers
from megatron_elas.runtime.verification.inspection import Inspection
from megatron_elas.spec.catalogue import Catalogue, StageContents
from megatron_elas.spec.errors import StateInvalid
from megatron_elas.spec.layout import Placement
from megatron_elas.spec.plan import ElasticPlan, ModelPart
from megatron_elas.spec.shards import ShardLayout
from megatron_elas.spec.transaction import Update


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The start of a step, without tensors of the model."""

    step: int
    scheduler_steps: int
    """Samples that the learning-rate schedule has seen."""
    rerun_iteration: int
    cpu_rng: torch.Tensor
    device_rng: dict[str, Any]
    loss_scale: LossScale | None
    cell: tuple[int, ...]
    """The workers whose random streams go together."""
    sums: CapturedSums | None


class MegatronHost:
    """Implements ``runtime.ports.Host`` over the objects that Megatron's training loop holds.

    The loop keeps references to all of them, so they are changed in place and never exchanged.
    """

    def __init__(
        self,
        *,
        worker: int,
        initial: Placement,
        communicator: Communicator,
        route: Route,
        pipeline: RoutedPipeline,
        factory: OptimizerFactory,
        models: ModelFactory,
        model: Sequence[Any],
        optimizer: Any,
        scheduler: Any,
        train_loader: SeekableLoader | None,
        first_step: int,
        log: Log,
        sums: GradientSums | None = None,
    ) -> None:
        self._worker = worker
        self._initial = initial
        self._communicator = communicator
        self._route = route
        self._pipeline = pipeline
        self._factory = factory
        self._models = models
        self._part: ModelPart | None = route.plan.part_of(worker)
        """What the model holds; None while it is being made anew."""
        self._num_stages = route.plan.placement.num_stages
        """Of the plan that the model was made for."""
        self._planned: tuple[ElasticPlan, dict[str, GroupMembers]] | None = None
        """The members of all groups, of the plan that was asked for last."""
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._train_loader = train_loader
        self._first_step = first_step
        self._first_samples = int(get_args().consumed_train_samples)
        self._log = log
        self._sums = sums
        """At ``bitwise`` only."""
        self.checkpoints = Checkpoints(get_args())
        self._step = first_step
        self._realign = True
        self._outer_timers: set[str] = set()
        self._drew_with = self._cell()
        """The cell in which the last step began here."""
        named = dict(named_parameters(model))
        self._access = ShardAccess(named, optimizer)
        self.losses: dict[str, torch.Tensor] = {}
        """Of the step under way or the last one, over the whole batch."""
        self.told_losses: dict[str, torch.Tensor] = {}
        """Those that all workers know, with the same bits."""
        self._groups: dict[str, int] = {}
        """Index of every parameter's optimizer group, by global name, over the whole model."""
        self._inspector = Inspector(model, named, optimizer)
        self._first_loss_scale = read_loss_scale(optimizer)
        """Of the first step."""
        self._loss_scale = self._first_loss_scale
        """Before the step under way or, between steps, the last one."""
        sum_gradients(model)

    def consumed_samples(self, step: int) -> int:
        """Samples of all steps before ``step``."""
        return self._first_samples + (step - self._first_step) * int(get_args().global_batch_size)

    def begin_step(self, step: int, data_iterator: Any) -> None:
        """Bring the data to the start of the step. Called before every run of a step."""
        loader = self._train_loader
        if loader is not None and self._realign:
            loader.seek(self.consumed_samples(step))
            data_iterator.advance()
        self._realign = False
        self._step = step
        self.losses = {}

    def end_step(self) -> None:
        """The step has run; the next one begins where it ended."""
        self._step += 1

    def check_counters(self, step: int) -> None:
        """Compare Megatron's own count of samples with the one this project derives from the step number.

        Raises:
            StateInvalid: They differ, so samples would be lost or doubled.
        """
        counted = int(get_args().consumed_train_samples)
        if counted != self.consumed_samples(step):
            raise StateInvalid(
                f"before step {step} Megatron has counted {counted} samples, expected {self.consumed_samples(step)}: "
                f"samples would be lost or doubled"
            )

    # ------------------------------------------------------------ runtime.ports.Host

    def read_shard(self, flat: torch.Tensor) -> None:
        """See Host."""
        self._access.read(flat)

    def shard_reader(self) -> Callable[[torch.Tensor], None]:
        """See Host."""
        return self._access.read

    def piece_reader(self, layout: ShardLayout) -> Callable[[torch.Tensor], None]:
        """See Host."""
        return self._access.reader(layout)

    def write_shard(self, flat: torch.Tensor) -> None:
        """See Host."""
        self._access.write(flat)

    def tell_audit(self, audit: Audit) -> None:
        """Write what this worker knows of the step under way, its gradients reduced and its shard not yet updated."""
        audit.write(self._route.plan, self._step, self._access.tensors(), self.losses, self._tied_copies())

    def tell_audit_end(self, audit: Audit, plan: ElasticPlan) -> None:
        """Write what training has made. For after the last step; ``plan`` is that in force then."""
        audit.write_end(plan, self._step, self._access.tensors(), self._tied_copies())

    def _tied_copies(self) -> list[str]:
        return [
            name
            for name, param in named_parameters(self._model)
            if getattr(param, "shared_embedding", False) and not name.startswith("embedding.")
        ]

    def share_losses(self, losses: Sequence[dict[str, torch.Tensor]], ballot: tuple[int, int]) -> tuple[int, int]:
        """Sum the step's losses over the cells of the last stage, and have all workers know them. Gives how many
        vote as this one does.
        """
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        own = sum_losses(losses, None if self._sums is not None else group)  # at bitwise they are of all cells
        plan, seat = self._route.plan, self._route.seat
        tells = (seat.stage, seat.cell, seat.lane) == (plan.placement.num_stages - 1, 0, 0)
        self.told_losses, votes = tell_losses(own, tells, ballot)
        self.losses = self.told_losses | own
        return votes

    def read_gradients(self, flat: torch.Tensor) -> None:
        """See Host."""
        self._access.read_gradients(flat)

    def apply_update(self, gradients: torch.Tensor, update: Update) -> None:
        """See Host."""
        self._access.write_gradients(gradients)
        with self.updating():
            finish_update(self._optimizer, update, self._loss_scale)

    def conclude_step(self, step: int, captured: object, update: Update) -> object:
        """See Host."""
        assert isinstance(captured, Captured)
        write_loss_scale(self._optimizer, captured.loss_scale, update)
        if update.applies:
            self._scheduler.num_steps = captured.scheduler_steps
            self._scheduler.step(increment=int(get_args().global_batch_size))
        self._step = step + 1
        return _outcome(self.losses, update)

    def update_settings(self) -> Settings:
        """See Host."""
        return read_settings(self._optimizer, self._loss_scale)

    def make_mirror(self, layout: ShardLayout, flat: torch.Tensor) -> OptimizerMirror:
        """See Host."""
        (part,) = self._optimizer.chained_optimizers
        return OptimizerMirror(
            layout, flat, self._groups.__getitem__, type(part.optimizer), self.update_settings(), part.config.clip_grad,
            self.updating,
        )  # fmt: skip

    def updating(self) -> contextlib.AbstractContextManager[None]:
        """What every update is made in, on owners and on copies."""
        return one_thread() if self._sums is not None else contextlib.nullcontext()

    def plan_groups(self, plan: ElasticPlan) -> dict[str, GroupMembers]:
        """See Host."""
        groups = self._communicator.groups
        planned, members = self._planned or (None, {})
        if planned is not plan or list(members) != [group.group_name for group in groups]:
            members = plan_groups(groups, self._initial, plan.placement, self._worker)
            self._planned = plan, members
        return members

    def follow_groups(self, plan: ElasticPlan) -> None:
        """See Host."""
        last = self._route.plan.placement.workers[-1]
        write_globals(plan, self._worker)
        get_args().pipeline_model_parallel_size = plan.placement.num_stages
        self._route.adopt(plan)
        self._pipeline.reset()
        self._realign = True
        # One that was the last rank may live on in another place: it has told its part, too.
        silent = [worker for worker in self._initial.workers if worker not in plan.placement.workers or worker == last]
        self._log.take_over(silent, last)

    def describe_parameters(self) -> StageContents:
        """See Host."""
        stage = self._initial.seat(self._worker).stage
        return describe_parameters(self._model, self._factory.group_indices(), stage, int(get_args().num_layers))

    def take_catalogue(self, catalogue: Catalogue) -> None:
        """See Host.

        Raises:
            StateInvalid: The optimizer owns something else than the catalogue says.
        """
        plan = self._route.plan
        expected, owned = catalogue.layout(plan, self._worker), self._access.layout()
        if expected != owned:
            raise StateInvalid(
                f"worker {self._worker} owns {owned.numel} elements of optimizer state in {len(owned.pieces)} pieces, "
                f"{expected.numel} in {len(expected.pieces)} were expected: moves after a loss would mix them up. Run "
                f"elas doctor, which compares Megatron with the release that this was written for"
            )
        self._groups = {parameter.name: parameter.group for unit in catalogue.units for parameter in unit}
        if self._sums is not None:
            self._sums.follow(self._model, catalogue)

    def rebuild(self, plan: ElasticPlan) -> None:
        """See Host."""
        part = plan.part_of(self._worker)
        seat = plan.placement.seat(self._worker)
        fits = part == self._part and has_room(self._model, len(plan.placement.replicas(seat.stage, seat.lane)))
        if self._sums is not None:
            self._sums.forget_places(free=not fits)
        if fits:
            fit_buffers(self._model)
        else:
            before, self._part = self._part, None
            num_stages = plan.placement.num_stages
            same_place = before is not None and replace(before, layers=part.layers) == part
            if not (same_place and num_stages == self._num_stages and self._exchange(part.layers)):
                self._remake(num_stages, keep=before is not None and before.lane == part.lane)
            self._part, self._num_stages = part, num_stages
        self._factory.rebuild(self._optimizer)
        named = dict(named_parameters(self._model))
        self._access = ShardAccess(named, self._optimizer)
        self._inspector = Inspector(self._model, named, self._optimizer)

    def _exchange(self, layers: tuple[int, int]) -> bool:
        """Have the model consist of these layers, where they can be exchanged. Gives whether that was done."""
        with self._muted():
            exchanged = self._models.exchange(self._model, layers)
        if exchanged is None:
            return False
        sum_gradients(self._model)
        self._factory.exchange(self._model, *exchanged)
        return True

    def _remake(self, num_stages: int, *, keep: bool) -> None:
        with self._muted():
            groups = self._models.remake(self._model, num_stages, keep=keep)
        sum_gradients(self._model)
        self._factory.renew(self._model, groups)

    def prebuild(self, plan: ElasticPlan, most: int = 1) -> bool:
        """See Host."""
        if self._part is None or plan.placement.find_seat(self._worker) is None:
            return True
        (start, stop), (first, last) = plan.part_of(self._worker).layers, self._part.layers
        coming = [layer + 1 for layer in range(start, stop) if not first <= layer < last]
        self.plan_groups(plan)
        with self._muted():
            return self._models.make_ahead(self._model, coming, most)

    def forget_prebuilt(self) -> None:
        """See Host."""
        self._models.forget_ahead()

    @contextlib.contextmanager
    def _muted(self) -> Iterator[None]:
        """Inside, nothing is communicated."""
        muted = self._communicator.muted
        self._communicator.muted = True
        try:
            yield
        finally:
            self._communicator.muted = muted

    def begin_activity(self, activity: int) -> None:
        """See Host."""
        self._log.seal(activity)
        self._outer_timers = _running_timers()

    def clear_step(self) -> None:
        """See Host."""
        clear_communication(self._model)
        forget()
        self._pipeline.reset()
        for name in _running_timers() - self._outer_timers:
            get_timers()._timers[name]._started = False
        machine = get_rerun_state_machine()
        if machine.state in (RerunState.INITIAL_RUN, RerunState.RERUNNING_IN_PLACE):
            machine.state = RerunState.NOT_RUNNING_YET

    def sync_parameters(self, names: Collection[str] | None = None) -> None:
        """See Host."""
        if names is None or get_args().overlap_param_gather or not keeps_layers(self._model):
            for ddp in self._model:
                ddp.start_param_sync(force_sync=True)
        elif names:
            gather_parameters(self._model, names)

    def has_gathered(self, *, in_step: bool) -> bool:
        """See Host."""
        if not get_args().overlap_param_gather:
            return True
        return in_step and all(
            group.param_gather_dispatched and group.param_gather_handle is None
            for group in bucket_groups_of(self._model)
        )

    def capture(self) -> Captured:
        """See Host."""
        self._drew_with = self._cell()
        self._loss_scale = read_loss_scale(self._optimizer)
        return Captured(
            step=self._step,
            scheduler_steps=self._scheduler.num_steps,
            rerun_iteration=get_rerun_state_machine().current_iteration,
            cpu_rng=torch.get_rng_state(),
            device_rng=dict(get_cuda_rng_tracker().states_),  # without the place of a pass
            loss_scale=self._loss_scale,
            cell=self._drew_with,
            sums=None if self._sums is None else self._sums.capture(),
        )

    def rewind(self, captured: object) -> None:
        """See Host."""
        assert isinstance(captured, Captured)
        self._step = captured.step
        self._scheduler.num_steps = captured.scheduler_steps
        self._scheduler.step(0)
        get_rerun_state_machine().current_iteration = captured.rerun_iteration
        torch.set_rng_state(captured.cpu_rng)
        get_cuda_rng_tracker().set_states(captured.device_rng)
        write_loss_scale(self._optimizer, captured.loss_scale)
        self._loss_scale = captured.loss_scale
        self._seed_new_cell(captured.cell)
        if self._sums is not None and captured.sums is not None:
            self._sums.restore(captured.sums)
        self._realign = True

    def catch_up(self, step: int) -> None:
        """See Host. Steps that others ran count as applied; there are less than none after a return to a checkpoint."""
        missed = step - self._step
        if missed:
            self._scheduler.step(increment=missed * int(get_args().global_batch_size))
            get_rerun_state_machine().current_iteration += missed
            self._step = step
            self._realign = True
        self._seed_new_cell(self._drew_with)

    def read_history(self) -> list[int]:
        """See Host: samples that the learning-rate schedule has seen, and the state of the loss scaler."""
        state = read_loss_scale(self._optimizer)
        return [int(self._scheduler.num_steps), *(() if state is None else state.to_ints())]

    def write_history(self, history: Sequence[int]) -> None:
        """See Host."""
        self._scheduler.num_steps, *state = history
        self._scheduler.step(0)
        if state:
            self._loss_scale = LossScale.from_ints(state)
            write_loss_scale(self._optimizer, self._loss_scale)

    def missed_step(self, step: int, update: Update | None) -> object:
        """See Host."""
        if update is None:
            return {}, 0, False, False, 0, None, None, 0  # as train_step: no losses, no norm
        losses = {name: torch.tensor(loss) for name, loss in update.losses.items()}
        return _outcome(losses, update)

    def _seed_new_cell(self, before: tuple[int, ...]) -> None:
        """Bring the random streams of workers that were not in one cell before together."""
        if before != self._cell():
            seed_streams(int(get_args().seed), self._route.plan.epoch, self._route.seat)

    def _cell(self) -> tuple[int, ...]:
        seat = self._route.seat
        return self._route.plan.placement.stages[seat.stage][seat.cell].workers

    @property
    def checkpoint(self) -> int | None:
        """See Host."""
        return self.checkpoints.newest

    def load_checkpoint(self, step: int) -> None:
        """See Host."""
        write_loss_scale(self._optimizer, self._first_loss_scale)  # one of a run without it says nothing of it
        load_into(self._model, self._optimizer, self._scheduler, self.checkpoints.find(step), step)
        get_rerun_state_machine().current_iteration = step
        self._step = step
        self._realign = True

    def inspect(self) -> Inspection:
        """See Host."""
        # Not get_states(): on workers where a pass is under way, its place is among them.
        streams = get_cuda_rng_tracker().states_
        return self._inspector.inspect(self.consumed_samples(self._step), self.read_history(), streams)


def _running_timers() -> set[str]:
    return {name for name, timer in get_timers()._timers.items() if getattr(timer, "_started", False)}


def _outcome(losses: dict[str, torch.Tensor], update: Update) -> object:
    """As ``train_step`` returns it: losses, skipped, whether to save or to exit and with which code, norm, zeros, and
    the largest attention logit, which is not asked for. It passes zeros on in single precision.
    """
    zeros = None if update.zeros is None else float(torch.tensor(update.zeros, dtype=torch.float32))
    return losses, int(not update.applies), False, False, 0, update.norm, zeros, 0
