"""The wrappers around the optimizer tell the session of the update, and let nothing come between."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_elas.host import transaction
from megatron_elas.host.gradient_sums import GradientSums
from megatron_elas.host.step_timer import StepTimer
from megatron_elas.host.training import MegatronHost
from megatron_elas.host.transaction import wrap_part_update
from megatron_elas.spec.consistency import ConsistencyLevel


def attach(
    monkeypatch: pytest.MonkeyPatch, step: int, told: list[str], consistency: ConsistencyLevel = "numerical"
) -> None:
    """Be in this step; what the session and fault scripts hear is written to ``told``."""
    host = SimpleNamespace(_sums=GradientSums(1) if consistency == "bitwise" else None)
    attached = SimpleNamespace(
        counter=SimpleNamespace(step=step),
        timer=StepTimer(0, lambda report: None),
        session=SimpleNamespace(applied=lambda: told.append("applied")),
        strike=lambda step, phase, microbatch: told.append(phase),
        host=SimpleNamespace(updating=partial(MegatronHost.updating, host)),
    )
    monkeypatch.setattr(transaction, "attachment", lambda: attached)


@pytest.mark.parametrize("fails", [False, True])
def test_no_barrier_of_a_timer_comes_between_the_update_and_its_end(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    part = SimpleNamespace(config=SimpleNamespace(barrier_with_L1_time=True))

    def update(self: Any) -> str:
        told.append(f"barriers {self.config.barrier_with_L1_time}")
        if fails:
            raise RuntimeError("no update")
        return "updated"

    attach(monkeypatch, 3, told)
    if fails:
        with pytest.raises(RuntimeError, match="no update"):
            wrap_part_update(update)(part)
        assert told == ["barriers False"]
    else:
        assert wrap_part_update(update)(part) == "updated"
        assert told == ["barriers False", "applied", "gather"]
    assert part.config.barrier_with_L1_time is True


def test_an_update_outside_of_training_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    attach(monkeypatch, -1, told)
    part = SimpleNamespace(config=SimpleNamespace(barrier_with_L1_time=True))
    assert wrap_part_update(lambda self: self.config.barrier_with_L1_time)(part) is True
    assert told == []


@pytest.mark.parametrize(("consistency", "inside"), [("numerical", 3), ("bitwise", 1)])
def test_an_update_that_is_to_be_equal_to_the_last_bit_is_made_in_one_thread(
    consistency: ConsistencyLevel, inside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(monkeypatch, 3, [], consistency)
    part = SimpleNamespace(config=SimpleNamespace(barrier_with_L1_time=True))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert wrap_part_update(lambda self: torch.get_num_threads())(part) == inside
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
