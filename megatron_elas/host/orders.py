"""Runs a cell's passes in the order of the plan, in the place of Megatron's 1F1B schedule.

Passes are Megatron's own ``forward_step`` and ``backward_step``, looked up where they are wrapped. Around them it does
what ``forward_backward_pipelining_without_interleaving`` does, whose source is pinned in ``host.elastic_seams``:
gradients are reduced with the cell's last gradient, outputs that were sent are freed, and so on. With one stage it
stands for ``forward_backward_no_pipelining``, which does less of the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron_elas.host.pipeline import RoutedPipeline
from megatron_elas.host.split_backward import Deferred, deferring
from megatron_elas.schedule.actions import Order
from megatron_elas.spec.items import CellItems

Timing = Callable[[str], AbstractContextManager[None]]


def run_order(
    order: Order,
    items: CellItems,
    pipeline: RoutedPipeline,
    timing: Timing,
    *,
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Any = None,
    p2p_communicator: Any = None,
    pg_collection: Any = None,
    force_all_reduce: bool | None = False,
) -> list[Any]:
    """A training pass over the cell's items.

    ``order`` and ``items`` are the cell's, the order is checked (``schedule.orders``); ``pipeline`` is at its begin;
    ``timing`` makes what a pass of the given kind runs in. The others are those that Megatron's schedules take.

    Returns:
        What the loss function told of every item, in the order of forward passes; empty before the last stage.

    Raises:
        EpochChanged: The membership ended. Nothing is kept.
    """
    assert not forward_only, "orders are for training; evaluations run the stock schedule"
    assert p2p_communicator is pipeline and pg_collection is not None and num_microbatches == len(items)
    model, data_iterator = _only(model), _only(data_iterator)
    config = get_model_config(model)
    if config.overlap_p2p_comm:
        raise ValueError("orders have no transfers that overlap with passes: leave --overlap-p2p-communication out")
    shapes = schedules.get_tensor_shapes(
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=decoder_seq_length,
        config=config,
        tp_group=pg_collection.tp,
        cp_group=pg_collection.cp,
    )
    sent_shapes = shapes
    if adjust_tensor_shapes_fn is not None:
        shapes, sent_shapes = adjust_tensor_shapes_fn(shapes, sent_shapes)

    embedding = None
    if config.finalize_model_grads_func is not None:
        embedding = schedules.clear_embedding_activation_buffer(config, model, pipeline.is_pp_last_stage)
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    if getattr(config, "moe_paged_stash", False):
        schedules.paged_stash_reset(enabled=True, config=config)

    sync_off = (config.no_sync_func or contextlib.nullcontext)()
    sync_off.__enter__()
    is_off = True
    passes = _Passes(
        order, items, pipeline, timing, forward_step_func, data_iterator, model, config, shapes, sent_shapes,
        pg_collection.cp.size(), collect_non_loss_data, first_val_step,
    )  # fmt: skip
    last = max(i for i, action in enumerate(order) if action.kind != "F")
    try:
        for i, action in enumerate(order):
            # As in the stock schedule: with a function of its own, later stages reduce when all is done.
            if i == last and (config.grad_sync_func is None or pipeline.is_pp_first_stage):
                sync_off.__exit__(None, None, None)
                is_off = False
            passes.run(action.kind, action.item)
    finally:
        passes.clear()
    if is_off:
        sync_off.__exit__(None, None, None)
        if config.grad_sync_func is not None:
            config.grad_sync_func(model.parameters())

    if config.finalize_model_grads_func is not None:
        schedules.finish_embedding_wgrad_compute(config, embedding, pipeline.is_pp_last_stage, pg_collection.tp)
        config.finalize_model_grads_func(
            [model],
            passes.num_tokens if config.calculate_per_token_loss else None,
            pg_collection=pg_collection,
            force_all_reduce=force_all_reduce,
        )
    if getattr(config, "fine_grained_activation_offloading", False):
        schedules.off_interface.reset()
    if config.timers is not None:
        config.timers("forward-backward").stop()
    if getattr(config, "cuda_graph_impl", None) == "local":
        schedules.create_cudagraphs()
    return passes.told


class _Passes:
    """What is between the passes of a step's items. Items go by their numbers, transfers by their positions."""

    def __init__(
        self, order: Order, items: CellItems, pipeline: RoutedPipeline, timing: Timing, forward_step_func: Any,
        data_iterator: Any, model: Any, config: Any, shapes: Any, sent_shapes: Any, cp_size: int,
        collect_non_loss_data: bool, first_val_step: bool | None,
    ) -> None:  # fmt: skip
        self._positions = {item.number: position for position, item in enumerate(items)}
        self._pipeline, self._timing = pipeline, timing
        self._forward_step_func, self._data_iterator = forward_step_func, data_iterator
        self._model, self._config = model, config
        self._shapes, self._sent_shapes = shapes, sent_shapes
        self._cp_size, self._collect_non_loss_data = cp_size, collect_non_loss_data
        self._first_val_step = first_val_step
        self._window = None
        if config.num_microbatches_with_partial_activation_checkpoints is not None:
            self._window = _most_in_flight(order)
        whole = _used_twice(model)
        accumulate = functools.partial(_accumulate, model)
        self._deferred = {action.item: Deferred(accumulate, whole) for action in order if action.kind == "W"}
        self._inputs: dict[int, Any] = {}
        self._outputs: dict[int, Any] = {}
        self.told: list[Any] = []
        self.num_tokens = torch.zeros([], dtype=torch.int, device="cuda")

    def run(self, kind: str, item: int) -> None:
        if kind == "F":
            self._forward(item)
        elif kind == "B":
            self._backward(item)
        else:
            self._weights(item)

    def clear(self) -> None:
        """Let go of all activations."""
        self._inputs.clear()
        self._outputs.clear()
        for deferred in self._deferred.values():
            deferred.clear()

    def _forward(self, item: int) -> None:
        position, pipeline, config = self._positions[item], self._pipeline, self._config
        checkpoints = None
        if self._window is not None:
            checkpoints = position % self._window >= config.num_microbatches_with_partial_activation_checkpoints
        entry = pipeline.receive_input(self._shapes, position)
        with deferring(self._deferred.get(item)):
            output, tokens = schedules.forward_step(
                self._forward_step_func,
                self._data_iterator,
                self._model,
                len(self._positions),
                entry,
                self.told,
                config,
                cp_group_size=self._cp_size,
                collect_non_loss_data=self._collect_non_loss_data,
                checkpoint_activations_microbatch=checkpoints,
                is_first_microbatch=schedules.check_first_val_step(self._first_val_step, False, position == 0),
                current_microbatch=position,
                is_last_stage=pipeline.is_pp_last_stage,
            )
        pipeline.send_output(output, position)
        self.num_tokens += tokens
        self._inputs[item], self._outputs[item] = entry, output
        schedules.deallocate_output_tensor(output, config.deallocate_pipeline_outputs)

    def _backward(self, item: int) -> None:
        position, pipeline = self._positions[item], self._pipeline
        entry, output = self._inputs.pop(item), self._outputs.pop(item)
        gradient = pipeline.receive_gradient(self._sent_shapes, position)
        with deferring(self._deferred.get(item)):
            of_input = schedules.backward_step(entry, output, gradient, self._config)
        pipeline.send_gradient(of_input, position)

    def _weights(self, item: int) -> None:
        timers = self._config.timers
        if timers is not None:
            timers("backward-compute", log_level=2).start()
        with self._timing("weight_gradient"):
            self._deferred[item].run()
        if timers is not None:
            timers("backward-compute").stop()


def _accumulate(model: Any, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """As autograd would: the parameter gets its gradient, and its hook adds that to the gradients of the step."""
    parameter.grad = gradient.to(parameter.dtype)
    model._make_backward_post_hook(parameter)()


def _only(things: Any) -> Any:
    if not isinstance(things, list):
        return things
    (thing,) = things
    return thing


def _most_in_flight(order: Order) -> int:
    """Most items between their forward and their backward pass."""
    held = most = 0
    for action in order:
        held += {"F": 1, "B": -1, "W": 0}[action.kind]
        most = max(most, held)
    return most


def _used_twice(model: Any) -> frozenset[int]:
    """``id`` of the parameters that an item's pass uses more than once: an embedding tied on one stage."""
    while hasattr(model, "module"):
        model = model.module
    tied = getattr(model, "share_embeddings_and_output_weights", False)
    if tied and getattr(model, "pre_process", False) and getattr(model, "post_process", False):
        return frozenset([id(model.shared_embedding_or_output_weight())])
    return frozenset()
