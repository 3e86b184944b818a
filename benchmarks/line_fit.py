"""Least squares: how much of a time is constant, and how it grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Line(NamedTuple):
    """``constant + slope * x``."""

    constant: float
    slope: float
    r2: float
    """Share of the variance that the line explains; 1 when there is none to explain."""
    residual: float
    """Root of the mean squared distance of the points from the line."""


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """The line closest to the points.

    Raises:
        ValueError: Fewer than two different x, or lists of different lengths.
    """
    if len(xs) != len(ys) or len(set(xs)) < 2:
        raise ValueError(f"a line needs points at two different x at least, got x {list(xs)} and {len(ys)} y")
    count = len(xs)
    mean_x, mean_y = sum(xs) / count, sum(ys) / count
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    constant = mean_y - slope * mean_x
    left = sum((y - constant - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    total = sum((y - mean_y) ** 2 for y in ys)
    return Line(constant, slope, 1 - left / total if total else 1.0, (left / count) ** 0.5)
