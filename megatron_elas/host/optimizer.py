"""Megatron's distributed optimizer: its shard read and written by name, and itself replaced in place.

# P elements of this worker's shard (see spec.shards).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_elas.spec.audit import GRADIENTS, STATES
from megatron_elas.spec.shards import SLOTS, Piece, ShardLayout

MOMENTS = SLOTS[1:]


class ShardAccess:
    """Reads and writes the optimizer state of this worker's shard, until an optimizer of the chain is replaced."""

    def __init__(self, named: Mapping[str, torch.nn.Parameter], optimizer: Any) -> None:
        """``named``: the parameters by global name."""
        self._chained = optimizer
        found = tuple(_find_pieces(named, optimizer))
        self._pieces = tuple((piece, inner, main) for piece, inner, main, _ in found)
        """(piece, inner optimizer, fp32 master of the piece): found once, read in every step."""
        self._gradients = [param.main_grad.view(-1)[piece.start : piece.stop] for piece, _, _, param in found]
        """Of every piece, inside DDP's buffers."""
        self._counts = [param.numel() for *_, param in found]
        """Elements of every piece's whole parameter."""

    def layout(self) -> ShardLayout:
        """What the optimizer in use owns, in flat order."""
        return ShardLayout(pieces=tuple(piece for piece, _, _ in self._pieces))

    @torch.no_grad()
    def read_gradients(self, flat: torch.Tensor) -> None:
        """Copy the reduced gradients of the shard into ``flat``, fp32, P elements."""
        if self._gradients:  # none where this worker owns nothing but padding
            torch._foreach_copy_(self._cut(flat), self._gradients)

    @torch.no_grad()
    def write_gradients(self, flat: torch.Tensor) -> None:
        """Put them back, for ``prepare_grads`` to find."""
        if self._gradients:
            torch._foreach_copy_(self._gradients, self._cut(flat))

    def _cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return list(flat.split([piece.numel for piece, _, _ in self._pieces]))

    def tensors(self) -> Iterator[tuple[Piece, int, dict[str, torch.Tensor | None]]]:
        """Every piece: its place, the elements of the whole parameter, and its values by kind (``spec.audit``), as they
        are; None: not yet made, so zeros.
        """
        for (piece, inner, main), gradient, count in zip(self._pieces, self._gradients, self._counts, strict=True):
            state = inner.state.get(main, {})
            slots = (main, *(state.get(moment) for moment in MOMENTS))
            values = {
                kind: None if slot is None else slot.detach().view(-1) for kind, slot in zip(STATES, slots, strict=True)
            }
            yield piece, count, {**values, GRADIENTS: gradient}

    def read(self, flat: torch.Tensor) -> None:
        """Copy the shard into ``flat``, fp32, 3 P + 1 elements. Moments not yet made read as zeros."""
        self._read(self._pieces, flat)

    def reader(self, layout: ShardLayout) -> Callable[[torch.Tensor], None]:
        """``read`` of these pieces alone, which must be some of the shard's, in the order of the layout."""
        by_piece = {found[0]: found for found in self._pieces}
        return functools.partial(self._read, [by_piece[piece] for piece in layout.pieces])

    @torch.no_grad()
    def _read(self, pieces: Sequence[tuple[Piece, Any, torch.Tensor]], flat: torch.Tensor) -> None:
        slots = flat[:-1].view(len(SLOTS), -1)
        position = 0
        step = 0.0
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for piece, inner, main in pieces:
            span = slice(position, position + piece.numel)
            state = inner.state.get(main, {})
            targets.append(slots[0, span])
            sources.append(main.detach().view(-1))
            for slot, moment in enumerate(MOMENTS, start=1):
                if moment in state:
                    targets.append(slots[slot, span])
                    sources.append(state[moment].detach().view(-1))
                else:
                    slots[slot, span].zero_()
            if "step" in state:
                step = float(state["step"])
            position += piece.numel
        if targets:  # none where this worker owns nothing but padding
            torch._foreach_copy_(targets, sources)
        flat[-1] = step or self._group_step()

    @torch.no_grad()
    def write(self, flat: torch.Tensor) -> None:
        """Make ``flat`` (as given by ``read``) the state in use, and cast the masters into the parameters."""
        slots = flat[:-1].view(len(SLOTS), -1)
        step = float(flat[-1])
        position = 0
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for piece, inner, main in self._pieces:
            span = slice(position, position + piece.numel)
            targets.append(main.detach().view(-1))
            sources.append(slots[0, span])
            if step == 0:
                inner.state.pop(main, None)
            else:
                targets.extend(moment.view(-1) for moment in _make_state(inner, main, step))
                sources.extend(slots[1:, span])
            position += piece.numel
        if targets:  # none where this worker owns nothing but padding
            torch._foreach_copy_(targets, sources)
        for optimizer in self._chained.chained_optimizers:
            optimizer._copy_main_params_to_model_params()
            for group in optimizer.optimizer.param_groups:
                if "step" in group:  # fused optimizers count there
                    group["step"] = int(step)

    def _group_step(self) -> float:
        groups = (g for o in self._chained.chained_optimizers for g in o.optimizer.param_groups)
        return float(max((g.get("step") or 0 for g in groups), default=0))


def _make_state(inner: Any, main: torch.Tensor, step: float) -> list[torch.Tensor]:
    """The moments of one master, whose contents are to be written; made where there are none yet."""
    state = inner.state[main]
    for moment in MOMENTS:
        if moment not in state:
            state[moment] = torch.empty_like(main)
    if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        state["step"] = torch.tensor(step)
    return [state[moment] for moment in MOMENTS]


def _find_pieces(
    named: Mapping[str, torch.nn.Parameter], chained: Any
) -> Iterator[tuple[Piece, Any, torch.Tensor, torch.nn.Parameter]]:
    """(piece, inner optimizer, fp32 master of the piece, parameter), in the order of ``Catalogue.layout``."""
    name_of = {param: name for name, param in named.items()}
    for optimizer in chained.chained_optimizers:
        found = []
        for param, (gbuf, _, bucket) in optimizer.model_param_gbuf_map.items():
            owned = optimizer._get_model_param_range_map(param)
            group, order = optimizer.model_param_group_index_map[param]
            main = optimizer.optimizer.param_groups[group]["params"][order]
            piece = Piece(name=name_of[param], start=owned["param"].start, stop=owned["param"].end)
            found.append((gbuf, bucket, owned["gbuf_world"].start, piece, main, param))
        for *_, piece, main, param in sorted(found, key=lambda entry: entry[:3]):
            yield piece, optimizer.optimizer, main, param


class OptimizerFactory:
    """Remembers how Megatron built each optimizer of the chain, to build it again for other groups.

    ``get_megatron_optimizer`` itself gathers over the world, which workers of unchanged stages do not join.
    """

    def __init__(self, build: Callable[..., Any]) -> None:
        self._build = build
        self._signature = inspect.signature(build)
        self._calls: list[dict[str, Any]] = []

    def record(self, *args: Any, **kwargs: Any) -> Any:
        """Build as Megatron asked, and keep the arguments (parameter lists copied: building overwrites them)."""
        call = dict(self._signature.bind(*args, **kwargs).arguments)
        self._calls.append({**call, "param_groups": _copy_groups(call["param_groups"])})
        return self._build(**call)

    def group_indices(self) -> dict[Any, int]:
        """Of every parameter, the index of its group in the optimizer that has it; groups are the same everywhere."""
        return {
            param: index
            for call in self._calls
            for index, group in enumerate(call["param_groups"])
            for param in group["params"]
        }

    def renew(self, model: Sequence[Any], groups: Sequence[dict[str, Any]]) -> None:
        """Have later optimizers built of other parameters.

        Args:
            model: The chunks as they are now.
            groups: Megatron's parameter groups of these; those without a parameter here may be missing.
        """
        (call,) = self._calls
        found = [(_settings(group), group["params"]) for group in groups]
        wanted = [_settings(group) for group in call["param_groups"]]
        assert all(settings in wanted for settings, _ in found), f"no group {found} at launch, only {wanted}"
        for settings, group in zip(wanted, call["param_groups"], strict=True):
            group["params"] = [param for known, params in found if known == settings for param in params]
        call["per_model_buffers"] = {number: chunk.buffers for number, chunk in enumerate(model)}

    def exchange(
        self, model: Sequence[Any], params: Sequence[torch.nn.Parameter], arrived: Sequence[dict[str, Any]]
    ) -> None:
        """Have later optimizers built of these parameters, of which some are known.

        Args:
            model: The chunks as they are now.
            params: In the model's order.
            arrived: Megatron's parameter groups of those that are not known.
        """
        (call,) = self._calls
        wanted = [_settings(group) for group in call["param_groups"]]
        index_of = self.group_indices()
        for group in arrived:
            for param in group["params"]:
                index_of[param] = wanted.index(_settings(group))
        for index, group in enumerate(call["param_groups"]):
            group["params"] = [param for param in params if index_of[param] == index]
        call["per_model_buffers"] = {number: chunk.buffers for number, chunk in enumerate(model)}

    def rebuild(self, chained: Any) -> None:
        """Put new optimizers, empty of state, into the chain that everybody holds."""
        fresh = []
        for call, old in zip(self._calls, chained.chained_optimizers, strict=True):
            new = self._build(**{**call, "param_groups": _copy_groups(call["param_groups"])})
            _inherit(new, old)
            fresh.append(new)
        chained.chained_optimizers[:] = fresh


def _copy_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**group, "params": list(group["params"])} for group in groups]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _inherit(new: Any, old: Any) -> None:
    """Carry over what training set on the old optimizer: learning rates, weight decays, loss scale."""
    for fresh, used in zip(new.optimizer.param_groups, old.optimizer.param_groups, strict=True):
        fresh.update({key: value for key, value in used.items() if key != "params"})
    if old.grad_scaler is not None:
        new.grad_scaler = old.grad_scaler
