"""Which power of two the gradients of a parameter are multiplied with before they are rounded to integers and added.

The integers of all micro-batches are added without a carry that is lost, so their sum is the same in any order. The
power is chosen from the largest gradient of the step before, with room to grow; whether it was a good one is known at
the end of the step. All of this is a function of the gradients' values, and not of who computed them.

A largest gradient is told by the bits of its absolute value as fp32: for what is not negative the order of the bits is
that of the values, infinity comes after all numbers, and a NaN after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

UNKNOWN = -(1 << 20)
"""Stands for the exponent of a parameter that has had no gradient but zeros yet; below all exponents."""
MOST_BITS = 51
"""A term is at most 2**51: then it is rounded by one addition to a double, on any machine."""
SUM_BITS = 62
"""So is the sum of all terms, to 2**62."""
GROWTH_BITS = 8
"""A gradient may become so many times 2 as large as the largest one of the step before."""
SHRINKAGE_BITS = 12
"""And so many times 2 as small; then 31 bits are left for the largest one."""
NOT_FINITE = 0x7F800000
"""The bits of infinity."""


def largest_term(num_microbatches: int) -> int:
    """Bits of the largest term that can be added so often, each micro-batch twice (a tied weight is used twice).

    Example: 51 for up to 1024 micro-batches, 50 for 2048.
    """
    return min(MOST_BITS, SUM_BITS - (2 * num_microbatches - 1).bit_length())


def magnitude(bits: int) -> int:
    """The smallest ``e``, or -126, for which what has these bits is below 2**e."""
    return (bits >> 23) - 126


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the largest gradients of a step say about the exponents that it used."""

    finite: bool
    """All gradients are numbers. If not, no exponent could help, and nothing is learned."""
    misfits: tuple[int, ...]
    """Parameters, by their place in the lists, whose sums are worth nothing, or are too coarse."""
    exponents: tuple[int, ...]
    """For the next step; and for this one if it runs again."""

    @property
    def runs_again(self) -> bool:
        """Whether other exponents would give exact and fine sums."""
        return self.finite and bool(self.misfits)


def judge(exponents: Sequence[int], largest: Sequence[int], term_bits: int) -> Verdict:
    """Whether terms ``gradient * 2**exponent`` were good ones.

    Args:
        exponents: That the step used, one per parameter.
        largest: Bits of the largest gradient of each, over all micro-batches and workers.
        term_bits: See ``largest_term``.
    """
    pairs = list(zip(exponents, largest, strict=True))
    finite = max(largest, default=0) < NOT_FINITE
    chosen = tuple(
        term_bits - GROWTH_BITS - magnitude(bits) if bits and finite else exponent for exponent, bits in pairs
    )
    misfits = tuple(number for number, (exponent, bits) in enumerate(pairs) if not _fits(exponent, bits, term_bits))
    return Verdict(finite=finite, misfits=misfits, exponents=chosen)


def _fits(exponent: int, bits: int, term_bits: int) -> bool:
    """Whether terms of a parameter whose largest gradient has these bits neither overflow nor are too coarse."""
    if bits == 0:
        return True
    if bits >= NOT_FINITE or exponent == UNKNOWN:
        return False
    return term_bits - GROWTH_BITS - SHRINKAGE_BITS <= exponent + magnitude(bits) <= term_bits
