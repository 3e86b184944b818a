"""Costs of stages are sums over their units; the fast sums say the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_elas.spec.cost import CostSums, JobCost, UnitCost, Work, load_cost
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.tables import as_table


def unit(forward: float, parameters: int = 100, **more: float) -> UnitCost:
    return UnitCost(
        forward=Work(compute_s=forward, fixed_s=0.1),
        input_gradient=Work(compute_s=forward, memory_s=0.5, fixed_s=0.1),
        weight_gradient=Work(compute_s=0.8 * forward, steady_s=0.2, fixed_s=0.1),
        parameters=parameters,
        activation_bytes=1000.0,
        kept_bytes=600.0,
        optimizer_s=0.01 * parameters,
        **more,
    )


COST = JobCost(
    embedding=unit(0.1, 500),
    layers=(unit(1.0), unit(2.0), unit(3.0), unit(1.5)),
    head=unit(0.7, 300),
    loss=unit(0.2, 0, working_bytes=5000.0),
    boundary_bytes=64,
    weight_bytes=2,
    gradient_bytes=4,
    optimizer_bytes=12,
)


def test_the_longer_of_computing_and_memory_counts_and_the_rest_is_added() -> None:
    work = Work(compute_s=2.0, memory_s=1.5, steady_s=0.5, fixed_s=0.25)
    assert work.seconds(4) == pytest.approx(4 * 2.5 + 0.25)
    assert work.seconds(4, clock=2.0) == pytest.approx(4 * 2.0 + 0.25), "memory does not get faster with the clock"
    assert work.seconds(4, clock=0.5) == pytest.approx(4 * 4.5 + 0.25)
    assert work.scaled(2).seconds(4, 0.5) == pytest.approx(2 * work.seconds(4, 0.5))


def test_the_first_stage_has_the_embedding_and_the_last_the_head_and_the_loss() -> None:
    assert COST.units(0, 2) == (COST.embedding, *COST.layers[:2])
    assert COST.units(1, 3) == COST.layers[1:3]
    assert COST.units(3, 4) == (COST.layers[3], COST.head, COST.loss)
    assert COST.units(4, 4) == (COST.head, COST.loss)
    with pytest.raises(BadUsage, match=r"layers \[3, 5\) are not within the model's 4"):
        COST.units(3, 5)


@pytest.mark.parametrize("clock", [0.6, 1.0, 1.3])
def test_running_sums_say_what_the_units_say(clock: float) -> None:
    sums = CostSums(COST, clock)
    for first in range(5):
        for last in range(first, 5):
            times = COST.stage_times(first, last, clock)
            own = sums.stage_times(first, last)
            for kind in ("forward", "input_gradient", "weight_gradient"):
                assert getattr(own, kind).seconds(3) == pytest.approx(getattr(times, kind).seconds(3))
            layers, (embedding, after) = sums.layers(6, 2, 0.5), sums.outer(6, 2, 0.5)
            step = layers[last] - layers[first] + (embedding if first == 0 else 0) + (after if last == 4 else 0)
            assert sums.step_s(first, last, 6, 2) == pytest.approx(6 * times.sample_s + 2 * times.fixed_s)
            expected = 6 * times.sample_s + 2 * times.fixed_s + COST.optimizer_s(first, last, 1) / 2
            assert step == pytest.approx(expected)
            assert sums.parameters(first, last) == COST.parameters(first, last)
            assert sums.activation_bytes(first, last) == pytest.approx(COST.activation_bytes(first, last))
            assert sums.kept_bytes(first, last) == pytest.approx(COST.kept_bytes(first, last))
            assert sums.optimizer_s(first, last) == pytest.approx(COST.optimizer_s(first, last, 1))


def test_memory_is_state_and_what_is_in_flight() -> None:
    assert COST.state_bytes(1, 3, cells=2) == 200 * 6 + 100 * 12
    assert COST.state_bytes(1, 3, cells=3) == 200 * 6 + 67 * 12, "a share is rounded up"
    assert COST.device_bytes(1, 3, cells=2, in_flight=3, deferred=1) == 2400 + 3 * 2000 + 1200
    assert COST.device_bytes(3, 4, cells=1, in_flight=1) == 400 * 18 + 3000 + 5000, "logits live during a pass"
    assert COST.kept_share(1, 3) == pytest.approx(0.6)


def test_as_many_samples_fit_as_the_memory_holds() -> None:
    fitting = COST.samples_that_fit(3, 4, cells=1, memory_bytes=30_000, largest_item=2)
    assert COST.device_bytes(3, 4, cells=1, in_flight=fitting, largest_item=2) == 30_000
    assert COST.samples_that_fit(1, 3, cells=1, memory_bytes=100, largest_item=1) < 0


def test_an_optimizer_that_is_not_sharded_is_whole_on_every_cell() -> None:
    whole = replace(COST, optimizer_sharded=False)
    assert whole.state_bytes(1, 3, cells=2) == 200 * 18
    assert whole.optimizer_s(1, 3, cells=2) == COST.optimizer_s(1, 3, cells=1) == 2 * COST.optimizer_s(1, 3, cells=2)


def test_a_cost_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(as_table(COST)))
    assert load_cost(path) == COST
    path.write_text(json.dumps({**as_table(COST), "layers": []}))
    with pytest.raises(BadUsage, match="layers is empty: a job has at least one layer"):
        load_cost(path)
