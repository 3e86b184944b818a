"""Launch scripts and model configs: they agree with the published shapes and hand on what they should."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
MODELS = ("tiny", "7b", "13b", "34b", "70b")
NODES_OF = {"tiny": 1, "7b": 1, "13b": 1, "34b": 4, "70b": 8}
"""That each script is sized for."""


def value(words: list[str], flag: str, default: int = 0) -> int:
    return int(words[words.index(flag) + 1]) if flag in words else default


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
        timeout=100,
        check=False,
    )


@pytest.mark.process
@pytest.mark.parametrize("model", MODELS)
def test_a_launch_script_hands_on_config_grid_and_flags(model: str, tmp_path: Path) -> None:
    of_node = {"NODE_RANK": "0", "RDZV_ENDPOINT": "node0", "ELAS_TOKEN": "x"}
    ran = launch(tmp_path, f"launch_llama_{model}.sh", "--seed", "7", **of_node)
    assert ran.returncode == 0, ran.stderr
    words = ran.stdout.splitlines()
    assert words[:2] == ["-m", "megatron_elas.cli.elasrun"]
    assert f"@{REPO}/configs/llama/{model}.args" in words
    assert "--elastic" in words
    assert words[-2:] == ["--seed", "7"]
    assert value(words, "--nnodes") == NODES_OF[model]


@pytest.mark.process
@pytest.mark.parametrize("model", [*MODELS[:2], *(pytest.param(model, marks=pytest.mark.slow) for model in MODELS[2:])])
def test_megatron_accepts_a_launch_script_at_its_world_size(model: str) -> None:
    ran = run(REPO, f"launch_llama_{model}.sh", DRY_RUN="yes", PYTHON=sys.executable)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert re.search(r"^--elastic +given, allowed here", ran.stdout, re.MULTILINE)
    if NODES_OF[model] == 1:
        assert "\nAny one worker may be lost.\n" in ran.stdout
    else:
        assert re.findall("If (.*)\n", ran.stdout) == ["node0 is lost, the job ends: the controller runs there."]
        assert "\nAny one node of the others may be lost.\n" in ran.stdout
    workers = NODES_OF[model] * (4 if model == "tiny" else 8)
    assert f"workers     {workers} on {NODES_OF[model]} node" in ran.stdout
    memory = re.split("memory per worker|\nCopies ", ran.stdout)[1].splitlines()[2:]
    device, host, peak = ([float(line.split()[column]) for line in memory] for column in (8, 11, 12))
    assert max(device) < 64, "an 80 GB accelerator also needs room for what is not counted"
    if model != "tiny":
        grid = re.search(r"grid: tensor (\d) x pipeline (\d) x data (\d)", ran.stdout)
        assert grid is not None
        room = f"{min(device):.0f} to {max(device):.0f} | {max(host):.0f}; {max(peak):.0f}"
        row = f"| {workers} | {' x '.join(grid.groups())} | {room} |"
        assert f"| `scripts/launch_llama_{model}.sh` {row}" in (REPO / "README.md").read_text()


@pytest.mark.process
def test_checkpoints_are_saved_and_gone_on_from_once_there_is_one(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    words = launch(tmp_path, "launch_llama_tiny.sh", CHECKPOINTS=str(folder), SAVE_INTERVAL="7").stdout.splitlines()
    assert words[words.index("--save") : words.index("--save") + 4] == ["--save", str(folder), "--save-interval", "7"]
    assert "--load" not in words
    folder.mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    words = launch(tmp_path, "launch_llama_tiny.sh", CHECKPOINTS=str(folder)).stdout.splitlines()
    assert words[words.index("--load") + 1] == str(folder)


@pytest.mark.process
def test_flags_of_elasrun_come_before_the_module(tmp_path: Path) -> None:
    words = launch(
        tmp_path, "launch_llama_tiny.sh", ELASRUN_FLAGS="--log-dir logs --grace-s 5", EXIT_CODE_FILE="/a b/code"
    ).stdout.splitlines()
    before = words[: words.index("megatron_elas.pretrain_gpt")]
    assert before[-5:-1] == ["--log-dir", "logs", "--grace-s", "5"]
    assert before[before.index("--exit-code-file") + 1] == "/a b/code"


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
        {**NODES, "SLURM_PROCID": "1", "TOKEN_FILE": "/some/secret"},
    ],
    ids=["named", "slurm", "slurm-task"],
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
        (["tiny"], {"DRY_RUN": "maybe"}, "DRY_RUN is 'maybe': set it to yes or no"),
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
