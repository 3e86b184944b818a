"""Keeps a sample's loss mask its own, whoever reads it."""

from __future__ import annotations

import functools
from typing import Any

import torch


def wrap_sample(original: Any) -> Any:
    """``GPTDataset.__getitem__`` whose masks do not depend on what the process read before.

    Megatron 0.19.2 keeps the mask of the first sample for all others when no flag makes masks differ, and then marks
    the first sample's padding in that very tensor. So tokens that a process happened to see first are left out of all
    its samples, and a sample counts differently when another worker reads it.
    """

    @functools.wraps(original)
    def __getitem__(self: Any, idx: int | None) -> Any:
        first = self.masks_and_position_ids_are_cacheable and not self.masks_and_position_ids_are_cached
        sample = original(self, idx)
        if first:  # what is kept for all counts every token
            self.cached_loss_mask = torch.ones_like(self.cached_loss_mask)
        return sample

    return __getitem__
