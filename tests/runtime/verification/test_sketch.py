"""Signed sums: they add up wherever a row is cut, and tell how far two rows are apart."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from megatron_elas.runtime.verification import sketch
from megatron_elas.runtime.verification.checksum import BLOCK, key_of
from megatron_elas.runtime.verification.sketch import signed_sums

KEY = key_of("row")
COUNT = 3 * BLOCK + 11


@pytest.fixture(params=["native", "python"])
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(sketch, "_library", None)
    elif sketch._library is None:
        pytest.skip("the C library is not built")


def random(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize("size", [64, 1024, BLOCK, 1 << 20])
def test_parts_add_up_wherever_the_cuts_are(size: int) -> None:
    values = random(COUNT)
    whole = signed_sums(values, KEY, 0, size)
    assert len(whole) == -(-COUNT // size)
    for cuts in ([1], [63, 64, 65, 1000], [BLOCK - 1, BLOCK, 2 * BLOCK + 10], list(range(5, COUNT, 777))):
        total = [0.0] * len(whole)
        for low, high in itertools.pairwise([0, *cuts, COUNT]):
            for number, part in enumerate(signed_sums(values[low:high], KEY, low, size), low // size):
                total[number] += part
        assert total == pytest.approx(whole, abs=1e-10)
    assert signed_sums(values[:0], KEY, 7, size) == []


def test_c_and_python_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    if sketch._library is None:
        pytest.skip("the C library is not built")
    values = random(COUNT)
    cases = [
        (view, key, start, size)
        for view in (values, values[3:70], values[::2], values.view(-1, 1), values.bfloat16())
        for key in (0, KEY)
        for start in (0, 63, BLOCK - 3)
        for size in (64, BLOCK)
    ]
    native = [signed_sums(*case) for case in cases]
    monkeypatch.setattr(sketch, "_library", None)
    for case, sums in zip(cases, native, strict=True):
        assert signed_sums(*case) == pytest.approx(sums, abs=1e-10)


@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize("apart", [1.0, 1e-3, 1e-7])
def test_the_distance_of_two_rows_is_told_from_their_sums(apart: float) -> None:
    values, size = random(1 << 16), 1 << 12
    for seed in range(1, 6):
        other = values + apart * random(1 << 16, seed)
        true = float((values.double() - other.double()).norm() / values.double().norm())
        ours, theirs = (signed_sums(own, KEY, 0, size) for own in (values, other))
        assert true / 2.5 < math.dist(ours, theirs) / math.hypot(*ours) < 2.5 * true


@pytest.mark.usefixtures("_engine")
def test_one_number_that_differs_is_seen_as_large_as_it_is_and_nan_stays_nan() -> None:
    values = random(COUNT)
    before = signed_sums(values, KEY, 0, 1024)
    values[5000] += 0.25
    after = signed_sums(values, KEY, 0, 1024)
    assert [a == b for a, b in zip(before, after, strict=True)].count(False) == 1
    assert math.dist(before, after) == pytest.approx(0.25, rel=1e-5)
    values[5000] = math.nan
    assert [math.isnan(own) for own in signed_sums(values, KEY, 0, 1024)].count(True) == 1
