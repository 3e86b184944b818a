"""The line through measured times is the one of least squares."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "line_fit.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("line_fit", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_points_on_a_line_give_it_back() -> None:
    line = load().fit_line([1, 2, 4, 8], [5, 7, 11, 19])
    assert (line.constant, line.slope, line.r2, line.residual) == pytest.approx((3, 2, 1, 0), abs=1e-9)


def test_points_off_the_line_are_told_by_r2_and_residual() -> None:
    line = load().fit_line([0, 0, 2, 2], [0, 2, 4, 6])
    assert (line.constant, line.slope, line.residual) == pytest.approx((1, 2, 1))
    assert line.r2 == pytest.approx(0.8)


def test_equal_times_are_a_flat_line() -> None:
    assert load().fit_line([1, 2], [3, 3])[:3] == (3, 0, 1)


def test_one_x_is_no_line() -> None:
    with pytest.raises(ValueError, match="two different x"):
        load().fit_line([2, 2], [1, 3])
