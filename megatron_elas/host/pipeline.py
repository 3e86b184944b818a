"""Point-to-point transfers of the stock 1F1B schedule, routed by the plan.

The schedule asks for "the next activation" and "the next gradient". Which workers these come from follows from the
samples: an item gets each of its samples from the cell of the stage before that runs it there, be it in an item of the
same samples, of more or of fewer. So an item may be put together from several cells' outputs, and an output be shared
among several; gradients go the same ways back. Sizes follow from the plan and are not negotiated.

A link hands over in the order of sending. With 1F1B both of its ends run their items in the order of their samples,
and an item's samples follow one another, so that is the order of receiving too. Where the plan gives orders, a cell may
need what comes over a link in another order than it is sent in: it knows the sender's order from the plan, and keeps
what comes too early.

# S sequence, B samples of an item, H hidden: activations and their gradients are (S, B, H).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from megatron_elas.planner.plan import share_items
from megatron_elas.runtime.channels import PIPELINE
from megatron_elas.runtime.communicator.buffers import as_bytes
from megatron_elas.runtime.transport.base import Part, Transport
from megatron_elas.schedule.actions import Order
from megatron_elas.schedule.one_f_one_b import stock_warmup
from megatron_elas.schedule.orders import read_order
from megatron_elas.schedule.routes import Slice, route
from megatron_elas.spec.items import CellItems, Item, StageItems, whole_micro_batches
from megatron_elas.spec.layout import Seat
from megatron_elas.spec.plan import ElasticPlan

Shape = tuple[int, ...]


class Piece(NamedTuple):
    """Samples of one item that come from, or go to, one worker of a neighbouring stage."""

    worker: int
    start: int
    """Of the item's own samples, counted from 0."""
    stop: int
    sample: int
    """The first one, counted in the batch: what the transfer is known by."""


class _Pass(NamedTuple):
    """What a cell runs in a pass over a batch, and where the parts of its items come from and go to."""

    items: CellItems
    before: tuple[tuple[Piece, ...], ...]
    """Of every item, ascending: the stage before."""
    after: tuple[tuple[Piece, ...], ...]
    """The stage after."""
    order: Order | None = None
    """Of the cell's passes; None: that of the stock schedule."""
    coming: dict[int, tuple[tuple[int, int], ...]] | None = None
    """Of every worker that sends to this one: (first sample, samples) of what it sends, in its order. None: that is the
    order of the samples. A worker is on one stage, so it sends activations or gradients, not both."""


class Route:
    """What this worker's cell runs in the pass under way, and who runs the same samples on the neighbouring stages."""

    def __init__(self, plan: ElasticPlan, worker: int) -> None:
        self.worker = worker
        self.adopt(plan)

    def adopt(self, plan: ElasticPlan) -> None:
        """Follow a new plan; the worker must have a seat in it."""
        self.plan = plan
        self.seat: Seat = plan.placement.seat(self.worker)
        self._step = self._make_pass(plan.items, plan.orders)
        self._evaluations: dict[tuple[int, int], _Pass] = {}
        self.begin_step()

    def begin_step(self) -> CellItems:
        """A pass over a step's batch begins; gives this cell's items, in order."""
        self._under_way = self._step
        return self.items

    def begin_evaluation(self, num_microbatches: int, size: int) -> CellItems:
        """A pass over other micro-batches of ``size`` samples begins. They are dealt round."""
        self._under_way = self._evaluation(num_microbatches, size)
        return self.items

    @property
    def items(self) -> CellItems:
        """This cell's, of the pass under way."""
        return self._under_way.items

    @property
    def step_items(self) -> CellItems:
        """This cell's, of a step, whatever pass is under way."""
        return self._step.items

    def evaluation_items(self, num_microbatches: int, size: int) -> CellItems:
        """This cell's, of an evaluation, whatever pass is under way."""
        return self._evaluation(num_microbatches, size).items

    @property
    def order(self) -> Order | None:
        """In which the pass under way runs; None: that of the stock schedule."""
        return self._under_way.order

    @property
    def coming(self) -> dict[int, tuple[tuple[int, int], ...]] | None:
        """What comes from every worker, as in ``_Pass``."""
        return self._under_way.coming

    def before(self, position: int) -> tuple[Piece, ...]:
        """Where the activations of this cell's item at ``position`` come from, and its gradients go to."""
        return self._under_way.before[position]

    def after(self, position: int) -> tuple[Piece, ...]:
        """Where its output goes to, and the gradients of that come from."""
        return self._under_way.after[position]

    def _evaluation(self, num_microbatches: int, size: int) -> _Pass:
        key = num_microbatches, size
        if key not in self._evaluations:
            stages = self.plan.placement.stages
            dealt = (share_items(num_microbatches, len(cells)) for cells in stages)
            self._evaluations[key] = self._make_pass([whole_micro_batches(own, size) for own in dealt])
        return self._evaluations[key]

    def _make_pass(self, stages: Sequence[StageItems], orders: Sequence[Sequence[str]] = ()) -> _Pass:
        stage, cell = self.seat.stage, self.seat.cell
        items = stages[stage][cell]
        before: dict[int, list[tuple[int, Slice]]] = {item.number: [] for item in items}
        after: dict[int, list[tuple[int, Slice]]] = {item.number: [] for item in items}
        if stage > 0:
            for slice_ in route(stages[stage - 1], stages[stage]):
                if slice_.receiver == cell:
                    before[slice_.received_item].append((slice_.sender, slice_))
        if stage + 1 < len(stages):
            for slice_ in route(stages[stage], stages[stage + 1]):
                if slice_.sender == cell:
                    after[slice_.sent_item].append((slice_.receiver, slice_))
        order, coming = None, None
        if orders:
            order, coming = read_order(orders[stage][cell], stage), {}
            inputs = [(sender, slice_.sent_item, slice_) for own in before.values() for sender, slice_ in own]
            gradients = [(sender, slice_.received_item, slice_) for own in after.values() for sender, slice_ in own]
            coming |= self._coming(inputs, stage - 1, orders, "F")
            coming |= self._coming(gradients, stage + 1, orders, "B")
        return _Pass(
            items,
            tuple(tuple(self._pieces(item, before[item.number], stage - 1)) for item in items),
            tuple(tuple(self._pieces(item, after[item.number], stage + 1)) for item in items),
            order,
            coming,
        )

    def _coming(
        self, slices: Sequence[tuple[int, int, Slice]], stage: int, orders: Sequence[Sequence[str]], kind: str
    ) -> dict[int, tuple[tuple[int, int], ...]]:
        """What cells of a stage send: of (cell, its item, slice), after their passes of this kind."""
        found = {}
        for cell in {cell for cell, _, _ in slices}:
            order = [action.item for action in read_order(orders[stage][cell], stage) if action.kind == kind]
            turns = {item: turn for turn, item in enumerate(order)}
            sent = sorted((turns[item], own.start, own.samples) for sender, item, own in slices if sender == cell)
            found[self._worker_of(stage, cell)] = tuple((start, samples) for _, start, samples in sent)
        return found

    def _worker_of(self, stage: int, cell: int) -> int:
        """On this worker's lane."""
        return self.plan.placement.stages[stage][cell].workers[self.seat.lane]

    def _pieces(self, item: Item, slices: Sequence[tuple[int, Slice]], stage: int) -> Iterator[Piece]:
        """Of an item: what crosses to or from the cells of ``stage``."""
        ((first, _),) = item.ranges
        for cell, slice_ in slices:
            worker = self._worker_of(stage, cell)
            yield Piece(worker, slice_.start - first, slice_.stop - first, slice_.start)

    @property
    def warmup(self) -> int:
        """Forward passes before forward and backward take turns.

        The plan says how many: stages with different numbers of cells need other ones than the stock schedule has. With
        those the lazy parameter gather, which all cells of a stage join before their first pass, deadlocked here.
        """
        if self.plan.warmups:
            return self.plan.warmups[self.seat.stage]
        return stock_warmup(self.seat.stage, [len(stage) for stage in self.plan.placement.stages])


class MessageTimes(Protocol):
    """Told of every message, where messages take more time than they need here."""

    def sends(self, tag: int) -> None:
        """A message is about to be sent."""

    def receives(self, sender: int, tag: int, samples: int) -> None:
        """A message is here; returns when it may be used."""


class RoutedPipeline:
    """Stands in for Megatron's P2PCommunicator, method by method; and transfers by the positions of items.

    Sends are eager, so a worker that waits for an activation never keeps another from sending.
    """

    def __init__(
        self,
        config: Any,
        route: Route,
        transport: Transport,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Make it.

        Args:
            config: Megatron's, of the model.
            route: Which samples run where.
            transport: Links to the others.
            waiting: Entered while this worker waits for an activation or a gradient.
        """
        self.config = config
        self._waiting = waiting
        self._route = route
        self._transport = transport
        self.times: MessageTimes | None = None
        self.reset()

    def reset(self) -> None:
        """Begin a pass over a batch: the next transfer of every kind is for the first item."""
        self._forward_in = self._forward_out = self._backward_in = self._backward_out = 0
        coming = self._route.coming
        self._coming = None if coming is None else {worker: iter(sent) for worker, sent in coming.items()}
        self._early: dict[tuple[int, int], torch.Tensor] = {}
        """(worker, first sample) -> what came before it was needed."""

    def receive_input(self, tensor_shapes: Sequence[Shape], position: int) -> torch.Tensor | None:
        """The activation of the item at ``position``, (S, B, H); None on the first stage."""
        if self.is_pp_first_stage:
            return None
        return self._receive(tensor_shapes, position, self._route.before(position), 0)

    def receive_gradient(self, tensor_shapes: Sequence[Shape], position: int) -> torch.Tensor | None:
        """The gradient of that item's output, (S, B, H); None on the last stage."""
        if self.is_pp_last_stage:
            return None
        return self._receive(tensor_shapes, position, self._route.after(position), 1)

    def send_output(self, output: Any, position: int) -> None:
        """Pass that item's output on to the next stage, if there is one."""
        if not self.is_pp_last_stage:
            self._send(output, self._route.after(position), 0)

    def send_gradient(self, input_gradient: Any, position: int) -> None:
        """Pass the gradient of that item's input back to the stage it came from, if there is one."""
        if not self.is_pp_first_stage:
            self._send(input_gradient, self._route.before(position), 1)

    @property
    def is_pp_first_stage(self) -> bool:
        """Whether this worker feeds the pipeline."""
        return self._route.seat.stage == 0

    @property
    def is_pp_last_stage(self) -> bool:
        """Whether this worker computes the loss."""
        return self._route.seat.stage == self._route.plan.placement.num_stages - 1

    @property
    def current_stage(self) -> int:
        """Stage of this worker."""
        return self._route.seat.stage

    @property
    def total_stages(self) -> int:
        """What makes ``total_stages - current_stage - 1``, the schedule's warm-up, the route's warm-up."""
        return self._route.seat.stage + 1 + self._route.warmup

    def recv_forward(self, tensor_shapes: Sequence[Shape], is_first_stage: bool) -> list[torch.Tensor | None]:
        """The next item's activation, (S, B, H); None on the first stage."""
        if is_first_stage:
            return [None]
        position = self._forward_in
        self._forward_in += 1
        return [self._receive(tensor_shapes, position, self._route.before(position), 0)]

    def recv_backward(self, tensor_shapes: Sequence[Shape], is_last_stage: bool) -> list[torch.Tensor | None]:
        """The gradient of the oldest output not yet differentiated, (S, B, H); None on the last stage."""
        if is_last_stage:
            return [None]
        position = self._backward_in
        self._backward_in += 1
        return [self._receive(tensor_shapes, position, self._route.after(position), 1)]

    def send_forward(self, output_tensors: Any, is_last_stage: bool) -> None:
        """Pass an output on to the next stage."""
        if not is_last_stage:
            pieces = self._route.after(self._forward_out)
            self._forward_out += 1
            self._send(output_tensors, pieces, 0)

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        """Pass an input's gradient back to the stage it came from."""
        if not is_first_stage:
            pieces = self._route.before(self._backward_out)
            self._backward_out += 1
            self._send(input_tensor_grads, pieces, 1)

    def send_forward_recv_backward(
        self, output_tensors: Any, tensor_shapes: Sequence[Shape], is_last_stage: bool
    ) -> list[torch.Tensor | None]:
        """``send_forward``, then ``recv_backward``."""
        self.send_forward(output_tensors, is_last_stage)
        return self.recv_backward(tensor_shapes, is_last_stage)

    def send_backward_recv_forward(
        self, input_tensor_grads: Any, tensor_shapes: Sequence[Shape], is_first_stage: bool
    ) -> list[torch.Tensor | None]:
        """``send_backward``, then ``recv_forward``."""
        self.send_backward(input_tensor_grads, is_first_stage)
        return self.recv_forward(tensor_shapes, is_first_stage)

    def _receive(
        self, tensor_shapes: Sequence[Shape], position: int, pieces: Sequence[Piece], backward: int
    ) -> torch.Tensor:
        """The tensor of the item at ``position``, put together; Megatron knows the size of a whole micro-batch only."""
        sequence, _, hidden = tensor_shapes[0]
        samples = self._route.items[position].samples
        if len(pieces) == 1:
            return self._receive_piece((sequence, samples, hidden), pieces[0], backward).requires_grad_()
        tensor = torch.empty((sequence, samples, hidden), dtype=self.config.pipeline_dtype)
        for piece in pieces:
            shape = (sequence, piece.stop - piece.start, hidden)
            tensor[:, piece.start : piece.stop] = self._receive_piece(shape, piece, backward)
        return tensor.requires_grad_()

    def _receive_piece(self, shape: Shape, piece: Piece, backward: int) -> torch.Tensor:
        with self._waiting():
            if self._coming is None:
                tensor = self._take(shape, piece.worker, piece.sample, backward)
            else:
                self._take_until(shape, piece, backward)
                tensor = self._early.pop((piece.worker, piece.sample))
            if self.times is not None:
                self.times.receives(piece.worker, _tag(piece.sample, backward), tensor.shape[1])
        return tensor

    def _take_until(self, shape: Shape, piece: Piece, backward: int) -> None:
        """Take what the piece's worker has sent, in its order, until the piece is here."""
        assert self._coming is not None
        while (piece.worker, piece.sample) not in self._early:
            sample, samples = next(self._coming[piece.worker])
            tensor = self._take((shape[0], samples, shape[2]), piece.worker, sample, backward)
            self._early[piece.worker, sample] = tensor

    def _take(self, shape: Shape, worker: int, sample: int, backward: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self.config.pipeline_dtype)
        self._transport.exchange(PIPELINE, _tag(sample, backward), (), (Part(worker, as_bytes(tensor)),))
        return tensor

    def _send(self, tensors: Any, pieces: Sequence[Piece], backward: int) -> None:
        tensor = (tensors[0] if isinstance(tensors, list) else tensors).detach()
        for piece in pieces:
            own = tensor[:, piece.start : piece.stop].contiguous()  # lives until its bytes are taken
            if self.times is not None:
                self.times.sends(_tag(piece.sample, backward))
            self._transport.post(PIPELINE, _tag(piece.sample, backward), Part(piece.worker, as_bytes(own)))


def _tag(sample: int, backward: int) -> int:
    return (2 * sample + backward) & 0xFFFF
