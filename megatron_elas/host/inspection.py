"""Looks at a worker's model and optimizer as they are, for the checks before training goes on.

What each check looks at is read from another place, so that one that went wrong is not hidden by the others: names
from the modules, weights from the parameters that the buffers were made for, owned ranges from the optimizer's map,
and the weights that belong to a master from where the optimizer writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_elas.host.model import buffers_of, named_parameters
from megatron_elas.host.optimizer import MOMENTS
from megatron_elas.runtime.verification.checksum import key_of
from megatron_elas.runtime.verification.inspection import (
    UNKNOWN,
    Counters,
    Inspection,
    inspect_piece,
    weight_sums,
)
from megatron_elas.spec.shards import Piece


class Inspector:
    """Made when model and optimizer were built; the names are those of then."""

    def __init__(self, model: Sequence[Any], named: Mapping[str, torch.nn.Parameter], optimizer: Any) -> None:
        """``named``: the model's parameters by global name."""
        self._model = model
        self._chained = optimizer
        self._named = named
        self._name_of = {param: name for name, param in self._named.items()}

    def inspect(self, consumed_samples: int, history: Sequence[int], streams: Mapping[str, Any]) -> Inspection:
        """Everything. Reads all weights and the whole shard once. ``history``: see ``Host.read_history``."""
        pieces = []
        updates: set[int] = set()
        offset = 0
        for piece, inner, main, weights in self._find_pieces():
            state = inner.state.get(main, {})
            slots = [main.detach().view(-1), *(_flat(state.get(moment)) for moment in MOMENTS)]
            pieces.append(inspect_piece(piece, offset, slots, weights))
            updates.add(_count_updates(inner, state))
            offset += main.numel()
        return Inspection(
            parameters=self.list_parameters(),
            weights=weight_sums({name: param.data for name, param in self._named.items()}),
            pieces=pieces,
            counters=Counters(
                consumed_samples=consumed_samples,
                schedule_samples=history[0],
                loss_scale=key_of(*map(str, history[1:])),
                optimizer_steps=(min(updates, default=UNKNOWN), max(updates, default=UNKNOWN)),
                streams=key_of(*sorted(streams)),
            ),
        )

    def list_parameters(self) -> dict[str, int]:
        """Elements of every parameter of the modules that is the one the buffers were made for, by name."""
        in_buffers = {param for buffer in buffers_of(self._model) for param in buffer.param_index_map}
        return {name: param.numel() for name, param in named_parameters(self._model) if param in in_buffers}

    def _find_pieces(self) -> Iterator[tuple[Piece, Any, torch.Tensor, torch.Tensor]]:
        """(piece, inner optimizer, its master, its weights), in flat order."""
        for optimizer in self._chained.chained_optimizers:
            found = []
            for param, (gbuf, _, bucket) in optimizer.model_param_gbuf_map.items():
                owned = optimizer._get_model_param_range_map(param)
                group, order = optimizer.model_param_group_index_map[param]
                main = optimizer.optimizer.param_groups[group]["params"][order]
                piece = Piece(name=self._name_of[param], start=owned["param"].start, stop=owned["param"].end)
                place = owned["gbuf_world"]
                weights = optimizer.buffers[gbuf].param_data[place.start : place.end]
                found.append((gbuf, bucket, place.start, piece, main, weights))
            for *_, piece, main, weights in sorted(found, key=lambda entry: entry[:3]):
                yield piece, optimizer.optimizer, main, weights


def _flat(values: torch.Tensor | None) -> torch.Tensor | None:
    return None if values is None else values.detach().view(-1)


def _count_updates(inner: Any, state: Mapping[str, Any]) -> int:
    """Updates of one master: torch's optimizers count by master, fused ones by parameter group."""
    if "step" in state:
        return int(state["step"])
    return max((int(group.get("step") or 0) for group in inner.param_groups), default=0)
