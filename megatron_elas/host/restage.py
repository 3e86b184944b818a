"""A living worker comes to hold other layers: model, DDP and its buffers made anew in the objects that everybody holds.

The training loop, the schedule's configuration (``no_sync``, parameter and gradient synchronisation) and the optimizer
chain keep the DDP objects they have. So Megatron builds the model as it built the first one, but where it would make a
DDP object, the old one is initialised again, and where it would make a layer that is there already, it gets that.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.utils import get_model_config
from megatron.training import get_args

from megatron_elas.host.layer_edit import can_exchange, exchange_layers
from megatron_elas.host.layer_modules import (
    layers_of,
    make_layer,
    renew_parameters,
    set_values,
    taken_over,
    values_outside_layers,
)
from megatron_elas.host.model import buffers_of
from megatron_elas.spec.buckets import bucket_size
from megatron_elas.spec.layout import Seat


def has_room(model: Sequence[Any], replicas: int) -> bool:
    """Whether the buffers can be cut for that many replicas as they are."""
    for buffer in buffers_of(model):
        ends = [*(bucket.offset for bucket in buffer.buckets[1:]), buffer.numel]
        for bucket, end in zip(buffer.buckets, ends, strict=True):
            if bucket.offset + bucket_size(bucket.numel_unpadded, replicas) > end:
                return False
    return True


class ModelFactory:
    """Remembers how Megatron built the model and sorted its parameters, to do both again for other layers."""

    def __init__(self, build: Callable[[Any], list[Any]]) -> None:
        """``build`` makes the model's chunks in DDP, as Megatron did at first; it is given their configuration."""
        self._build = build
        self._launch_stages = int(get_args().pipeline_model_parallel_size)
        self.sort_parameters: Callable[[list[Any]], list[dict[str, Any]]] | None = None
        """Megatron's parameter groups of these chunks; set when Megatron has sorted those of the first model."""
        self._made_ahead: dict[int, torch.nn.Module] = {}
        """Layers by number, from 1."""

    def make_ahead(self, model: Sequence[Any], numbers: Iterable[int], most: int) -> bool:
        """Make layers that the next ``remake`` will need, at most so many now. Draws no random number.

        Args:
            model: As it is now; nothing of it changes.
            numbers: Of all layers that come, from 1. Others that were made ahead are let go.
            most: Layers to make in this call.

        Returns:
            Whether all are there that can be made ahead.
        """
        wanted = set(numbers)
        self._made_ahead = {number: layer for number, layer in self._made_ahead.items() if number in wanted}
        missing = sorted(wanted - self._made_ahead.keys())
        with _nothing_drawn(get_model_config(model[0])):
            for number in missing[:most]:
                layer = make_layer(model, number)
                if layer is None:
                    return True
                self._made_ahead[number] = layer
        return len(missing) <= most

    def forget_ahead(self) -> None:
        """Let go of layers that were made ahead."""
        self._made_ahead = {}

    def exchange(self, model: Sequence[Any], layers: tuple[int, int]) -> tuple[list[Any], list[dict[str, Any]]] | None:
        """Have the model consist of these layers, all else as it is. Nothing is drawn; communication must be muted.

        Args:
            model: The chunks.
            layers: ``[start, stop)``, from 0.

        Returns:
            All parameters in the model's order, and Megatron's groups of those that came; None if this model's layers
            cannot be exchanged, so that it is as it was.
        """
        if not can_exchange(model):
            return None
        numbers = range(layers[0] + 1, layers[1] + 1)
        staying = layers_of(model)
        missing = [number for number in numbers if number not in staying]
        if not self.make_ahead(model, missing, len(missing)) or not all(n in self._made_ahead for n in missing):
            return None
        coming, self._made_ahead = self._made_ahead, {}
        arrived = exchange_layers(model[0], {number: staying.get(number) or coming[number] for number in numbers})
        assert self.sort_parameters is not None, "Megatron has built no optimizer"
        return list(model[0].params_with_grad), self.sort_parameters([_Named(arrived)]) if arrived else []

    def remake(self, model: Sequence[Any], num_stages: int, *, keep: bool) -> list[dict[str, Any]]:
        """Make the model anew for the layers and groups of the plan in force.

        No random number is drawn. Communication must be muted: a tied embedding is copied between the ends of the
        pipeline when it is made, and groups of parameters are gathered over the world.

        Args:
            model: The chunks.
            num_stages: Of the pipeline.
            keep: What the model has and gets again keeps its values, and a layer its modules; for the same lane only.
                Other parameters hold nothing yet.

        Returns:
            Megatron's parameter groups; those without a parameter here are missing.
        """
        config, training = get_model_config(model[0]), model[0].training
        kept = layers_of(model) if keep else {}
        values = values_outside_layers(model) if keep else {}
        ahead, self._made_ahead = self._made_ahead if keep else {}, {}
        # Megatron takes the hooks away for evaluations and saves, and asks that they are not there when it sets them.
        unhooked = [ddp.use_forward_hook and not ddp.remove_forward_pre_hook_handles for ddp in model]
        config.pipeline_model_parallel_size = num_stages
        renew_parameters(kept.values())
        with _nothing_drawn(config), _made_in_place(model, values), taken_over(ahead | kept):
            get_args().pipeline_model_parallel_size = self._launch_stages  # flags that say more of stages agree with it
            made = self._build(config)
        get_args().pipeline_model_parallel_size = num_stages
        for old, new, without_hooks in zip(model, made, unhooked, strict=True):
            assert old is new, f"Megatron made another {type(new).__name__}"
            # A script may make one per model all the same; the training loop goes on writing into the first one.
            object.__setattr__(get_model_config(new), "__dict__", config.__dict__)
            if not training:  # what is made anew is made for training
                new.eval()
            if without_hooks:
                new.disable_forward_pre_hook(param_sync=False)
        assert self.sort_parameters is not None, "Megatron has built no optimizer"
        return self.sort_parameters(list(model))


class _Named:
    """Stands for a model of these parameters, to have them sorted."""

    def __init__(self, named: Mapping[str, torch.nn.Parameter]) -> None:
        self._named = named

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """With the names that they have inside DDP."""
        return ((f"module.{name}", param) for name, param in self._named.items())


@contextlib.contextmanager
def _made_in_place(model: Sequence[Any], values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, where Megatron makes DDP objects it gets those of ``model``, emptied and initialised, one by one, with
    these values of parameters outside of layers, by global name.

    They let go of their parameters and buffers before new ones are made, so that not all are in memory together.
    """
    from megatron.training import training
    from megatron.training.models import dist_utils

    for ddp in model:
        for hook in ddp.remove_forward_pre_hook_handles.values():
            hook.remove()
        _clear_caches(ddp)
        vars(ddp).clear()
    left = iter(model)
    stock = training.DDP

    class InPlace(stock):  # type: ignore[misc, valid-type]
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            ddp = next(left)
            set_values(inspect.signature(stock).bind(*args, **kwargs).arguments["module"], values)
            stock.__init__(ddp, *args, **kwargs)
            return ddp

    training.DDP = dist_utils.DistributedDataParallel = InPlace
    try:
        yield
    finally:
        training.DDP = dist_utils.DistributedDataParallel = stock


def _clear_caches(model: torch.nn.Module) -> None:
    """Empty the caches of the modules' methods: they keep their objects alive, those of rotary embeddings for one."""
    for kind in {base for module in model.modules() for base in type(module).__mro__}:
        for method in vars(kind).values():
            if hasattr(method, "cache_clear"):
                method.cache_clear()


@contextlib.contextmanager
def _nothing_drawn(config: Any) -> Iterator[None]:
    """Inside, models are made without initial values; random number generators are afterwards as they were."""
    args, tracker = get_args(), get_cuda_rng_tracker()
    host, streams = torch.get_rng_state(), dict(tracker.get_states())
    device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    initial = config.perform_initialization, args.perform_initialization
    config.perform_initialization = args.perform_initialization = False
    try:
        yield
    finally:
        config.perform_initialization, args.perform_initialization = initial
        torch.set_rng_state(host)
        tracker.set_states(streams)
        if device is not None:
            torch.cuda.set_rng_state(device)


def seed_streams(seed: int, epoch: int, seat: Seat) -> None:
    """Seed all random streams for a cell of workers that were not together before.

    What Megatron draws outside of tensor-parallel regions must be the same on all lanes of a cell.

    Args:
        seed: Megatron's ``--seed``.
        epoch: The first one of the cell.
        seat: Of this worker.
    """
    seed += 100 * seat.stage + 10_000 * epoch
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, tp_rank=seat.lane, ep_rank=0, etp_rank=seat.lane)
