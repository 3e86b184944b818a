"""Random numbers: the CUDA generator and the CPU generator are one and the same here.

Draws on CPU tensors come from torch's default generator, so that generator has to play the device's. Whatever else
draws from it (a data loader's seed, for example) must be given a generator of its own.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from megatron_elas.platform.cpu.substitution import Substitutions

_TRACKER_LOGGER = "megatron.core.tensor_parallel.random"
_TRACKER_WARNING = "CPU RNG state changed"


class DefaultGenerators:
    """Stands in for ``torch.cuda.default_generators``; any index gives the CPU generator."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.random.default_generator

    def __len__(self) -> int:
        return 1


class WarningFilter(logging.Filter):
    """Drops Megatron's warning that the CPU's stream moved inside a device region; here it must."""

    def filter(self, record: logging.LogRecord) -> bool:
        """False for that warning."""
        return _TRACKER_WARNING not in record.getMessage()


_FILTER = WarningFilter()


def substitute(substitutions: Substitutions) -> None:
    """Route the random part of ``torch.cuda`` to the CPU generator."""

    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        return torch.random.get_rng_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
        torch.random.set_rng_state(new_state)

    def manual_seed(seed: int) -> None:
        torch.random.default_generator.manual_seed(int(seed))

    def initial_seed() -> int:
        return int(torch.random.default_generator.initial_seed())

    for owner in (torch.cuda, torch.cuda.random):
        for function in (get_rng_state, set_rng_state, manual_seed, initial_seed):
            substitutions.put(owner, function.__name__, function)
        substitutions.put(owner, "manual_seed_all", manual_seed)
    substitutions.put(torch.cuda, "default_generators", DefaultGenerators())
    logging.getLogger(_TRACKER_LOGGER).addFilter(_FILTER)


def restore_warning() -> None:
    """Let Megatron's warning through again."""
    logging.getLogger(_TRACKER_LOGGER).removeFilter(_FILTER)
