"""Timeouts that cannot work are refused with the two values that clash."""

from __future__ import annotations

import pytest

from megatron_elas.config import ControlTimeouts
from megatron_elas.spec.errors import BadUsage


def test_the_defaults_are_a_chain() -> None:
    timeouts = ControlTimeouts()
    assert timeouts.heartbeat_timeout_s < timeouts.settle_timeout_s < timeouts.join_timeout_s
    assert timeouts.settle_timeout_s < timeouts.resume_timeout_s


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heartbeat_interval_s": 6.0}, ["--heartbeat-timeout-s=10", "--heartbeat-interval-s=6"]),
        ({"settle_timeout_s": 9.0}, ["--heartbeat-timeout-s=10", "--settle-timeout-s=9"]),
        ({"resume_timeout_s": 59.5}, ["--settle-timeout-s=60", "--resume-timeout-s=59.5"]),
        ({"join_timeout_s": 59.5}, ["--settle-timeout-s=60", "--join-timeout-s=59.5"]),
    ],
)
def test_timeouts_in_an_order_that_cannot_work_are_refused_with_both_values(
    changes: dict[str, float], words: list[str]
) -> None:
    with pytest.raises(BadUsage) as refused:
        ControlTimeouts(**changes)
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_timeout_is_a_positive_number(value: float) -> None:
    with pytest.raises(BadUsage, match="--grace-s must be a positive number"):
        ControlTimeouts(grace_s=value)
