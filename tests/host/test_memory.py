"""The sizes that a dry run tells are those of Megatron's own models and of workers that train."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_elas.planner.memory import WorkerMemory, count_parameters, estimate_memory, total_parameters
from megatron_elas.spec.shape import ModelShape, TrainingShape
from tests.fault.runs import Run, launcher, run_command
from tests.forker import Forker, running_forker

pytestmark = pytest.mark.process

RECORDER = str(Path(__file__).parent / "memory_recorder.py")
PUBLISHED_B = {"7b": 6.74, "13b": 13.0, "34b": 33.7, "70b": 69.0}
"""Billions of parameters, from the published shapes, with 32000 tokens."""
GRIDS = {"7b": (8, 1, 2), "13b": (8, 2, 2), "34b": (32, 8, 2), "70b": (64, 8, 4)}
"""(workers, tensor, pipeline) of scripts/launch_llama_*.sh."""
RUN = shlex.split(
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --micro-batch-size 1 --global-batch-size 64 "
    "--train-iters 1"
)
OTHERS = {
    "gpt": "--normalization LayerNorm --position-embedding-type learned_absolute",
    "gpt-qkv-bias": "--normalization LayerNorm --disable-bias-linear --add-qkv-bias",
    "tied": "--normalization RMSNorm --swiglu --disable-bias-linear --qk-layernorm --num-query-groups 4 "
    "--group-query-attention --kv-channels 48",
    "uneven": "--normalization RMSNorm --untie-embeddings-and-output-weights --num-layers 7 "
    "--decoder-first-pipeline-num-layers 4",
}
"""Beside a hidden size of 256 and 8 heads."""


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    with running_forker() as running:
        yield running


def count(forker: Forker, folder: Path, flags: list[str], grid: tuple[int, int, int]) -> tuple[list[int], ModelShape]:
    """Parameters of lane 0 of every stage of the real model, and its description."""
    workers, tp, pp = grid
    grid_flags = ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]
    result = forker.run(
        1, "tests.host.model_sizes:count_on_meta", folder, str(folder), [*RUN, *flags, *grid_flags], workers
    )
    assert result.statuses == [0], result.logs[0][-3000:]
    counted = json.loads((folder / "counted.json").read_text())
    return counted["stages"], msgspec.convert(counted["shape"], ModelShape)


@pytest.mark.parametrize("model", PUBLISHED_B)
def test_a_llama_has_the_published_number_of_parameters_and_we_count_what_megatron_builds(
    forker: Forker, tmp_path: Path, model: str
) -> None:
    _, tp, pp = GRIDS[model]
    built, shape = count(forker, tmp_path, [f"@llama/{model}.args"], GRIDS[model])
    assert [count_parameters(shape, stage, tp) for stage in range(pp)] == built
    assert total_parameters(shape) / 1e9 == pytest.approx(PUBLISHED_B[model], rel=0.01)
    # Norms are on every lane, and the vocabulary may be padded further for more lanes.
    assert sum(built) * tp / 1e9 == pytest.approx(PUBLISHED_B[model], rel=0.01)


@pytest.mark.parametrize(
    ("kind", "grid"),
    [(kind, grid) for kind in OTHERS for grid in ((4, 1, 2), (4, 2, 2), (2, 2, 1)) if kind != "uneven" or grid[2] > 1],
)
def test_other_models_are_counted_too(forker: Forker, tmp_path: Path, kind: str, grid: tuple[int, int, int]) -> None:
    model = "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64"
    extra = "--lr 1e-3 --eval-interval 10 --eval-iters 0"
    flags = shlex.split(f"{model} {extra} {OTHERS[kind]}")
    built, shape = count(forker, tmp_path, flags, grid)
    assert [count_parameters(shape, stage, grid[1]) for stage in range(grid[2])] == built


WIDE = shlex.split(
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 704 --num-attention-heads 8 --seq-length 128 "
    "--max-position-embeddings 128 --normalization RMSNorm --position-embedding-type rope --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--use-distributed-optimizer --micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-3 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 4096 --log-interval 1 --eval-interval 1000 "
    "--eval-iters 0 --num-workers 0 --elastic"
)
"""Wide enough for the padding of buckets to be small: 128 to 512 elements beside 800 000 in a layer."""


TWO_STAGES = ModelShape(
    layers=(2, 2), hidden=256, ffn=704, heads=8, kv_heads=8, head_size=32, vocab=4096, positions=0, sequence=128,
    norm_vectors=1, qk_norm=False, gated=True, linear_bias=False, qkv_bias=False, tied=False,
)  # fmt: skip
ONE_STAGE = replace(TWO_STAGES, layers=(4,))


def train(folder: Path, *flags: str) -> Run:
    """The wide model on four workers."""
    command = [*launcher(4), "--preload=megatron_elas.pretrain_gpt:preload", RECORDER, *WIDE, *flags]
    run = run_command(command, folder, (), 100)
    assert run.code == 0, run.output[-4000:]
    return run


def measured(run: Run) -> dict[int, dict[str, Any]]:
    """What the workers that came to the end wrote, by worker."""
    return {int(path.suffixes[0][1:]): json.loads(path.read_text()) for path in run.folder.glob("memory.*.json")}


def foretell(shape: ModelShape, stage: int, cells: int, snapshot: str, precision: str = "fp32") -> WorkerMemory:
    """Of a worker with one ward of its own stage."""
    training = TrainingShape(
        weight_bytes=2 if precision == "bf16" else 4, gradient_bytes=4, sharded_optimizer=True, sequence_parallel=False,
        recompute="none", hidden_dropout=False, attention_dropout=False, keeps_scores=True,
    )  # fmt: skip
    parameters = count_parameters(shape, stage, 1)
    return estimate_memory(
        shape, training, stage=stage, tensor_parallel=1, cells=cells, micro_batch_size=1, micro_batches=1,
        snapshot=snapshot, wards=[parameters // cells], later_wards=[parameters // (cells - 1)],
    )  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_memory_of_training_workers_is_as_told(tmp_path: Path, precision: str) -> None:
    """Weights, gradients, optimizer and copies to 1 % (padding); activations, an estimate, to 5 %.

    Activations are told for fused norms and gates. The CPU's keep more, in fp32: what a norm gives before its weight
    is applied, and the gate after its SiLU. That is added here.
    """
    flags = ["--bf16"] if precision == "bf16" else []
    run = train(tmp_path / "run", "--pipeline-model-parallel-size=2", *flags)
    sizes = measured(run)
    assert sizes.keys() == {0, 1, 2, 3}
    told = [foretell(TWO_STAGES, stage, 2, "replay", precision) for stage in (0, 1)]
    said = re.search(r"take ([\d.]+) MiB of host memory for workers 0-3: .*; ([\d.]+) MiB while a recovery", run.output)
    assert said is not None
    assert float(said[1]) == pytest.approx(2 * sum(memory.host for memory in told) / 2**20, rel=0.01)
    assert float(said[2]) == pytest.approx(2 * sum(memory.host_peak for memory in told) / 2**20, rel=0.01)
    for worker, size in sizes.items():
        shape, stage = TWO_STAGES, size["stage"]
        for kind in ("weights", "gradients", "optimizer", "own_copies", "backup_copies"):
            assert getattr(told[stage], kind) == pytest.approx(size[kind], rel=0.01), (worker, kind)
        norms = 2 * shape.layers[stage] + stage
        unfused = 4 * shape.sequence * (norms * shape.hidden + shape.layers[stage] * shape.ffn)
        assert told[stage].activations + unfused == pytest.approx(size["activations"], rel=0.05), worker


@pytest.mark.parametrize("snapshot", ["replay", pytest.param("copy", marks=pytest.mark.slow)])
def test_memory_of_a_recovery_is_as_told(tmp_path: Path, snapshot: str) -> None:
    """Of all tensors of a worker, with both layouts there and the new optimizer in use, beyond those before.

    To 5 %: padding, and up to 1.7 of 46 MB that training itself holds for a moment.
    """
    fault = "kill:worker=2@step=2,phase=backward,microbatch=0"
    run = train(tmp_path / "run", f"--elastic-snapshot={snapshot}", "--elastic-inject", fault)
    assert run.fired == [fault]
    before, after = (foretell(ONE_STAGE, 0, cells, snapshot) for cells in (4, 3))
    sizes = measured(run)
    assert sizes.keys() == {0, 1, 3}
    for worker, size in sizes.items():
        steady, (peak,) = size["tensors"][1], size["tensors in recovery"]
        more = peak - steady
        assert more == pytest.approx(before.recovery + after.optimizer - before.optimizer, rel=0.05), worker


HUGE = shlex.split(
    "--num-layers 48 --hidden-size 16384 --num-attention-heads 64 --seq-length 64 --max-position-embeddings 64 "
    "--use-distributed-optimizer --micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 512 --eval-interval 1000 --eval-iters 0 --elastic"
)
"""150 billion parameters: 1.8 TiB for weights and gradients of two workers."""


def test_a_job_that_does_not_fit_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    run = run_command([*launcher(2), "-m", "megatron_elas.pretrain_gpt", *HUGE], tmp_path / "run", (), 100)
    assert run.code == 2, run.output[-3000:]
    # The worker itself may be ended before it has said it too.
    told = [line for line in run.output.splitlines() if line.startswith("elasrun: worker 0: host memory")]
    assert len(told) == 1, run.output[-3000:]
    assert re.search(
        r"host memory is too small for workers 0-1: [\d.]+ GiB = [\d.]+ GiB for training, [\d.]+ GiB for copies of "
        r"optimizer state \(--elastic-snapshot replay\) and [\d.]+ GiB more while a recovery goes on; available are "
        r"[\d.]+ GiB \(.*\): start fewer workers on this node, raise the limit, or keep fewer copies with "
        r"--elastic-snapshot off \(exit code 2\)$",
        told[0],
    ), told[0]
    assert "building GPT model" not in run.output and "Traceback" not in run.output
