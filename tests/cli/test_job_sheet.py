"""The memory of a dry run's sheet, with what this machine has: the same numbers as the run's own check."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megatron_elas.cli.dry_run import place_workers
from megatron_elas.cli.job_sheet import JobSheet
from megatron_elas.cli.launch_flags import read_options
from megatron_elas.planner.memory import plan_memory, sum_memories
from megatron_elas.planner.plan import initial_plan
from megatron_elas.platform.host_memory import AvailableMemory
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.shape import ModelShape, RunFacts, TrainingShape

JOB = JobSpec(
    tensor_parallel=1, pipeline_parallel=2, data_parallel=4, micro_batch_size=1, num_microbatches=256,
    stage_layers=(16, 16),
)  # fmt: skip
SHAPE = ModelShape(
    layers=(16, 16), hidden=4096, ffn=11008, heads=32, kv_heads=32, head_size=128, vocab=32000, positions=0,
    sequence=4096, norm_vectors=1, qk_norm=False, gated=True, linear_bias=False, qkv_bias=False, tied=False,
)  # fmt: skip
FUSED = TrainingShape(
    weight_bytes=2, gradient_bytes=4, sharded_optimizer=True, sequence_parallel=False, recompute="none",
    hidden_dropout=False, attention_dropout=False, keeps_scores=False,
)  # fmt: skip
FACTS = RunFacts(
    platform="cpu", added_flags=("--transformer-impl", "local"), elastic=True, snapshot="replay", streams="resharded",
    elastic_refusal=None, unreachable_faults=(), uncovered=(), job=JOB, shape=SHAPE, training=FUSED,
)  # fmt: skip


def sheet(available: int, facts: RunFacts = FACTS, nodes: int = 1) -> str:
    flags = [f"--nnodes={nodes}", f"--nproc-per-node={8 // nodes}", "--dry-run"]
    flags += ["--node-rank=0", "--rdzv-endpoint=node0:1"] if nodes > 1 else []
    options = read_options([*flags, "-m", "megatron_elas.pretrain_gpt"], {"ELAS_TOKEN": "x"})
    memory = AvailableMemory(size=available, source="MemAvailable")
    return JobSheet(options, place_workers(options, {}), facts, memory).describe()


@pytest.mark.parametrize(("nodes", "who"), [(1, range(8)), (2, range(4))])
def test_a_machine_that_would_refuse_the_workers_of_a_node_is_told_of(nodes: int, who: range) -> None:
    domains = {worker: f"node{worker // 4}" if nodes > 1 else f"worker{worker}" for worker in range(8)}
    plan = initial_plan(JOB, domains)
    # What the run's own check reckons with on the CPU.
    unfused = plan_memory(plan, JOB, SHAPE, replace(FUSED, keeps_scores=True), "replay")
    node = sum_memories(unfused[worker] for worker in who)
    told = re.search(r"^This machine has .*$", sheet(node.needed - 1, nodes=nodes), re.MULTILINE)
    assert told is not None
    parts = " ".join(f"{size / 2**30:.1f}" for size in (node.needed, node.training, node.copies, node.recovery))
    assert " ".join(re.findall(r"\d+\.\d", told[0])[1:]) == parts
    assert f"a run of workers 0-{len(who) - 1} here would be refused" in told[0]
    assert "This machine has" not in sheet(node.needed, nodes=nodes)


def test_where_a_run_looks_at_no_memory_the_sheet_says_nothing_of_the_machine() -> None:
    assert "This machine has" not in sheet(0, replace(FACTS, platform="cuda"))
    assert "This machine has" not in sheet(0, replace(FACTS, elastic=False, snapshot="off"))


def test_what_unfused_attention_takes_more_is_told_for_every_stage() -> None:
    """Two micro-batches are under way on stage 0, and one on stage 1."""
    assert "per worker activations take 32.0 GiB on stage 0, 16.0 GiB on stage 1 more." in sheet(0)
    assert "6.738 billion parameters" in sheet(0) and "memory per worker in GiB" in sheet(0)
