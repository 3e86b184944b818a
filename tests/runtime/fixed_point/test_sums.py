"""Sums in fixed point: exact, the same in any order and grouping, and the same in C and in torch."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch

from megatron_elas.runtime.fixed_point import sums
from megatron_elas.spec.exponents import NOT_FINITE, UNKNOWN, judge, largest_term

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["native", "torch"], autouse=True)
def _both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "torch":
        monkeypatch.setattr(sums, "_library", None)
    elif sums._library is None:
        pytest.skip("the C library is not built")
    yield


def gradients(count: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """(count, numel) of very different sizes, some of them zero, ties of the rounding among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, numel, generator=generator) * 2.0 ** torch.randint(
        -20, 1, (count, numel), generator=generator
    )
    values[:, ::7] = 0
    values[:, 3::11] = torch.round(values[:, 3::11] * 64) / 64
    return values.to(dtype)


def total_of(parts: torch.Tensor, exponent: int) -> tuple[torch.Tensor, int]:
    """Sum of the rows, and the bits of their largest element."""
    total = torch.zeros(parts.shape[1], dtype=torch.int64)
    largest = torch.zeros(1, dtype=torch.int32)
    for part in parts:
        sums.add(part, total, exponent, largest)
    return total, int(largest)


def exponent_for(parts: torch.Tensor) -> int:
    """As a step would find it out."""
    _, bits = total_of(parts, 0)
    verdict = judge([UNKNOWN], [bits], largest_term(len(parts)))
    return verdict.exponents[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 7, 8, 129, 1000])
def test_any_order_and_any_split_has_the_same_bits(dtype: torch.dtype, numel: int) -> None:
    parts = gradients(12, numel, dtype)
    exponent = exponent_for(parts)
    want, bits = total_of(parts, exponent)
    assert bits == int(parts.float().abs().max().view(1).view(torch.int32))
    for seed in range(20):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
        cut = 1 + seed % 11
        shares = [total_of(parts[order[:cut]], exponent)[0], total_of(parts[order[cut:]], exponent)[0]]
        assert torch.equal(shares[0] + shares[1], want)
    half = numel // 2
    left, right = (total_of(columns.contiguous(), exponent)[0] for columns in (parts[:, :half], parts[:, half:]))
    assert torch.equal(torch.cat([left, right]), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_term_is_the_nearest_integer_and_the_sum_is_exact(dtype: torch.dtype) -> None:
    parts = gradients(5, 301, dtype, seed=1)
    exponent = exponent_for(parts) - 30  # so coarse that terms are rounded
    total, _ = total_of(parts, exponent)
    power = Fraction(2) ** exponent
    want = [sum(round(Fraction(float(value)) * power) for value in column) for column in parts.T]
    assert total.tolist() == want


def test_both_kinds_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in DTYPES:
        parts = gradients(6, 5000, dtype, seed=2)
        for exponent in (exponent_for(parts), 5, -3, 90):
            ours = total_of(parts[:, :4097], exponent)
            with monkeypatch.context() as patch:
                patch.setattr(sums, "_library", None)
                theirs = total_of(parts[:, :4097], exponent)
            assert ours[1] == theirs[1]
            if exponent < 60:  # above, terms overflow and are worth nothing
                assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("exponent", [-100, -30, 0, 30, 126, 127, 160])
def test_a_total_is_rounded_once(exponent: int) -> None:
    generator = torch.Generator().manual_seed(3)
    total = torch.randint(-(2**62), 2**62, (999,), generator=generator) >> torch.randint(
        0, 60, (999,), generator=generator
    )
    result = torch.empty(999)
    sums.to_float(total, exponent, result)
    nearest = torch.tensor([int_to_fp32(value) for value in total.tolist()], dtype=torch.float64)
    assert torch.equal(result.double(), (nearest * 2.0**-exponent).float().double())


def int_to_fp32(value: int) -> float:
    """The nearest number of 24 bits, ties to even."""
    shift = max(0, abs(value).bit_length() - 24)
    return float(round(Fraction(value, 2**shift)) * 2**shift)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_told(dtype: torch.dtype, value: float) -> None:
    parts = torch.ones(3, 70, dtype=dtype)
    parts[1, 66] = value
    assert total_of(parts, 20)[1] >= NOT_FINITE


def test_an_overflow_is_told() -> None:
    calm = gradients(8, 100, torch.float32, seed=4).clamp(-1, 1)
    exponent, limit = exponent_for(calm), largest_term(8)
    spike = calm.clone()
    spike[3, 99] = -(2.0**12)
    assert not judge([exponent], [total_of(calm, exponent)[1]], limit).misfits
    verdict = judge([exponent], [total_of(spike, exponent)[1]], limit)
    assert verdict.runs_again
    total, bits = total_of(spike, verdict.exponents[0])
    assert not judge(verdict.exponents, [bits], limit).misfits
    result = torch.empty(100)
    sums.to_float(total, verdict.exponents[0], result)
    assert torch.allclose(result, spike.double().sum(0).float(), rtol=1e-6, atol=1e-6)


def test_a_gradient_with_other_strides_is_added_where_it_belongs() -> None:
    matrix = gradients(6, 10, torch.float32, seed=5)
    total, largest = torch.zeros(60, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    sums.add(matrix.t().reshape(-1), total, 30, largest)
    want, _ = total_of(matrix.t().contiguous().view(1, -1), 30)
    assert torch.equal(total, want)
