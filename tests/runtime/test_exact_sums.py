"""Sums of squares are exact up to the rounding of one block, and the same bits for any cut, order and worker."""

from __future__ import annotations

import itertools
import math
import random
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elas.runtime import exact_sums as module
from megatron_elas.runtime.exact_sums import LIMBS, ROW, read_sum, sum_squares
from megatron_elas.spec.buckets import CUT


@pytest.fixture(params=["c", "python"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to make a row."""
    if request.param == "python":
        monkeypatch.setattr(module, "_library", None)
    elif module._library is None:
        pytest.skip("the C library is not built; run make native")
    return str(request.param)


def numbers(numel: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    """Of very different sizes, so that another order would round differently."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=draw) * torch.exp(spread * torch.randn(numel, generator=draw))


def cut(tensor: torch.Tensor, places: list[int]) -> list[torch.Tensor]:
    edges = sorted({0, tensor.numel(), *(place * CUT for place in places if place * CUT < tensor.numel())})
    return [tensor[start:stop] for start, stop in itertools.pairwise(edges)]


@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    places=st.lists(st.integers(1, 46), max_size=6),
    workers=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=50)
def test_any_cut_order_and_number_of_workers_give_the_same_bits(
    sizes: list[int], places: list[int], workers: int, seed: int
) -> None:
    whole = [numbers(size, seed + number) for number, size in enumerate(sizes)]
    pieces = [piece for tensor in whole for piece in cut(tensor, places)]
    shuffle = random.Random(seed)
    shuffle.shuffle(pieces)
    rows = [sum_squares(pieces[worker::workers]) for worker in range(workers)]
    want = sum_squares(whole)
    assert read_sum(sum(rows, torch.zeros(ROW, dtype=torch.int64))) == read_sum(want)


def test_a_cut_through_a_block_can_give_other_bits() -> None:
    """So the tests above would see what they are for."""
    differ = 0
    for seed in range(200):
        tensor = numbers(CUT, seed)
        differ += read_sum(sum_squares([tensor])) != read_sum(sum_squares([tensor[:7], tensor[7:]]))
    assert differ > 0


def test_the_sum_is_that_of_the_squares(engine: str) -> None:
    tensor = numbers(10_000, 3)
    exact = sum(Fraction(float(value)) ** 2 for value in tensor)
    assert read_sum(sum_squares([tensor])) == pytest.approx(float(exact), rel=1e-15)
    alone = numbers(1, 5)
    assert read_sum(sum_squares([alone])) == float(alone) ** 2


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1.0, 2.0**-149, -(2.0**-126), 1.5 * 2.0**-140, 3.4028234663852886e38, 2.0**64]
)
def test_no_single_precision_number_is_too_small_or_too_large(engine: str, value: float) -> None:
    got = read_sum(sum_squares([torch.full((3 * CUT + 1,), value)]))
    assert got == (3 * CUT + 1) * float(torch.tensor(value)) ** 2


def test_tiny_squares_beside_large_ones_are_not_lost(engine: str) -> None:
    tiny, large = torch.full((CUT,), 2.0**-149), torch.full((CUT,), 2.0**100)
    together = sum_squares([large]) + sum_squares([tiny])
    assert read_sum(together - sum_squares([large])) == CUT * 2.0**-298


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_told(engine: str, value: float) -> None:
    tensor = torch.ones(1000)
    tensor[700] = value
    got = read_sum(sum_squares([torch.ones(64)]) + sum_squares([tensor]))
    assert math.isnan(got) if math.isnan(value) else got == math.inf


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
@settings(deadline=None)
def test_c_and_python_give_the_same_row_for_any_bits(bits: list[int]) -> None:
    if module._library is None:
        pytest.skip("the C library is not built; run make native")
    tensor = torch.tensor(struct.unpack(f"{len(bits)}f", struct.pack(f"{len(bits)}I", *bits)))
    native = sum_squares([tensor])
    library, module._library = module._library, None
    try:
        assert torch.equal(native, sum_squares([tensor]))
    finally:
        module._library = library


def test_rows_are_carried_so_that_many_can_be_added(engine: str) -> None:
    row = sum_squares([numbers(100_000, seed, spread=10) for seed in range(3)])
    assert all(0 <= limb < 2**32 for limb in row[: LIMBS - 1].tolist())
    many = row * 2**30
    assert read_sum(many) == pytest.approx(read_sum(row) * 2**30, rel=1e-15)


def test_no_tensor_gives_zero(engine: str) -> None:
    assert read_sum(sum_squares([])) == 0.0


def test_narrow_types_count_as_what_they_stand_for(engine: str) -> None:
    tensor = numbers(1000, 1).bfloat16()
    assert torch.equal(sum_squares([tensor]), sum_squares([tensor.float()]))
    strided = numbers(2000, 1)[::2]
    assert torch.equal(sum_squares([strided]), sum_squares([strided.clone()]))


@pytest.mark.parametrize("threads", [1, 4])
def test_threads_do_not_matter(engine: str, threads: int) -> None:
    before = torch.get_num_threads()
    tensor = numbers(300_000, 9)
    want = sum_squares([tensor])
    torch.set_num_threads(threads)
    try:
        assert torch.equal(sum_squares([tensor]), want)
    finally:
        torch.set_num_threads(before)
