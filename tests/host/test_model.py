"""The checksum of the parameters tells replicas apart that differ in one bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch

from megatron_elas.host.model import hash_parameters


def model_of(*flats: torch.Tensor) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(buffers=[SimpleNamespace(param_data=flat) for flat in flats], expert_parallel_buffers=[]),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_anywhere_changes_the_checksum(dtype: torch.dtype) -> None:
    flat = torch.randn(2560, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = hash_parameters(model_of(flat))
    assert hash_parameters(model_of(flat.clone())) == expected
    bits = flat.element_size() * 8
    words = torch.int32 if bits == 32 else torch.int16
    for element in (0, 1, 1279, 2559):
        for bit in (0, bits - 2, bits - 1):
            changed = flat.clone()
            changed.view(words)[element] ^= torch.tensor(
                -(2 ** (bits - 1)) if bit == bits - 1 else 1 << bit, dtype=words
            )
            assert hash_parameters(model_of(changed)) != expected, (element, bit)


def test_every_buffer_counts() -> None:
    first, second = torch.arange(128.0), torch.arange(128.0) + 1
    assert hash_parameters(model_of(first, second)) != hash_parameters(model_of(second, first))
    assert 0 <= hash_parameters(model_of(first, second)) < 1 << 63
