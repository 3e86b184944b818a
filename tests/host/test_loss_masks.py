"""A sample's loss mask does not depend on what the process read before it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset

from megatron_elas.host.loss_masks import wrap_sample

PAD = 9
TEXTS = ([PAD, PAD, 3, 4, 5], [1, 2, 3, 4, 5], [1, PAD, 3, 4, PAD])
MASKS = ([0, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 0])
"""Of the tokens to be predicted, those after the first."""


class Dataset(GPTDataset):
    """Megatron's, over TEXTS, without files."""

    def __init__(self, **settings: Any) -> None:
        self.config = SimpleNamespace(
            add_extra_token_to_sequence=True, tokenizer=SimpleNamespace(eod=8), reset_position_ids=False,
            reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False, inter_document_masking=False,
            **settings,
        )  # fmt: skip
        self._pad_token_id = PAD
        self.masks_and_position_ids_are_cacheable = True
        self.masks_and_position_ids_are_cached = False
        self.cached_attention_mask = self.cached_loss_mask = self.cached_position_ids = None

    def _query_document_sample_shuffle_indices(self, idx: int) -> Any:
        return numpy.array(TEXTS[idx]), None, [5]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_masks_are_the_same_in_every_order(order: tuple[int, ...]) -> None:
    read = wrap_sample(GPTDataset.__getitem__)
    dataset = Dataset()
    masks = {number: read(dataset, number)["loss_mask"] for number in order}
    for number, mask in masks.items():
        assert torch.equal(mask, torch.tensor(MASKS[number], dtype=torch.float)), number
    assert dataset.masks_and_position_ids_are_cached


def test_megatron_itself_masks_in_all_samples_what_the_first_one_masks() -> None:
    """When this fails Megatron has been mended, and the wrapper can go."""
    dataset = Dataset()
    GPTDataset.__getitem__(dataset, 0)
    assert GPTDataset.__getitem__(dataset, 1)["loss_mask"].tolist() == MASKS[0]
