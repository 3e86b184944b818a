"""A dropout mask is a function of its key: the same from C and from torch, fair, and unlike those of other keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from megatron_elas.runtime import dropout
from megatron_elas.runtime.dropout import Masked, apply_mask, draw_mask
from megatron_elas.runtime.random_streams import sample_root, seed64

KEYS = (0, 1, 2**32, 2**63 + 5, 0xFEDCBA9876543210, 2**64 - 1)


@pytest.fixture(params=["native", "torch"])
def _either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "torch":
        monkeypatch.setattr(dropout, "_LIBRARY", None)
    elif dropout._LIBRARY is None:
        pytest.skip("the C library is not built: no compiler")
    yield


def mask_of(key: int, probability: float = 0.1, size: int = 1000) -> torch.Tensor:
    mask = torch.empty(size, dtype=torch.bool)
    draw_mask(mask, key, probability)
    return mask


@pytest.mark.skipif(dropout._LIBRARY is None, reason="the C library is not built: no compiler")
@pytest.mark.parametrize("size", [0, 1, 7, 64, 1003])
def test_masks_and_products_from_c_have_the_bits_of_those_from_torch(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 100
    values[:3] = torch.tensor([float("nan"), float("inf"), -0.0])[:size]
    for key, probability in itertools.product(KEYS, (1e-9, 0.1, 0.5, 0.999, 1.0)):
        mask = mask_of(key, probability, size)
        products = [apply_mask(values.to(dtype), mask, 1 / 0.9) for dtype in (torch.float32, torch.bfloat16)]
        with monkeypatch.context() as patch:
            patch.setattr(dropout, "_LIBRARY", None)
            assert torch.equal(mask_of(key, probability, size), mask)
            for product in products:
                twin = apply_mask(values.to(product.dtype), mask, 1 / 0.9)
                assert twin.dtype == product.dtype
                assert torch.equal(twin.isnan(), product.isnan())
                assert torch.equal(twin.nan_to_num(), product.nan_to_num())


@pytest.mark.usefixtures("_either")
def test_a_mask_is_what_it_was_in_earlier_releases() -> None:
    """Checkpoints go on with the masks that they began with."""
    stays = "".join(str(int(bit)) for bit in mask_of(0x0123456789ABCDEF, 0.25, 64))
    assert stays == "1001011111011111011011010111111111111111011011111111111101001011"


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 1.0])
def test_as_many_elements_stay_as_the_probability_says(probability: float) -> None:
    stays = torch.stack([mask_of(key * 7919, probability, 20_000) for key in range(20)]).double()
    error = (probability * (1 - probability) / stays.numel()) ** 0.5
    assert abs(float(stays.mean()) - (1 - probability)) <= 4 * error


def test_masks_of_near_coordinates_and_neighbouring_elements_have_nothing_to_do_with_each_other() -> None:
    size = 100_000
    coordinates = [(7, 5, 1, 0, None), (8, 5, 1, 0, None), (7, 6, 1, 0, None), (7, 5, 2, 0, None), (7, 5, 1, 1, None)]
    coordinates += [(7, 5, 1, 0, 0), (7, 5, 1, 0, 1)]
    masks = [
        mask_of(seed64(sample_root(1234, step, sample), layer, site, lane), 0.5, size).double()
        for step, sample, layer, site, lane in coordinates
    ]
    for first, second in itertools.combinations_with_replacement(masks, 2):
        for shift in (-64, -2, -1, 0, 1, 2, 64):
            if first is not second or shift != 0:
                agreed = float((first.roll(shift) == second).double().mean())
                assert abs(agreed - 0.5) < 5 * 0.5 / size**0.5


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_stays_is_scaled_and_so_is_its_gradient(dtype: torch.dtype) -> None:
    values = torch.randn(6, 5, dtype=dtype).transpose(0, 1).requires_grad_()
    mask = mask_of(3, 0.5, 30).view(5, 6)
    dropped = Masked.apply(values, mask, 2.0)
    assert dropped.dtype == dtype
    assert torch.equal(dropped, values * mask * 2)
    gradient = torch.randn(5, 6, dtype=dtype)
    dropped.backward(gradient)
    assert torch.equal(values.grad, gradient * mask * 2)  # type: ignore[arg-type]
