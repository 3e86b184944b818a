"""Point-to-point transfers of the stock 1F1B schedule, routed by the plan.

The schedule asks for "the next activation" and "the next gradient"; which worker that is follows from
the micro-batch: stage ``s`` gets micro-batch ``g`` from the cell of stage ``s - 1`` that runs ``g``.

# S sequence, B micro-batch, H hidden: activations and their gradients are (S, B, H).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megatron_elas.planner.plan import share_items
from megatron_elas.runtime.channels import PIPELINE
from megatron_elas.runtime.communicator.buffers import as_bytes
from megatron_elas.runtime.transport.base import Part, Transport
from megatron_elas.schedule.one_f_one_b import stock_warmup
from megatron_elas.spec.layout import Seat
from megatron_elas.spec.plan import ElasticPlan

Shape = tuple[int, ...]


class Route:
    """Which micro-batches this worker's cell runs in the pass under way, and who runs them elsewhere."""

    def __init__(self, plan: ElasticPlan, worker: int) -> None:
        self.worker = worker
        self.adopt(plan)

    def adopt(self, plan: ElasticPlan) -> None:
        """Follow a new plan; the worker must have a seat in it."""
        self.plan = plan
        self.seat: Seat = plan.placement.seat(self.worker)
        self.begin(plan.num_items)

    def begin(self, num_items: int) -> Sequence[int]:
        """Start a pass over ``num_items`` micro-batches of the whole batch; gives this cell's, in order.

        A training step has the plan's number; an evaluation may have another and is dealt round.
        """
        self.num_items = num_items
        self._cell_of = [
            {item: cell for cell, items in enumerate(self._deal(num_items, stage)) for item in items}
            for stage in range(self.plan.placement.num_stages)
        ]
        self.items = self.items_for(num_items)
        return self.items

    def items_for(self, num_items: int) -> tuple[int, ...]:
        """This cell's micro-batches of a pass over ``num_items``, in order, whatever pass is under way."""
        return self._deal(num_items, self.seat.stage)[self.seat.cell]

    def _deal(self, num_items: int, stage: int) -> tuple[tuple[int, ...], ...]:
        """Micro-batches of every cell of a stage."""
        if num_items == self.plan.num_items:
            return self.plan.items[stage]
        return share_items(num_items, len(self.plan.placement.stages[stage]))

    def host_of(self, stage: int, item: int) -> int:
        """The worker of ``stage``, in this worker's lane, that runs ``item``."""
        return self.plan.placement.stages[stage][self._cell_of[stage][item]].workers[self.seat.lane]

    @property
    def warmup(self) -> int:
        """Forward passes before forward and backward take turns.

        The plan says how many: stages with different numbers of cells need other ones than the stock schedule has. With
        those the lazy parameter gather, which all cells of a stage join before their first pass, deadlocked here.
        """
        if self.plan.warmups:
            return self.plan.warmups[self.seat.stage]
        return stock_warmup(self.seat.stage, [len(stage) for stage in self.plan.placement.stages])


class RoutedPipeline:
    """Stands in for Megatron's P2PCommunicator, method by method.

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
            route: Which micro-batches run where.
            transport: Links to the others.
            waiting: Entered while this worker waits for an activation or a gradient.
        """
        self.config = config
        self._waiting = waiting
        self._route = route
        self._transport = transport
        self.reset()

    def reset(self) -> None:
        """Begin a pass: the next transfer of every kind is for the first micro-batch."""
        self._forward_in = self._forward_out = self._backward_in = self._backward_out = 0

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
        """The next micro-batch's activation, (S, B, H); None on the first stage."""
        if is_first_stage:
            return [None]
        item = self._route.items[self._forward_in]
        self._forward_in += 1
        return [self._receive(tensor_shapes, self._route.seat.stage - 1, item, 0)]

    def recv_backward(self, tensor_shapes: Sequence[Shape], is_last_stage: bool) -> list[torch.Tensor | None]:
        """The gradient of the oldest output not yet differentiated, (S, B, H); None on the last stage."""
        if is_last_stage:
            return [None]
        item = self._route.items[self._backward_in]
        self._backward_in += 1
        return [self._receive(tensor_shapes, self._route.seat.stage + 1, item, 1)]

    def send_forward(self, output_tensors: Any, is_last_stage: bool) -> None:
        """Pass an output on to the next stage."""
        if not is_last_stage:
            item = self._route.items[self._forward_out]
            self._forward_out += 1
            self._send(output_tensors, self._route.seat.stage + 1, item, 0)

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        """Pass an input's gradient back to the stage it came from."""
        if not is_first_stage:
            item = self._route.items[self._backward_out]
            self._backward_out += 1
            self._send(input_tensor_grads, self._route.seat.stage - 1, item, 1)

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

    def _receive(self, tensor_shapes: Sequence[Shape], stage: int, item: int, backward: int) -> torch.Tensor:
        tensor = torch.empty(tuple(tensor_shapes[0]), dtype=self.config.pipeline_dtype)
        part = Part(self._route.host_of(stage, item), as_bytes(tensor))
        with self._waiting():
            self._transport.exchange(PIPELINE, _tag(item, backward), (), (part,))
        return tensor.requires_grad_()

    def _send(self, tensors: Any, stage: int, item: int, backward: int) -> None:
        tensor = (tensors[0] if isinstance(tensors, list) else tensors).detach().contiguous()
        part = Part(self._route.host_of(stage, item), as_bytes(tensor))
        self._transport.post(PIPELINE, _tag(item, backward), part)


def _tag(item: int, backward: int) -> int:
    return (2 * item + backward) & 0xFFFF
