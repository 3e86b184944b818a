"""A real checkout's own pretrain_gpt.py, patched: it loses a worker and goes on as if nothing had happened."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from megatron_elas.cli import elas
from megatron_elas.cli.patch import VERSION_FILE
from tests.fault.runs import MODEL, REPO, Run, launcher, run_command
from tests.megatron_checkout import copy_checkout, give_dataset_helper

pytestmark = [pytest.mark.process, pytest.mark.timeout(500)]

STEPS = 12
PATCH_NUMBER = 77
"""Of the copied checkout's version, which no other Megatron here has."""
PRELOAD = "--preload=megatron_elas.pretrain_gpt:preload"


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a patched copy of a checkout that is no repository."""
    checkout = copy_checkout(tmp_path_factory.mktemp("checkout") / "Megatron-LM")
    give_dataset_helper(checkout)
    version = checkout / VERSION_FILE
    version.write_text(re.sub(r"^PATCH = .*$", f"PATCH = {PATCH_NUMBER}", version.read_text(), flags=re.MULTILINE))
    assert elas.main(["patch", "apply", str(checkout)]) == 0
    return checkout / "pretrain_gpt.py"


def train(folder: Path, script: Path, *flags: str, launch: Sequence[str] = (), path: Sequence[Path] = ()) -> Run:
    """Run that script itself under elasrun, on a PP2 x DP2 grid, and save at the end."""
    command = [
        *launcher(4), *launch, str(script), *MODEL, f"--train-iters={STEPS}", "--global-batch-size=8",
        "--pipeline-model-parallel-size=2", "--elastic",
        "--elastic-migration=off", f"--elastic-sample-log={folder / 'samples'}",
        "--ckpt-format=torch_dist", f"--save={folder / 'checkpoints'}", "--save-interval=1000", *flags,
    ]  # fmt: skip
    paths = os.pathsep.join(map(str, (*path, REPO)))
    return run_command(["env", f"PYTHONPATH={paths}", *command], folder, (), 200)


@pytest.fixture(scope="module")
def calm(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The undisturbed run."""
    return train(tmp_path_factory.mktemp("calm") / "run", script)


def saved_state(run: Run) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state that the run ended with, by name."""
    (folder,) = (run.folder / "checkpoints").glob("iter_*")
    assert folder.name == f"iter_{STEPS:07d}"
    reader = FileSystemReader(folder)
    state = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in reader.read_metadata().state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    load(state, storage_reader=reader, no_dist=True)
    return state


def assert_same(run: Run, calm: Run) -> None:
    """As ``runs.assert_same_training``, with the state read from the checkpoints of both runs."""
    assert run.code == calm.code == 0, run.output[-6000:]
    assert run.iterations == calm.iterations == list(range(1, STEPS + 1))
    assert run.consumed == calm.consumed
    assert run.samples == calm.samples
    assert [sorted(stages) for stages in run.samples.values()] == [[0, 1]] * STEPS
    assert run.losses == pytest.approx(calm.losses, rel=1e-5)
    assert calm.losses[-1] < calm.losses[0] - 0.5, "it learns nothing, so equal losses would say nothing"
    ours, theirs = saved_state(run), saved_state(calm)
    assert ours.keys() == theirs.keys()
    assert len([name for name in theirs if "exp_avg_sq" in name]) > 5
    for name, value in theirs.items():
        error = (ours[name].float() - value.float()).abs().amax() / value.float().abs().amax().clamp(min=1e-30)
        assert error <= 1e-3, f"{name}: differs by {error:.1e} of its largest entry"


@pytest.mark.slow
@pytest.mark.parametrize("preload", [False, True], ids=["each-imports", "forked-from-a-preload"])
def test_a_killed_worker_changes_neither_losses_nor_samples_nor_state(
    preload: bool, script: Path, calm: Run, tmp_path: Path
) -> None:
    fault = f"kill:worker={0 if preload else 3}@step=5,phase=backward,microbatch=2"
    launch, path = ([PRELOAD], [script.parent]) if preload else ([], [])
    run = train(tmp_path / "run", script, "--elastic-inject", fault, launch=launch, path=path)
    assert run.fired == [fault], run.output[-6000:]
    assert run.output.count("---- recovered: epoch 1 ") == 1
    assert f"> Megatron-Core version .......... 0.19.{PATCH_NUMBER}" in run.output
    assert_same(run, calm)


def test_a_preload_of_another_megatron_is_refused(script: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "run", script, launch=[PRELOAD])
    assert run.code == 2
    (told,) = [line for line in run.output.splitlines() if line.startswith("megatron_elas: ")]
    assert f"start elasrun with PYTHONPATH={script.parent}, or without --preload" in told
    assert "Traceback" not in run.output


BAD_INPUT = {
    "not covered": (["--sft"], "--sft is not supported by megatron_elas"),
    "two handlers": (["--inprocess-restart"], "--elastic and --inprocess-restart both want to handle lost workers"),
    "misspelt flag": (["--tensor-modle-parallel-size=2"], "did you mean --tensor-model-parallel-size?"),
    "megatron's own": (["--num-attention-heads=3"], "Megatron refuses these arguments"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_gets_one_sentence_and_code_2(name: str, script: Path, tmp_path: Path) -> None:
    flags, sentence = BAD_INPUT[name]
    run = train(tmp_path / "run", script, *flags, launch=[PRELOAD], path=[script.parent])
    assert run.code == 2, run.output[-3000:]
    told = [
        line for line in run.output.splitlines() if line.startswith("megatron_elas: ") and "so this run" not in line
    ]
    assert len(told) == 1 and sentence in told[0]
    assert "Traceback" not in run.output


@pytest.mark.slow
def test_without_elasrun_the_script_says_what_it_needs(script: Path, tmp_path: Path) -> None:
    environment = ["env", "-u", "ELAS_CONTROLLER", f"PYTHONPATH={REPO}", "RANK=0"]
    run = run_command(
        [*environment, sys.executable, str(script), *MODEL, "--elastic", "--elastic-migration=off"],
        tmp_path / "run",
        (),
        100,
    )
    assert run.code == 2, run.output[-3000:]
    assert "megatron_elas: --elastic needs elasrun" in run.output
    assert "Traceback" not in run.output
