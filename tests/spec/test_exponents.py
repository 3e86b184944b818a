"""Powers of two for gradients: nothing overflows, nothing is coarse, and steps that are not as expected are noticed."""

from __future__ import annotations

import math
import struct

import pytest

from megatron_elas.spec.exponents import (
    GROWTH_BITS,
    MOST_BITS,
    NOT_FINITE,
    SHRINKAGE_BITS,
    UNKNOWN,
    judge,
    largest_term,
    magnitude,
)


def bits_of(value: float) -> int:
    """Of its fp32 form."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


LARGEST = 3.4028234663852886e38
SMALLEST, SMALLEST_NORMAL = 2.0**-149, 2.0**-126


@pytest.mark.parametrize("count", [1, 2, 3, 8, 1000, 1024, 1025, 2048, 4096, 1 << 20])
def test_as_many_of_the_largest_terms_as_there_can_be_have_a_sum_below_2_to_the_63(count: int) -> None:
    term = 2 ** largest_term(count)
    assert 2 * count * term < 2**63
    assert largest_term(count) == MOST_BITS or 4 * count * term >= 2**62, "a bit is given away"


@pytest.mark.parametrize("value", [1.0, 0.999999, 1.5, 2.0, 1e-30, 3e37, LARGEST, SMALLEST_NORMAL])
def test_the_magnitude_is_the_next_power_of_two(value: float) -> None:
    assert 2.0 ** (magnitude(bits_of(value)) - 1) <= value < 2.0 ** magnitude(bits_of(value))


@pytest.mark.parametrize("value", [1.0, 1e-20, 7e30, LARGEST, SMALLEST_NORMAL, SMALLEST, 0.0])
@pytest.mark.parametrize("term_bits", [MOST_BITS, 45])
def test_what_is_chosen_for_a_gradient_fits_it_and_others_near_it(value: float, term_bits: int) -> None:
    first = judge([UNKNOWN], [bits_of(value)], term_bits)
    assert first.finite
    assert first.runs_again == (value != 0), "what is not known fits zeros alone"
    if value == 0:
        assert first.exponents == (UNKNOWN,)
        return
    again = judge(first.exponents, [bits_of(value)], term_bits)
    assert not again.runs_again
    assert again.exponents == first.exponents
    assert value * 2.0 ** first.exponents[0] < 2 ** (term_bits - GROWTH_BITS)
    for factor, fits in [
        (2.0**GROWTH_BITS, True), (2.0 ** (GROWTH_BITS + 1), False),
        (2.0**-SHRINKAGE_BITS, True), (2.0 ** -(SHRINKAGE_BITS + 1), False),
    ]:  # fmt: skip
        if SMALLEST_NORMAL <= value * factor <= LARGEST:
            assert judge(first.exponents, [bits_of(value * factor)], term_bits).runs_again == (not fits), factor


def test_zeros_change_nothing() -> None:
    verdict = judge([17, UNKNOWN], [0, 0], MOST_BITS)
    assert (verdict.runs_again, verdict.misfits, verdict.exponents) == (False, (), (17, UNKNOWN))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_nothing_is_learned_from_gradients_that_are_not_finite_and_no_pass_runs_again(value: float) -> None:
    largest = [bits_of(1e30), bits_of(value), bits_of(2.0)]
    assert largest[1] >= NOT_FINITE
    verdict = judge([40, 40, UNKNOWN], largest, MOST_BITS)
    assert (verdict.runs_again, verdict.finite, verdict.exponents) == (False, False, (40, 40, UNKNOWN))
    assert verdict.misfits == (0, 1, 2)


def test_one_parameter_that_does_not_fit_is_enough() -> None:
    good = judge([UNKNOWN] * 3, [bits_of(1.0)] * 3, MOST_BITS).exponents
    assert judge(good, [bits_of(1.0)] * 3, MOST_BITS).misfits == ()
    verdict = judge(good, [bits_of(1.0), bits_of(1e6), bits_of(1.0)], MOST_BITS)
    assert verdict.misfits == (1,)
    assert [new - old for new, old in zip(verdict.exponents, good, strict=True)] == [0, -19, 0]
