"""Launch scripts and model configs: they agree with the published shapes and hand on what they should."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_elas.host.argument_files import expand_files

REPO = Path(__file__).resolve().parents[2]
MODELS = ("tiny", "7b", "13b", "34b", "70b")
VOCAB_SIZE = 32000
PARAMETERS_B = {"7b": 6.74, "13b": 13.0, "34b": 33.7, "70b": 69.0}
"""Billions, from the published shapes."""


def value(words: list[str], flag: str, default: int = 0) -> int:
    return int(words[words.index(flag) + 1]) if flag in words else default


@pytest.mark.parametrize("model", PARAMETERS_B)
def test_a_config_has_the_published_number_of_parameters(model: str) -> None:
    words = expand_files([f"@llama/{model}.args"])
    hidden, ffn, heads = (
        value(words, f"--{name}") for name in ("hidden-size", "ffn-hidden-size", "num-attention-heads")
    )
    kv_share = value(words, "--num-query-groups", heads) / heads
    layer = hidden * hidden * (2 + 2 * kv_share) + 3 * hidden * ffn + 2 * hidden
    total = value(words, "--num-layers") * layer + 2 * VOCAB_SIZE * hidden + hidden
    assert total / 1e9 == pytest.approx(PARAMETERS_B[model], rel=0.01)


def launch(tmp_path: Path, script: str, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a launch script with an interpreter that only prints its arguments."""
    python = make_python(tmp_path / "python")
    return run(REPO, script, *flags, **{"PYTHON": str(python), **environ})


def make_python(path: Path, first_line: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\n{first_line}\nprintf "%s\\n" "$@"\n')
    path.chmod(0o755)
    return path


def run(repo: Path, script: str, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(repo / "scripts" / script), *flags],
        env={"PATH": os.environ["PATH"], **environ},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


@pytest.mark.process
@pytest.mark.parametrize("model", MODELS)
def test_a_launch_script_gives_a_grid_that_its_workers_fill(model: str, tmp_path: Path) -> None:
    ran = launch(tmp_path, f"launch_llama_{model}.sh", "--seed", "7")
    assert ran.returncode == 0, ran.stderr
    words = ran.stdout.splitlines()
    assert words[:2] == ["-m", "megatron_elas.cli.elasrun"]
    assert f"@{REPO}/configs/llama/{model}.args" in words
    assert "--elastic" in words
    assert words[-2:] == ["--seed", "7"]
    tp, pp = value(words, "--tensor-model-parallel-size"), value(words, "--pipeline-model-parallel-size")
    layers = value(expand_files([f"@llama/{model}.args"]), "--num-layers")
    # The larger models need several nodes of this many workers.
    assert value(words, "--nproc-per-node") % tp == 0
    assert layers % pp == 0


@pytest.mark.process
def test_data_and_stock_training_can_be_asked_for(tmp_path: Path) -> None:
    data = tmp_path / "text.args"
    data.write_text("--data-path x")
    ran = launch(tmp_path, "launch_llama_tiny.sh", DATA=str(data), ELASTIC="no", WORKERS="2", PP="1")
    words = ran.stdout.splitlines()
    assert f"@{data}" in words
    assert "--mock-data" not in words
    assert "--elastic" not in words
    assert value(words, "--nproc-per-node") == 2


@pytest.mark.process
@pytest.mark.parametrize(
    ("asked", "elastic"), [("Yes", True), ("true", True), ("1", True), ("FALSE", False), ("0", False)]
)
def test_elastic_can_be_said_in_several_ways(tmp_path: Path, asked: str, elastic: bool) -> None:
    ran = launch(tmp_path, "launch_llama_tiny.sh", ELASTIC=asked)
    assert ("--elastic" in ran.stdout.splitlines()) == elastic


NODES = {"NNODES": "2", "RDZV_ENDPOINT": "node0:29400"}


@pytest.mark.process
@pytest.mark.parametrize(
    "environ",
    [
        {**NODES, "NODE_RANK": "1", "SLURM_NODEID": "0", "TOKEN_FILE": "/some/secret"},
        {**NODES, "SLURM_NODEID": "1", "TOKEN_FILE": "/some/secret", "ELAS_TOKEN": "x"},
    ],
    ids=["named", "slurm"],
)
def test_a_node_of_several_gets_its_rank_and_the_secret(tmp_path: Path, environ: dict[str, str]) -> None:
    words = launch(tmp_path, "launch_llama_7b.sh", **environ).stdout.splitlines()
    assert words[2 : words.index("--nproc-per-node")] == [
        *("--nnodes", "2", "--rdzv-endpoint", "node0:29400", "--node-rank", "1", "--token-file", "/some/secret")
    ]


@pytest.mark.process
def test_slurm_does_not_make_a_single_node_one_of_several(tmp_path: Path) -> None:
    assert "--node-rank" not in launch(tmp_path, "launch_llama_tiny.sh", SLURM_NODEID="3").stdout.splitlines()


@pytest.mark.process
def test_the_environment_of_the_checkout_is_used_unless_python_is_set(tmp_path: Path) -> None:
    shutil.copytree(REPO / "scripts", tmp_path / "scripts")
    shutil.copytree(REPO / "configs", tmp_path / "configs")
    make_python(tmp_path / ".venv/bin/python", "echo this is .venv")
    other = make_python(tmp_path / "other")
    assert run(tmp_path, "launch_llama_tiny.sh").stdout.startswith("this is .venv\n")
    assert run(tmp_path, "launch_llama_tiny.sh", PYTHON=str(other)).stdout.startswith("-m\n")


@pytest.mark.process
@pytest.mark.parametrize(
    ("flags", "environ", "sentence"),
    [
        (["tiny"], {"ELASTIC": "off"}, "ELASTIC is 'off': set it to yes or no"),
        (["tiny"], {"PYTHON": "/no/python"}, "there is no Python '/no/python'"),
        (["tiny"], {**NODES, "ELAS_TOKEN": "x"}, "NNODES is 2: set NODE_RANK on every node"),
        (["tiny"], {**NODES, "NODE_RANK": "0"}, "NNODES is 2: set TOKEN_FILE"),
        (["8b"], {}, "there is no model '8b': give one of 13b 34b 70b 7b tiny"),
        (["tiny"], {"DATA": "/no/text.args"}, "data file '/no/text.args' does not exist"),
        (["tiny"], {"NNODES": "2"}, "set RDZV_ENDPOINT"),
    ],
)
def test_bad_input_gets_one_sentence(tmp_path: Path, flags: list[str], environ: dict[str, str], sentence: str) -> None:
    ran = launch(tmp_path, "launch_llama.sh", *flags, **environ)
    assert ran.returncode == 2
    assert sentence in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1


@pytest.mark.process
def test_the_scripts_are_clean() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    scripts = sorted(map(str, (REPO / "scripts").glob("*.sh")))
    ran = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout
