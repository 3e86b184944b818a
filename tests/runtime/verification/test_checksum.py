"""Checksums see every bit and every place, add up over ranges, and are the same in C and in Python."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_elas.runtime.verification import checksum as module
from megatron_elas.runtime.verification.checksum import BLOCK, MODULUS, checksum, edge_of, key_of, range_sums, to_row

KEY = key_of("slot", "master")
DTYPES = (torch.float32, torch.bfloat16)


def values_of(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.fixture(params=["native", "python"])
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(module, "_library", None)
    elif module._library is None:
        pytest.skip("the C library is not built")


@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bit_anywhere_changes_it(dtype: torch.dtype) -> None:
    values = values_of(2 * BLOCK + 5, dtype)
    expected = checksum(values, KEY)
    assert checksum(values.clone(), KEY) == expected
    bits = values.element_size() * 8
    words = torch.int32 if bits == 32 else torch.int16
    for element in (0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 4):
        for bit in (0, bits - 2, bits - 1):
            changed = values.clone()
            changed.view(words)[element] ^= torch.tensor(
                -(2 ** (bits - 1)) if bit == bits - 1 else 1 << bit, dtype=words
            )
            assert checksum(changed, KEY) != expected, (element, bit)


@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("first", "second"), [(0, 1), (3, 35), (0, 32 * 64), (7, BLOCK + 7), (1, 2 * BLOCK)])
def test_two_values_that_change_places_change_it(dtype: torch.dtype, first: int, second: int) -> None:
    values = values_of(2 * BLOCK + 5, dtype)
    swapped = values.clone()
    swapped[[first, second]] = values[[second, first]]
    assert checksum(swapped, KEY) != checksum(values, KEY)


@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [0, 1, 17, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_parts_add_up_wherever_the_cut_is(dtype: torch.dtype, cut: int) -> None:
    values = values_of(3 * BLOCK + 11, dtype)
    start = 5
    parts = checksum(values[:cut], KEY, start) + checksum(values[cut:], KEY, start + cut)
    assert parts % MODULUS == checksum(values, KEY, start)


@pytest.mark.parametrize("dtype", DTYPES)
def test_c_and_python_agree(dtype: torch.dtype) -> None:
    if module._library is None:
        pytest.skip("the C library is not built")
    for count in (0, 1, 2, 7, BLOCK - 1, 70 * BLOCK + 3):
        values = values_of(count, dtype)
        for start in (0, 1, BLOCK - 3, 123457, 1 << 40):
            for key in (0, KEY, MODULUS - 1):
                assert checksum(values, key, start) == module._checksum_in_python(values, key, start)


@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize("size", [64, 1000, BLOCK, 1 << 20])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool])
def test_ranges_add_up_wherever_the_cuts_are(dtype: torch.dtype, size: int) -> None:
    values = values_of(2 * BLOCK + 11) > 0 if dtype == torch.bool else values_of(2 * BLOCK + 11, dtype)
    whole = range_sums(values, KEY, 0, size)
    assert len(whole) == -(-values.numel() // size)
    assert sum(whole) % MODULUS == checksum(values, KEY)
    for cuts in ([1], [63, 64, 65, 1000], [BLOCK - 1, BLOCK, 2 * BLOCK + 10], list(range(0, 2 * BLOCK, 777))):
        edges = [0, *cuts, values.numel()]
        total = [0] * len(whole)
        for low, high in itertools.pairwise(edges):
            for number, part in enumerate(range_sums(values[low:high], KEY, low, size), low // size):
                total[number] += part
        assert [own % MODULUS for own in total] == whole
    changed = values.clone()
    changed[-1] = ~changed[-1] if dtype == torch.bool else changed[-1] + 1
    others = range_sums(changed, KEY, 0, size)
    assert others[:-1] == whole[:-1] and others[-1] != whole[-1]


def test_c_and_python_agree_on_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    if module._library is None:
        pytest.skip("the C library is not built")
    values = values_of(3 * BLOCK + 5)
    cases = [
        (view, start, size) for view in (values, values[:0], values > 0) for start in (0, 63) for size in (64, BLOCK)
    ]
    native = [range_sums(values, KEY, start, size) for values, start, size in cases]
    monkeypatch.setattr(module, "_library", None)
    assert [range_sums(values, KEY, start, size) for values, start, size in cases] == native


@pytest.mark.usefixtures("_engine")
def test_other_rows_have_other_checksums_and_zeros_have_none() -> None:
    values = values_of(100)
    assert checksum(values, key_of("weight", "a")) != checksum(values, key_of("weight", "b"))
    assert checksum(values, KEY, 1) != checksum(values, KEY, 2)
    assert checksum(torch.zeros(100), KEY) == 0
    matrix = values.view(10, 10)
    assert checksum(matrix, KEY) == checksum(values, KEY)
    assert checksum(matrix.T, KEY) == checksum(matrix.T.contiguous(), KEY) != checksum(matrix, KEY)


def test_weights_are_distinct_and_fit_into_32_bits() -> None:
    weights = module.WIDE_WEIGHTS.tolist()
    assert len(set(weights)) == len(weights) == BLOCK
    assert all(0 < weight < 1 << 32 for weight in weights)
    assert module.WEIGHTS.tolist() == weights


def test_elements_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1, 2 or 4 bytes, got torch\.float64"):
        checksum(torch.zeros(1, dtype=torch.float64), KEY)


def test_a_checksum_becomes_an_integer_with_a_sign_and_no_other() -> None:
    for number in (0, 1, (1 << 63) - 1, 1 << 63, MODULUS - 1):
        assert to_row(number) % MODULUS == number
        assert -(1 << 63) <= to_row(number) < 1 << 63
    assert edge_of(KEY, 1) != edge_of(KEY, 2)
