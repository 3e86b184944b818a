"""The memory formula gives what is published for it, term by term."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_elas.planner.memory import (
    count_parameters,
    estimate_activations,
    estimate_memory,
    plan_memory,
    total_parameters,
)
from megatron_elas.planner.plan import initial_plan
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.shape import ModelShape, TrainingShape

S, B, H, A = 2048, 4, 6144, 64
"""Sequence, micro-batch, hidden size, heads: the 22 billion parameters of arXiv 2205.05198, table 3."""
GPT = ModelShape(
    layers=(48,), hidden=H, ffn=4 * H, heads=A, kv_heads=A, head_size=H // A, vocab=51200, positions=S, sequence=S,
    norm_vectors=2, qk_norm=False, gated=False, linear_bias=True, qkv_bias=True, tied=True,
)  # fmt: skip
MIXED = TrainingShape(
    weight_bytes=2, gradient_bytes=4, sharded_optimizer=True, sequence_parallel=False, recompute="none",
    hidden_dropout=True, attention_dropout=True, keeps_scores=True,
)  # fmt: skip


def activations(training: TrainingShape, tensor_parallel: int, layers: int = 48) -> float:
    """Of the layers alone, in bytes per sequence element, micro-batch and hidden element."""

    def whole(count: int) -> int:
        return estimate_activations(
            replace(GPT, layers=(count,)), training, 0, tensor_parallel, micro_batch_size=B, micro_batches=8
        )

    return (whole(layers) - whole(0)) / (S * B * H * layers)


def test_the_model_of_the_paper_has_its_22_billion_parameters() -> None:
    assert total_parameters(GPT) / 1e9 == pytest.approx(22, rel=0.02)


@pytest.mark.parametrize("t", [1, 8])
def test_activations_are_those_of_table_2_of_the_paper(t: int) -> None:
    scores = 5 * A * S / H
    assert activations(MIXED, t) == pytest.approx(10 + 24 / t + scores / t)
    parallel = replace(MIXED, sequence_parallel=True)
    assert activations(parallel, t) == pytest.approx(34 / t + scores / t)
    assert activations(replace(parallel, recompute="selective"), t) == pytest.approx(34 / t)


def test_full_recomputation_keeps_the_inputs_of_layers_and_one_layer_that_is_run_again() -> None:
    one = activations(MIXED, 1)
    full = replace(MIXED, recompute="full")
    kept = estimate_activations(GPT, full, 0, 1, micro_batch_size=B, micro_batches=8)
    ends = estimate_activations(replace(GPT, layers=(0,)), full, 0, 1, micro_batch_size=B, micro_batches=8)
    assert kept - ends == pytest.approx(S * B * H * 2 * 48, rel=1e-6)
    none = estimate_activations(replace(GPT, layers=(0,)), MIXED, 0, 1, micro_batch_size=B, micro_batches=8)
    assert ends - none == pytest.approx(S * B * H * one, rel=1e-6)


@pytest.mark.parametrize("cells", [1, 2, 8])
def test_bytes_per_parameter_are_those_of_megatrons_guide(cells: int) -> None:
    """18 without the distributed optimizer, 6 + 12 / d with it; in fp32 16, and 8 + 8 / d."""

    def bytes_per_parameter(training: TrainingShape) -> float:
        memory = memory_of(GPT, training, cells=cells)
        return (memory.weights + memory.gradients + memory.optimizer) / memory.parameters

    full = replace(MIXED, weight_bytes=4)
    exact = memory_of(GPT, replace(MIXED, sum_bytes=8), cells=cells)
    assert exact.device - memory_of(GPT, MIXED, cells=cells).device == exact.sums == 8 * exact.parameters
    assert bytes_per_parameter(replace(MIXED, sharded_optimizer=False)) == pytest.approx(18)
    assert bytes_per_parameter(MIXED) == pytest.approx(6 + 12 / cells)
    assert bytes_per_parameter(replace(full, sharded_optimizer=False)) == pytest.approx(16)
    assert bytes_per_parameter(full) == pytest.approx(8 + 8 / cells)


def memory_of(  # type: ignore[no-untyped-def]
    shape: ModelShape, training: TrainingShape, *, cells: int, stage: int = 0, snapshot: str = "off", wards: int = 0
):
    """Of a worker that keeps copies for so many others of its stage."""
    parameters = count_parameters(shape, stage, 1)
    return estimate_memory(
        shape, training, stage=stage, tensor_parallel=1, cells=cells, micro_batch_size=B, micro_batches=8,
        snapshot=snapshot, wards=[parameters // cells] * wards, later_wards=[parameters // max(1, cells - 1)] * wards,
    )  # fmt: skip


@pytest.mark.parametrize("cells", [2, 4])
def test_copies_are_two_versions_of_three_fp32_values_per_element_of_a_shard_and_of_each_wards(cells: int) -> None:
    memory = memory_of(GPT, MIXED, cells=cells, snapshot="copy", wards=3)
    assert memory.own_copies == pytest.approx(2 * 3 * 4 * memory.parameters / cells)
    assert memory.backup_copies == pytest.approx(3 * memory.own_copies)
    assert memory.host == memory.own_copies + memory.backup_copies
    # A new version of all, cut for one cell less.
    assert memory.recovery == pytest.approx(4 * 3 * 4 * memory.parameters / (cells - 1))


@pytest.mark.parametrize("cells", [2, 4])
def test_replay_keeps_one_version_of_each_wards_shard_and_gradients_on_their_way(cells: int) -> None:
    memory = memory_of(GPT, MIXED, cells=cells, snapshot="replay", wards=2)
    assert memory.own_copies == pytest.approx(4 * memory.parameters / cells)
    assert memory.backup_copies == pytest.approx(2 * (3 + 1) * 4 * memory.parameters / cells)
    both_own = 3 * 4 * memory.parameters * (1 / cells + 1 / (cells - 1))
    assert memory.recovery == pytest.approx(both_own + (4 + 2 * 16) * memory.parameters / (cells - 1))
    assert memory.host_peak == memory.host + memory.recovery


def test_nothing_is_kept_without_snapshots() -> None:
    memory = memory_of(GPT, MIXED, cells=2)
    assert (memory.host, memory.recovery) == (0, 0)


JOB = JobSpec(tensor_parallel=1, pipeline_parallel=2, data_parallel=2, micro_batch_size=B, num_microbatches=8)


def test_every_worker_of_a_plan_has_the_copies_of_those_it_backs_up() -> None:
    shape = replace(GPT, layers=(30, 18), tied=False)
    plan = initial_plan(JOB, {worker: f"worker{worker}" for worker in range(4)})
    memories = plan_memory(plan, JOB, shape, MIXED, "replay")
    assert memories.keys() == {0, 1, 2, 3}
    assert memories[0] == memories[1] and memories[2] == memories[3]
    assert memories[0].host > memories[2].host > 0
    for worker, memory in memories.items():
        stage = plan.placement.seat(worker).stage
        expected = memory_of(shape, MIXED, cells=2, stage=stage, snapshot="replay", wards=1)
        assert (memory.host, memory.recovery) == (expected.host, expected.recovery)


def test_when_a_stage_has_one_cell_its_layers_move_to_a_worker_that_has_room_for_both() -> None:
    shape = replace(GPT, layers=(30, 18), tied=False)
    memory = memory_of(shape, MIXED, cells=1, snapshot="replay")
    both = sum(count_parameters(shape, stage, 1) for stage in range(2))
    assert memory.recovery == pytest.approx(3 * 4 * (memory.parameters + both) + 4 * both)


def test_stages_differ_by_embedding_head_and_the_passes_they_hold() -> None:
    staged = replace(GPT, layers=(12, 12, 12, 12), tied=False)
    first, second, third, last = (memory_of(staged, MIXED, cells=2, stage=stage) for stage in range(4))
    vocabulary = 51200 * H
    assert first.parameters - second.parameters == vocabulary + S * H
    assert last.parameters - second.parameters == vocabulary + 2 * H
    assert second.activations / third.activations == pytest.approx(3 / 2)
    assert first.activations > second.activations
    few = estimate_activations(staged, MIXED, 1, 1, micro_batch_size=B, micro_batches=1)
    assert few == pytest.approx(second.activations / 3, abs=1)


def test_a_tied_head_is_a_copy_of_its_own_only_when_it_is_on_another_stage() -> None:
    one, two = GPT, replace(GPT, layers=(24, 24))
    assert total_parameters(one) == total_parameters(two)
    assert sum(count_parameters(two, stage, 1) for stage in range(2)) - count_parameters(one, 0, 1) == 51200 * H
