"""Lengths of time are told in the unit that fits."""

from __future__ import annotations

import pytest

from megatron_elas.simulator.times import format_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0351, "0.0351 s"),
        (59.94, "59.9 s"),
        (60, "1 min"),
        (80, "80 s"),
        (90, "1.5 min"),
        (3600, "1 h"),
        (5000, "83.3 min"),
        (86400, "24 h"),
        (604800, "7 days"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
