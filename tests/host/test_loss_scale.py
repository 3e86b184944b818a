"""The loss scaler's state goes from worker to worker, and gradients are unscaled wherever an update is made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_elas.host.loss_scale import LossScale, read_loss_scale, unscale, write_loss_scale
from megatron_elas.host.updates import OptimizerMirror, Settings
from megatron_elas.spec.shards import Piece, ShardLayout
from megatron_elas.spec.transaction import Update


class Scaler:
    """As Megatron's dynamic one, with a window of two updates."""

    def __init__(self) -> None:
        self.scale = torch.tensor([1.0])
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.state = state["scale"], state

    def update(self, found_inf: bool) -> None:
        self.state = {**self.state, "found_inf": found_inf}


def chained(scaler: Scaler | None) -> Any:
    return SimpleNamespace(chained_optimizers=[SimpleNamespace(grad_scaler=scaler)])


@pytest.mark.parametrize("scale", [1.0, 2.0**32, 1441792.0, 0.1, 777.0, 2.0**127])
def test_the_state_goes_through_integers_and_another_workers_scaler_as_it_was(scale: float) -> None:
    scale = float(torch.tensor(scale))
    state = LossScale(scale=scale, growth_tracker=999, hysteresis_tracker=-3)
    assert LossScale.from_ints(state.to_ints()) == state
    other = chained(Scaler())
    write_loss_scale(other, state)
    assert read_loss_scale(other) == state


def test_without_a_scaler_there_is_no_state() -> None:
    assert read_loss_scale(chained(None)) is None
    write_loss_scale(chained(None), None)


@pytest.mark.parametrize(
    ("update", "overflowed"),
    [
        (Update.of(3, None, applies=False), True),
        (Update.of(3, 9e9, applies=False), False),
        (Update.of(3, 0.5), False),
    ],
    ids=["infinite-gradient", "norm-too-large", "updated"],
)
def test_the_scaler_is_told_of_infinite_gradients_only(update: Update, overflowed: bool) -> None:
    scaler = Scaler()
    write_loss_scale(chained(scaler), LossScale(scale=8.0), update)
    assert scaler.state["found_inf"] is overflowed


def test_a_copy_that_gets_scaled_gradients_is_that_of_one_that_gets_them_unscaled() -> None:
    layout = ShardLayout(pieces=(Piece(name="a", start=0, stop=100), Piece(name="b", start=7, stop=40)))
    generator = torch.Generator().manual_seed(1)
    begin = torch.rand(layout.flat_numel, generator=generator)
    begin[-1] = 4.0
    state = LossScale(scale=1441792.0)
    scaled = state.scale * torch.randn(layout.numel, generator=generator)
    unscaled = scaled * torch.tensor(state.scale, dtype=torch.float64).reciprocal().float()
    found = []
    for gradients, loss_scale in ((scaled, state), (unscaled, None)):
        flat = begin.clone()
        settings = Settings(groups=[{"lr": 0.1, "weight_decay": 0.1}], loss_scale=loss_scale)
        mirror = OptimizerMirror(layout, flat, lambda name: 0, torch.optim.AdamW, settings, 0.0)
        mirror.apply(gradients.clone(), Update.of(4, 3.0), settings)
        found.append(flat)
    assert torch.equal(*found) and not torch.equal(found[0], begin)


def test_gradients_that_are_infinite_stay_so() -> None:
    gradients = torch.tensor([8.0, float("inf"), float("nan")])
    unscale([gradients], LossScale(scale=4.0))
    assert gradients[0] == 2.0 and gradients[1].isinf() and gradients[2].isnan()
