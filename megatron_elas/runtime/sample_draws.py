"""Cuts what torch draws along the samples of an item, so that each of them gets what it would get alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_elas.spec.errors import BadUsage


def sample_dim(shape: Sequence[int], samples: int, what: str) -> int:
    """The dimension along which samples lie, as in Megatron: of four or more the first (b, heads, s, s), of three the
    second (s, b, h), of two or one the first (b, ...).

    Args:
        shape: Of what is drawn.
        samples: Of the item.
        what: Is drawn, for the error.

    Raises:
        BadUsage: That dimension has another size, so that the samples' parts cannot be told.
    """
    dim = 1 if len(shape) == 3 else 0
    if len(shape) == 0 or shape[dim] != samples:
        raise BadUsage(
            f"{what} of shape {list(shape)} for an item of {samples} {'sample' if samples == 1 else 'samples'}: which "
            f"part is which sample's can be told of [b, ..., ..., ...], [s, b, h], [b, ...] and [b] only. Draw in one "
            f"of these shapes, or leave random streams to Megatron with --elastic-rng megatron"
        )
    return dim


class SampleDraws(TorchDispatchMode):
    """While it is in force, draws from the default generator are made sample by sample."""

    def __init__(self, samples: Callable[[], int], turn: Callable[[int], AbstractContextManager[object]]) -> None:
        """``samples``: of the item under way. ``turn``: inside, the default generator draws for this one of them."""
        super().__init__()
        self._samples = samples
        self._turn = turn

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would import its compiler, for seconds, to keep it from a function that is never compiled."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchDispatchMode."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        return self._draw(func, dict(zip(names, args, strict=False)) | kwargs)

    def _draw(self, func: Any, given: dict[str, Any]) -> Any:
        """``func`` of arguments by name, sample by sample."""
        samples, what = self._samples(), str(func)
        first = next((value for value in given.values() if isinstance(value, torch.Tensor)), None)
        shape = given.get("size", ()) if first is None else first.shape
        dim = sample_dim(shape, samples, what)
        if samples == 1:
            return _call(func, given)
        if func._schema.name.endswith("_"):
            assert first is not None
            for i in range(samples):
                part = first.narrow(dim, i, 1)
                own = torch.empty_like(part).copy_(part)
                with self._turn(i):
                    _call(func, _cut(given, shape, dim, i) | {_first_name(func): own})
                part.copy_(own)
            return first
        drawn = []
        for i in range(samples):
            with self._turn(i):
                drawn.append(_call(func, _cut(given, shape, dim, i)))
        return _join(drawn, dim, what)


def _call(func: Any, given: dict[str, Any]) -> Any:
    """With what is named in the schema as positional given so."""
    arguments = func._schema.arguments
    positional = [given[a.name] for a in arguments if not a.kwarg_only and a.name in given]
    named = {a.name: given[a.name] for a in arguments if a.kwarg_only and a.name in given}
    return func(*positional, **named)


def _first_name(func: Any) -> str:
    name: str = func._schema.arguments[0].name
    return name


def _cut(given: dict[str, Any], shape: Sequence[int], dim: int, i: int) -> dict[str, Any]:
    """The arguments for one sample."""
    samples = shape[dim]

    def cut(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() == len(shape) and value.shape[dim] == samples:
            return value.narrow(dim, i, 1)
        if name == "size":
            return [*value[:dim], 1, *value[dim + 1 :]]
        return value

    return {name: cut(name, value) for name, value in given.items()}


def _join(drawn: list[Any], dim: int, what: str) -> Any:
    """What was drawn for all samples, as one."""
    if isinstance(drawn[0], torch.Tensor):
        if drawn[0].dim() <= dim or drawn[0].shape[dim] != 1:
            sample_dim(drawn[0].shape, -1, what)
        return torch.cat(drawn, dim)
    return tuple(_join(list(parts), dim, what) for parts in zip(*drawn, strict=True))
