"""Faults in the state of a living worker, planted between restoring and the checks of a recovery."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron_elas.spec.shards import Piece


def missing_parameter(host: Any, executor: Any) -> None:
    """The model computes with a parameter that nobody owns."""
    module, leaf, param = _find_parameter(host)
    setattr(module, leaf, torch.nn.Parameter(param.detach().clone()))


def dropped_name(host: Any, executor: Any) -> None:
    """The model computes with the right tensor, but it is no parameter any more."""
    module, leaf, param = _find_parameter(host)
    del module._parameters[leaf]
    module.__dict__[leaf] = param


def permuted_values(host: Any, executor: Any) -> None:
    """Two weights of another worker's part have changed places here."""
    param, start, stop = _others_part(host)
    values = param.data.view(-1)[start:stop]
    first, second = 0, int((values != values[0]).nonzero()[-1])
    values[[first, second]] = values[[second, first]]


def diverged_replica(host: Any, executor: Any) -> None:
    """A weight of another worker's part has another value here."""
    param, start, _ = _others_part(host)
    param.data.view(-1)[start] += 1


def double_owner(host: Any, executor: Any) -> None:
    """This worker's optimizer claims an element of its neighbour's too."""
    for optimizer in host._optimizer.chained_optimizers:
        for param in optimizer.model_param_gbuf_map:
            owned = optimizer._get_model_param_range_map(param)["param"]
            if owned.start > 0:
                owned.start -= 1
                return
    raise AssertionError("this worker owns no range that begins inside a parameter")


def stale_moment(host: Any, executor: Any) -> None:
    """A first moment is not what the source sent."""
    inner, main = _first_master(host)
    inner.state[main]["exp_avg"].view(-1)[0] *= 1.5


def step_counter_reset(host: Any, executor: Any) -> None:
    """The optimizer begins to count its updates anew."""
    for optimizer in host._optimizer.chained_optimizers:
        for state in optimizer.optimizer.state.values():
            if "step" in state:
                state["step"] = torch.zeros_like(state["step"])
        for group in optimizer.optimizer.param_groups:
            if "step" in group:
                group["step"] = 0


def bf16_desync(host: Any, executor: Any) -> None:
    """A weight is not its master, cast, when it is gathered: all replicas get it."""
    _, main = _first_master(host)
    weights = _weights_of(host, main)
    assert weights.dtype == torch.bfloat16, "run it with --bf16"
    weights.view(torch.int16)[0] += 1
    host.sync_parameters()


def diverged_backup(host: Any, executor: Any) -> None:
    """A copy kept for another worker is not what that one has."""
    store = executor.planted_store
    copies = next(iter(store.wards.values()))
    copies.get(max(copies.held))[0] += 1


PLANTS: dict[str, Callable[[Any, Any], None]] = {
    plant.__name__: plant
    for plant in (
        missing_parameter,
        dropped_name,
        permuted_values,
        diverged_replica,
        double_owner,
        stale_moment,
        step_counter_reset,
        bf16_desync,
        diverged_backup,
    )
}
EVERYBODY = {"bf16_desync"}
"""Plants in which all replicas take part: the others gather."""


def plant_before_checks(text: str) -> None:
    """Plant ``NAME@WORKER`` before the first checks of this process, or ``NAME@WORKER*`` before each."""
    from megatron_elas.runtime.executor import Executor

    name, _, where = text.partition("@")
    always, worker = where.endswith("*"), int(where.rstrip("*"))
    verify = Executor._verify
    done: list[str] = []

    def verify_what_was_planted(self: Any, plan: Any, store: Any, *rest: Any) -> None:
        if always or not done:
            done.append(name)
            self.planted_store = store
            if self._state.worker == worker:
                PLANTS[name](self._host, self)
                print(f"planted: {name} on worker {worker}", file=sys.stderr, flush=True)
            elif name in EVERYBODY:
                self._host.sync_parameters()
        verify(self, plan, store, *rest)

    Executor._verify = verify_what_was_planted  # type: ignore[method-assign]


def _find_parameter(host: Any) -> tuple[Any, str, Any]:
    """A small parameter of a layer: its module, its name there, itself."""
    for ddp in host._model:
        for name, param in ddp.module.named_parameters():
            if ("layers." in name and name.endswith("layer_norm_weight")) or name.endswith("layernorm.weight"):
                path, _, leaf = name.rpartition(".")
                return ddp.module.get_submodule(path), leaf, param
    raise AssertionError("no norm in a layer")


def _pieces(host: Any) -> list[tuple[Piece, Any, Any, torch.Tensor]]:
    return list(host._inspector._find_pieces())


def _first_master(host: Any) -> tuple[Any, torch.Tensor]:
    _, inner, main, _ = _pieces(host)[0]
    return inner, main


def _weights_of(host: Any, main: torch.Tensor) -> torch.Tensor:
    return next(weights for *_, other, weights in _pieces(host) if other is main)


def _others_part(host: Any) -> tuple[torch.Tensor, int, int]:
    """(parameter, start, stop) of elements whose owner is another worker."""
    own = {piece.name: piece for piece, *_ in _pieces(host)}
    for name, param in host._inspector._named.items():
        piece = own.get(name)
        start, stop = (0, param.numel()) if piece is None else (piece.stop, param.numel())
        if piece is not None and piece.start > 1:
            start, stop = 0, piece.start
        if stop - start > 1:
            return param, start, stop
    raise AssertionError("this worker owns all")
