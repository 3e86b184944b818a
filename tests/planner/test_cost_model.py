"""Estimates of cost agree with published measurements and with the memory formula."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from megatron_elas.planner.cost_model import estimate_job, stage_durations, stage_limits
from megatron_elas.planner.memory import count_parameters, estimate_activations, total_parameters
from megatron_elas.schedule.items import deal_round, reshape
from megatron_elas.schedule.split_backward import split_backward
from megatron_elas.spec.cluster import load_cluster
from megatron_elas.spec.job_profile import load_job

NAMES = ("llama2-7b", "llama2-13b", "llama2-34b", "llama2-70b")


def test_a_layer_of_7b_takes_what_was_measured_on_ascend() -> None:
    """MindSpeed-LLM's CI, TP1 PP8, one micro-batch of one sequence: 898 ms for 32 layers, about 28 ms each."""
    layer = estimate_job(load_job("llama2-7b"), load_cluster("npu-96")).layers[0]
    assert layer.forward.seconds(1) + layer.full_backward_s == pytest.approx(28e-3, rel=0.05)


@pytest.mark.parametrize(("name", "tokens"), [("llama2-7b", 4160), ("llama2-13b", 1691), ("llama2-70b", 337)])
def test_throughput_without_bubbles_is_near_what_was_published_for_ascend(name: str, tokens: float) -> None:
    """Tokens per second and device of MindFormers on Atlas 800T A2, sequences of 4096."""
    job = load_job(name)
    cost = estimate_job(job, load_cluster("npu-96"))
    times = cost.stage_times(0, cost.num_layers)
    assert 4096 / (times.sample_s + times.fixed_s) / job.spec.tensor_parallel == pytest.approx(tokens, rel=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_activations_are_those_of_the_memory_formula(name: str) -> None:
    job = load_job(name)
    lanes = job.spec.tensor_parallel
    cost = estimate_job(job, load_cluster("npu-96"))
    starts = [sum(job.shape.layers[:stage]) for stage in range(len(job.shape.layers) + 1)]
    for stage, (first, last) in enumerate(pairwise(starts)):
        assert cost.parameters(first, last) == count_parameters(job.shape, stage, lanes)
    middle = estimate_activations(job.shape, job.training, 1, lanes, micro_batch_size=1, micro_batches=1)
    assert cost.activation_bytes(starts[1], starts[2]) == pytest.approx(middle, abs=2)
    one_lane = estimate_job(replace(job, spec=replace(job.spec, tensor_parallel=1)), load_cluster("npu-96"))
    assert one_lane.parameters(0, one_lane.num_layers) == total_parameters(job.shape)


@pytest.mark.parametrize("name", NAMES)
def test_a_job_fits_its_devices_with_1f1b(name: str) -> None:
    job, cluster = load_job(name), load_cluster("npu-96")
    cost = estimate_job(job, cluster)
    stages = len(job.shape.layers)
    first = 0
    for stage, count in enumerate(job.shape.layers):
        needed = cost.device_bytes(first, first + count, cells=job.spec.data_parallel, in_flight=stages - stage)
        assert needed < cluster.device.usable_bytes
        first += count


def test_matrices_of_the_three_passes_cost_the_same_and_attention_has_no_weights() -> None:
    job = load_job("llama2-7b")
    layer = estimate_job(job, load_cluster("gpu-96")).layers[0]
    attention = layer.forward.compute_s - layer.weight_gradient.compute_s
    assert attention > 0
    assert layer.input_gradient.compute_s == pytest.approx(layer.weight_gradient.compute_s + 2 * attention)


def test_full_recomputation_runs_forward_again_and_keeps_only_inputs() -> None:
    job = load_job("llama2-7b")
    plain = estimate_job(job, load_cluster("gpu-96")).layers[0]
    again = estimate_job(replace(job, training=replace(job.training, recompute="full")), load_cluster("gpu-96")).layers[
        0
    ]
    assert again.input_gradient.seconds(2) == pytest.approx(plain.input_gradient.seconds(2) + plain.forward.seconds(2))
    assert again.activation_bytes == 2 * 4096 * 4096
    assert again.working_bytes == plain.activation_bytes


def test_more_lanes_share_the_matrices_but_pay_for_collectives() -> None:
    job = load_job("llama2-34b")
    one = estimate_job(replace(job, spec=replace(job.spec, tensor_parallel=1)), load_cluster("npu-96")).layers[0]
    four = estimate_job(job, load_cluster("npu-96")).layers[0]
    assert four.forward.compute_s == pytest.approx(one.forward.compute_s / 4)
    assert four.forward.steady_s > one.forward.steady_s
    assert four.parameters == pytest.approx(one.parameters / 4, rel=1e-3)


def test_durations_of_stages_follow_layers_clocks_and_the_link() -> None:
    cluster = load_cluster("gpu-96")
    cost = estimate_job(load_job("llama2-7b"), cluster)
    items = [deal_round(4, 2, 2), deal_round(4, 2, 1)]
    cuts = (0, 14, 32)
    durations = stage_durations(cost, cuts, items, clocks=(1.0, 0.9), link=cluster.between)
    assert [len(cells) for cells in durations.cells] == [2, 1]
    assert durations.cells[0][1] == cost.stage_times(0, 14)
    assert durations.cells[1][0] == cost.stage_times(14, 32, 0.9)
    assert durations.links[0].seconds(2) == pytest.approx(cluster.between.transfer_s(2 * cost.boundary_bytes))
    assert stage_durations(cost, cuts, items).links[0].seconds(2) == 0


def test_an_order_within_the_limits_of_stages_fits_the_devices() -> None:
    cluster = load_cluster("npu-96")
    cost = estimate_job(load_job("llama2-7b"), cluster)
    items = [reshape(32, 1, 3 if stage == 1 else 4, 4) for stage in range(4)]
    cuts = (0, 8, 16, 24, 32)
    limits = stage_limits(cost, cuts, items, cluster.device.usable_bytes)
    found = split_backward(items, stage_durations(cost, cuts, items, link=cluster.between), limits, tries=2)
    assert found.step_s < 1.1 * found.bound_s
    for stage, (first, last) in enumerate(pairwise(cuts)):
        largest = max(item.samples for own in items[stage] for item in own)
        full = cost.device_bytes(
            first, last, cells=len(items[stage]), in_flight=limits[stage].samples, largest_item=largest
        )
        assert full == pytest.approx(cluster.device.usable_bytes, rel=1e-6)
