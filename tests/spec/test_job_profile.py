"""Job profiles: Megatron's flags and a grid become a shape."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.job_profile import deal_layers, load_job
from megatron_elas.spec.tables import configs_folder


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "kv_heads", "sequence_parallel"),
    [
        ("llama2-7b", 32, 4096, 32, False),
        ("llama2-13b", 40, 5120, 40, True),
        ("llama2-34b", 48, 8192, 8, True),
        ("llama2-70b", 80, 8192, 8, True),
    ],
)
def test_a_llama_has_its_published_shape_and_fills_96_devices(
    name: str, layers: int, hidden: int, kv_heads: int, sequence_parallel: bool
) -> None:
    job = load_job(name)
    assert (job.num_layers, job.shape.hidden, job.shape.kv_heads) == (layers, hidden, kv_heads)
    assert job.shape.head_size == 128
    assert job.spec.world_size == 96
    assert job.shape.gated and not job.shape.linear_bias and not job.shape.tied
    assert job.training.sequence_parallel is sequence_parallel
    assert job.training.weight_bytes == 2 and job.training.sharded_optimizer


def test_another_grid_has_the_same_layers() -> None:
    job = load_job("llama2-34b").with_grid(
        pipeline_parallel=10, data_parallel=2, num_microbatches=40, micro_batch_size=3
    )
    assert job.shape.layers == (5, 5, 5, 5, 5, 5, 5, 5, 4, 4)
    assert (job.spec.tensor_parallel, job.spec.micro_batch_size, job.spec.world_size) == (4, 3, 80)


def test_layers_that_are_too_few_are_refused() -> None:
    with pytest.raises(BadUsage, match="3 layers are too few for 4 stages: choose a pipeline of at most 3"):
        deal_layers(3, 4)


def job_file(folder: Path, model: str, more: str = "") -> Path:
    path = folder / "job.toml"
    text = (configs_folder() / "jobs/llama2-7b.toml").read_text().replace("../llama/7b.args", model)
    path.write_text(text + more)
    return path


@pytest.mark.parametrize(
    ("flags", "more", "sentence"),
    [
        (None, "", r"model.args cannot be read \(No such file or directory\): name another file of flags"),
        ("--num-layers 4", "", r"model.args: --hidden-size is None: give it a whole number"),
        ("--hidden-size many", "", r"model.args: --hidden-size is 'many': give it a whole number"),
    ],
)
def test_flags_that_are_wrong_get_a_sentence(tmp_path: Path, flags: str | None, more: str, sentence: str) -> None:
    if flags is not None:
        (tmp_path / "model.args").write_text(flags)
    with pytest.raises(BadUsage, match=sentence):
        load_job(str(job_file(tmp_path, "model.args", more)))


def test_an_unknown_recomputation_gets_a_sentence(tmp_path: Path) -> None:
    model = str(configs_folder() / "llama/7b.args")
    assert load_job(str(job_file(tmp_path, model, 'recompute = "full"\n'))).training.recompute == "full"
    with pytest.raises(BadUsage, match="recompute is 'some': write none, selective or full"):
        load_job(str(job_file(tmp_path, model, 'recompute = "some"\n')))


def test_a_gpt_with_biases_and_dropout_is_described_as_such(tmp_path: Path) -> None:
    (tmp_path / "gpt.args").write_text(
        "--num-layers 4\n--hidden-size 64 # narrow\n--num-attention-heads 4\n"
        "--seq-length 32\n--max-position-embeddings 32\n"
    )
    job = load_job(str(job_file(tmp_path, "gpt.args")))
    assert (job.shape.ffn, job.shape.positions, job.shape.norm_vectors) == (256, 32, 2)
    assert job.shape.linear_bias and job.shape.tied and not job.shape.gated
    assert job.training.hidden_dropout and job.training.attention_dropout
    assert job.training.weight_bytes == 4 and not job.training.sharded_optimizer
