"""A model's cost is spread over the layers of another, and nothing of it is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_elas.planner.cost_model import estimate_job, stage_durations
from megatron_elas.planner.job_costs import JobCosts
from megatron_elas.planner.plan import initial_plan, predict_step_s
from megatron_elas.planner.time_model import INSTANT, find_hardware, make_time_model, spread_layers, stage_tails
from megatron_elas.schedule.one_f_one_b import one_f_one_b
from megatron_elas.schedule.timing import Durations, time_schedule
from megatron_elas.spec.cost import JobCost
from megatron_elas.spec.emulation import EmulatedTime
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.job_profile import load_job

CLUSTER = find_hardware("npu-96", 16)
COST = estimate_job(load_job("llama2-7b"), CLUSTER)


def pass_times(cost: JobCost) -> tuple[float, ...]:
    times = cost.stage_times(0, cost.num_layers, clock=0.8)
    return (
        *(each.seconds(3) for each in (times.forward, times.input_gradient, times.weight_gradient)),
        cost.optimizer_s(0, cost.num_layers, 1), cost.activation_bytes(0, cost.num_layers),
    )  # fmt: skip


@pytest.mark.parametrize("layers", [1, 3, 4, 5, 32, 45, 64])
def test_all_of_the_model_is_there_whatever_the_number_of_layers(layers: int) -> None:
    spread = spread_layers(COST, layers)
    assert spread.num_layers == layers
    assert pass_times(spread) == pytest.approx(pass_times(COST))
    assert spread.parameters(0, layers) == pytest.approx(COST.parameters(0, 32), rel=1e-6)


def test_with_as_many_layers_each_is_its_own() -> None:
    assert spread_layers(COST, 32) is COST


def test_each_layer_gets_what_lies_in_its_place() -> None:
    layers = tuple(replace(COST.layers[0], optimizer_s=float(i)) for i in range(6))
    cost = replace(COST, layers=layers)
    assert [layer.optimizer_s for layer in spread_layers(cost, 3).layers] == [1.0, 5.0, 9.0]
    assert [layer.optimizer_s for layer in spread_layers(cost, 4).layers] == pytest.approx([0.5, 2.5, 5.0, 7.0])
    assert [layer.optimizer_s for layer in spread_layers(cost, 12).layers] == pytest.approx(
        [half / 2 for i in range(6) for half in (i, i)]
    )


def test_layers_that_are_alike_stay_one_object() -> None:
    assert len({id(layer) for layer in spread_layers(COST, 4).layers}) == 1


def test_what_follows_the_passes_is_what_the_prediction_of_a_plan_adds() -> None:
    job = load_job("llama2-7b").with_grid(pipeline_parallel=4, data_parallel=3, num_microbatches=24).spec
    job = replace(job, stage_layers=(1, 1, 1, 1))
    cost = spread_layers(COST, 4)
    plan = initial_plan(job, {})
    cuts = (0, 1, 2, 3, 4)
    costs = replace(JobCosts.of(load_job("llama2-7b"), CLUSTER), cost=cost, link=CLUSTER.inside)
    durations: Durations = stage_durations(cost, cuts, plan.items, link=CLUSTER.inside)
    passes_s = time_schedule(one_f_one_b(plan.items), durations).step_s
    tails = stage_tails(cost, cuts, [CLUSTER.inside] * 4, [3] * 4)
    whole_s = passes_s + max(tail.seconds for tail in tails)
    assert predict_step_s(job, plan, costs) == pytest.approx(whole_s)


def test_devices_alone_are_one_node_with_instant_links() -> None:
    hardware = find_hardware("ascend-910b", 5)
    assert (hardware.num_devices, hardware.inside, hardware.device.name) == (5, INSTANT, CLUSTER.device.name)
    assert hardware.link(0, 4).transfer_s(1e12) < 1e-9


def test_files_are_told_apart_by_what_they_hold(tmp_path: Path) -> None:
    configs = Path(__file__).parents[2] / "configs"
    assert find_hardware(str(configs / "devices/h100.toml"), 2).num_devices == 2
    assert find_hardware(str(configs / "clusters/gpu-96.toml"), 2).num_devices == 96


def test_what_is_not_there_or_too_small_is_refused() -> None:
    with pytest.raises(BadUsage, match=r"npu-96 has 96 devices, and the job has 97 workers"):
        find_hardware("npu-96", 97)
    with pytest.raises(BadUsage, match=r"there is no 'abacus' in configs/devices"):
        find_hardware("abacus", 4)


def test_a_run_is_reckoned_with_the_times_that_it_takes() -> None:
    own = load_job("llama2-13b")
    model = make_time_model(own, EmulatedTime(hardware="npu-96", model="llama2-7b", speed=10.0))
    costs, real = model.costs, spread_layers(COST, 40)
    assert model.growth == pytest.approx(COST.parameters(0, 32) / estimate_job(own, CLUSTER).parameters(0, 40))
    assert model.waits == model.cost == real
    assert pass_times(costs.cost)[:4] == pytest.approx([seconds / 10 for seconds in pass_times(real)[:4]])
    assert costs.link.transfer_s(1e9) == pytest.approx(CLUSTER.between.transfer_s(1e9) / 10)
    assert costs.memory_bytes == CLUSTER.device.usable_bytes


def test_forward_passes_that_the_run_repeats_itself_are_not_waited_for_twice() -> None:
    own = load_job("llama2-7b")
    own = replace(own, training=replace(own.training, recompute="full"))
    model = make_time_model(own, EmulatedTime(hardware="npu-96"))
    waits, costs = model.waits.layers[0], model.cost.layers[0]
    assert waits == COST.layers[0]
    assert costs.full_backward_s == pytest.approx(waits.full_backward_s + waits.forward.seconds(1))
