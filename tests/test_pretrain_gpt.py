"""The entry: it trains on CPUs, is stock Megatron without --elastic, and refuses bad input in one sentence."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_elas import pretrain_gpt
from megatron_elas.cli import elas
from megatron_elas.refusal import Refusal, read_refusal
from megatron_elas.spec.errors import BadUsage, WrongVersion
from tests.forker import Forker, JobResult, running_forker
from tests.megatron_checkout import copy_checkout
from tests.training_jobs import CPU_FLAGS, MOCK_DATA, TINY

pytestmark = pytest.mark.process

ENTRY = "tests.training_jobs:run_entry"
STEPS = ["--train-iters", "3"]


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    with running_forker() as running:
        yield running


def losses(result: JobResult) -> list[str]:
    """Loss and gradient norm of each step, as printed."""
    return [
        " ".join(match.groups())
        for log in result.logs
        for match in re.finditer(r"lm loss: (\S+) .* grad norm: (\S+)", log)
    ]


def train(forker: Forker, workers: int, folder: Path, *flags: str, target: str = ENTRY, root: str = "") -> JobResult:
    folder.mkdir(exist_ok=True)
    argv = [*TINY, *STEPS, *MOCK_DATA, *flags]
    return forker.run(workers, target, folder, str(folder), argv, *filter(None, [root]))


def states(folder: Path) -> list[dict[str, str]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("state*.json"))]


@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "grid",
    [
        pytest.param((1, 2), id="pp2dp2"),
        pytest.param((2, 1), id="tp2dp2", marks=pytest.mark.slow),
        pytest.param((1, 1), id="dp4", marks=pytest.mark.slow),
    ],
)
def test_a_tiny_model_learns_on_four_cpu_workers(
    forker: Forker, tmp_path: Path, grid: tuple[int, int], precision: list[str]
) -> None:
    tp, pp = map(str, grid)
    flags = ["--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp, *precision]
    result = train(forker, 4, tmp_path, *flags)
    assert result.statuses == [0] * 4, result.logs[0]
    found = [float(line.split()[0]) for line in losses(result)]
    assert len(found) == 3
    assert found[2] < found[0]


@pytest.mark.parametrize(
    "precision", [pytest.param([], id="fp32"), pytest.param(["--bf16"], id="bf16", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("grid", [(1, 2), (2, 1)], ids=["pp2", "tp2"])
def test_without_elastic_a_run_is_bit_for_bit_that_of_a_plain_use_of_megatron(
    forker: Forker, tmp_path: Path, grid: tuple[int, int], precision: list[str]
) -> None:
    tp, pp = map(str, grid)
    flags = ["--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp, "--hidden-dropout", "0.1"]
    ours = train(forker, 2, tmp_path / "ours", *flags, *precision)
    stock = train(forker, 2, tmp_path / "stock", *flags, *precision, *CPU_FLAGS, target="tests.training_jobs:run_stock")
    assert ours.statuses == stock.statuses == [0, 0], ours.logs[0] + stock.logs[0]
    assert losses(ours) == losses(stock)
    assert len(losses(ours)) == 3
    assert states(tmp_path / "ours") == states(tmp_path / "stock")
    assert all(len(state) > 10 for state in states(tmp_path / "ours"))


@pytest.mark.parametrize("action", ["revert", "apply"], ids=["unpatched", "patched"])
def test_without_elastic_a_run_is_bit_for_bit_that_of_megatrons_own_script(
    action: str, forker: Forker, tmp_path: Path
) -> None:
    root = str(copy_checkout(tmp_path / "checkout"))
    assert elas.main(["patch", action, root]) == 0
    ours = train(forker, 2, tmp_path / "ours", "--hidden-dropout", "0.1")
    target = "tests.training_jobs:run_checkout"
    stock = train(forker, 2, tmp_path / "stock", "--hidden-dropout", "0.1", *CPU_FLAGS, target=target, root=root)
    assert ours.statuses == stock.statuses == [0, 0], ours.logs[0] + stock.logs[0]
    assert losses(ours) == losses(stock)
    assert len(losses(ours)) == 3
    assert states(tmp_path / "ours") == states(tmp_path / "stock")
    assert all(len(state) > 10 for state in states(tmp_path / "ours"))


@pytest.mark.slow
def test_a_checkpoint_continues_the_run_it_came_from(forker: Forker, tmp_path: Path) -> None:
    folder, five = str(tmp_path / "checkpoint"), ["--train-iters", "5", "--ckpt-format", "torch_dist"]
    save = ["--save", folder, "--save-interval", "2", "--exit-interval", "2"]
    whole = train(forker, 2, tmp_path / "whole", *five)
    first = train(forker, 2, tmp_path / "first", *five, *save)
    second = train(forker, 2, tmp_path / "second", *five, "--load", folder)
    assert whole.statuses == first.statuses == second.statuses == [0, 0], second.logs[0]
    assert losses(first) == losses(whole)[:2]
    # Megatron's log averages the first two losses after a start from a checkpoint.
    assert losses(second)[2] == losses(whole)[4]
    assert states(tmp_path / "second") == states(tmp_path / "whole")


def test_dropout_stays_equal_on_all_lanes_of_a_tensor_parallel_group(forker: Forker, tmp_path: Path) -> None:
    result = train(forker, 2, tmp_path, "--tensor-model-parallel-size", "2", "--hidden-dropout", "0.3")
    assert result.statuses == [0, 0], result.logs[0]
    first, second = states(tmp_path)
    norms = [name for name in first if name.endswith("layernorm.weight")]
    assert norms
    assert [first[name] for name in norms] == [second[name] for name in norms]


@pytest.mark.slow
def test_sequence_parallelism_changes_nothing_in_the_losses(forker: Forker, tmp_path: Path) -> None:
    flags = ["--tensor-model-parallel-size", "2"]
    plain = train(forker, 2, tmp_path / "plain", *flags)
    sequence = train(forker, 2, tmp_path / "sequence", *flags, "--sequence-parallel")
    assert plain.statuses == sequence.statuses == [0, 0], sequence.logs[0]
    found, expected = ([float(line.split()[0]) for line in losses(result)] for result in (sequence, plain))
    # Norms see half of a sequence per rank, so their gradients are summed in another order.
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(found) == 3


@pytest.mark.slow
def test_the_module_runs_alone_without_a_launcher() -> None:
    environ = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-W", "ignore", "-m", "megatron_elas.pretrain_gpt", *TINY, *STEPS, *MOCK_DATA]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=90, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "megatron_elas: no accelerator here, so this run has --transformer-impl local" in ran.stdout
    assert ran.stdout.count("lm loss: ") == 3


def test_a_preloaded_process_has_one_thread_when_it_forks(forker: Forker, tmp_path: Path) -> None:
    assert forker.run(1, "tests.training_jobs:report_threads", tmp_path, str(tmp_path)).statuses == [1]


BAD_INPUT = {
    "grid": (["--pipeline-model-parallel-size", "3"], "2 workers cannot form a grid"),
    "micro batch": (["--micro-batch-size", "0"], "--micro-batch-size must be at least 1, got 0"),
    "global batch": (["--global-batch-size", "5"], "choose a multiple of 2"),
    "negative batch": (["--global-batch-size", "-4"], "--global-batch-size must be at least 1, got -4"),
    "argument file": (["@no/such.args"], "argument file 'no/such.args' does not exist"),
    "sft": (["--sft"], "--sft is not supported"),
    "misspelt flag": (["--tensor-modle-parallel-size", "2"], "did you mean --tensor-model-parallel-size?"),
    "megatron's own": (["--num-attention-heads", "3"], "Megatron refuses these arguments"),
    "tokenizer": (["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "no.model"], "no.model does not"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_gets_one_sentence_from_the_first_rank_only(forker: Forker, tmp_path: Path, name: str) -> None:
    flags, sentence = BAD_INPUT[name]
    result = train(forker, 2, tmp_path, *flags)
    assert result.statuses == [2, 2], result.logs[0]
    told = [
        line for line in result.logs[0].splitlines() if line.startswith("megatron_elas: ") and "so this run" not in line
    ]
    assert len(told) == 1
    assert sentence in told[0]
    assert "Traceback" not in result.logs[0]
    assert "megatron_elas" not in result.logs[1]


def test_a_worker_that_waited_for_another_one_to_speak_is_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def another_speaks_first(file: object, operation: int) -> None:
        (tmp_path / "told").write_text("said already")

    monkeypatch.setenv("ELAS_RUN_DIR", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", another_speaks_first)
        pretrain_gpt._tell_once(BadUsage("no"))
    assert capsys.readouterr().err == ""
    assert read_refusal(str(tmp_path)) is None
    (tmp_path / "told").unlink()
    monkeypatch.setenv("RANK", "3")
    pretrain_gpt._tell_once(BadUsage("yes"))
    monkeypatch.setenv("RANK", "2")
    pretrain_gpt._tell_once(WrongVersion("yes"))
    assert capsys.readouterr().err == "megatron_elas: yes\n"
    assert read_refusal(str(tmp_path)) == Refusal(worker=3, exit_code=2, sentence="yes")


def test_a_missing_data_file_is_named(forker: Forker, tmp_path: Path) -> None:
    argv = [*TINY, *STEPS, "--data-path", "/no/such/text", "--tokenizer-type", "NullTokenizer", "--vocab-size", "64"]
    result = forker.run(1, ENTRY, tmp_path, str(tmp_path), argv)
    assert result.statuses == [2]
    assert "data file /no/such/text.bin does not exist" in result.logs[0]


def test_no_data_at_all_is_refused(forker: Forker, tmp_path: Path) -> None:
    argv = [*TINY, *STEPS, "--tokenizer-type", "NullTokenizer", "--vocab-size", "64"]
    result = forker.run(1, ENTRY, tmp_path, str(tmp_path), argv)
    assert result.statuses == [2]
    assert "no training data" in result.logs[0]
