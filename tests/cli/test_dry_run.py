"""``elasrun --dry-run``: says what a line would start, refuses what a run would refuse, and starts nothing."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.cli.launcher import Outcome, elasrun, write_script

pytestmark = pytest.mark.process

ENTRY = (
    *("-m", "megatron_elas.pretrain_gpt", "@llama/tiny.args", "--mock-data", "--tokenizer-type", "NullTokenizer"),
    *("--vocab-size", "512", "--train-iters", "2"),
)
NODES = ("--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "node0:29400", "--nproc-per-node", "2")
SECRET = "not to be shown"


def dry_run(*arguments: str, **environ: str) -> Outcome:
    return elasrun("--dry-run", *arguments, environ=environ)


def rows(text: str, first_column: str) -> list[dict[str, str]]:
    """The table that begins with this column, one dict per row; columns are two spaces apart."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"  {first_column}  "))
    columns = [(match.start(), match.group()) for match in re.finditer(r"\S+(?: \S+)*", lines[start])]
    found = []
    for line in lines[start + 1 :]:
        if not line.startswith("  "):
            break
        ends = [position for position, _ in columns[1:]] + [len(line)]
        found.append({name: line[at:end].strip() for (at, name), end in zip(columns, ends, strict=True)})
    return found


def test_grid_memory_and_environment_of_a_job_of_two_nodes_are_told() -> None:
    never = "kill:worker=3@step=90,phase=forward"
    flags = ("--elastic", "--elastic-consistency", "bitwise", "--pipeline-model-parallel-size", "2")
    flags += ("--elastic-inject", never, "--elastic-inject", "kill:worker=3@step=1,phase=forward")
    outcome = dry_run(*NODES, *ENTRY, *flags, ELAS_TOKEN=SECRET)
    assert (outcome.code, outcome.err) == (0, "")
    grid = rows(outcome.out, "stage")
    assert [list(row.values()) for row in grid] == [
        ["0", "0-1", "0", "0", "0", "node0", "2"],
        ["0", "0-1", "1", "1", "0", "node0", "3"],
        ["1", "2-3", "0", "2", "1", "node1", "0"],
        ["1", "2-3", "1", "3", "1", "node1", "1"],
    ]
    assert "If node0 is lost, the job ends: the controller runs there." in outcome.out
    assert "Any one node of the others may be lost." in outcome.out
    memory = rows(outcome.out.partition("memory per worker")[2], "stage")
    assert [(row["stage"], row["workers"], row["parameters"]) for row in memory] == [
        ("0", "0-1", "0.1 M"),
        ("1", "2-3", "0.1 M"),
    ]
    assert "own staging" in memory[0]
    # 8 and 4 bytes per parameter.
    assert float(memory[0]["fixed-point sums"]) == pytest.approx(2 * float(memory[0]["gradients"]), rel=0.01)
    assert "consistency  bitwise: events change no bit; masks stay with their samples\n" in outcome.out
    assert float(memory[0]["in a recovery"]) > float(memory[0]["backups"]) > 0
    assert re.search(r"Copies \(--elastic-snapshot replay\) take up to [\d.]+ MiB of a node's host memory", outcome.out)
    assert re.search(r"^model        0\.\d+ million parameters, 4 layers,", outcome.out, re.MULTILINE)
    assert "memory per worker in MiB: " in outcome.out and "GiB" not in outcome.out
    told = [line for line in outcome.out.splitlines() if line.startswith("faults ")]
    assert told == [f"faults       fault '{never}' will never strike: the last step of training is 1"]
    environment = rows(outcome.out, "LOCAL_RANK")
    assert [(row["RANK"], row["LOCAL_RANK"], row["ELAS_WORKER"], row["ELAS_DOMAIN"]) for row in environment] == [
        ("0", "0", "0", "node0"),
        ("1", "1", "1", "node0"),
        ("2", "0", "2", "node1"),
        ("3", "1", "3", "node1"),
    ]
    assert [row["ELAS_CONTROLLER"] for row in environment][1:3] == ["ws://127.0.0.1:29400", "ws://node0:29400"]
    for line in ("WORLD_SIZE=4", "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=node0", "MASTER_PORT=(at start)"):
        assert f"  {line}\n" in outcome.out
    assert SECRET not in outcome.out and "ELAS_TOKEN=(secret)" in outcome.out


def test_a_line_without_elastic_has_no_copies_and_is_told_whether_it_could_have_them() -> None:
    outcome = dry_run("--nproc-per-node", "2", *ENTRY, "--exit-signal-handler")
    assert outcome.code == 0, outcome.err
    assert "copies" not in outcome.out
    assert "--elastic  not given, refused here: --elastic does not cover --exit-signal-handler yet" in outcome.out


def test_what_a_lost_worker_or_its_node_would_mean_is_told() -> None:
    single = dry_run("--nproc-per-node", "2", *ENTRY, "--elastic", "--pipeline-model-parallel-size", "2")
    assert "Any one worker may be lost." in single.out and "the job ends" not in single.out
    assert "consistency  numerical: events change losses by rounding" in single.out
    assert "fixed-point sums" not in single.out
    outcome = dry_run("--nproc-per-node", "2", *ENTRY, "--elastic", "--tensor-model-parallel-size", "2")
    end = "the job ends: the workers left are 1, and a cell takes 2 (exit code 3)."
    assert f"If worker0 or worker1 is lost, {end}" in outcome.out
    assert "may be lost" not in outcome.out


def test_where_elastic_is_refused_all_is_told_and_then_the_refusal() -> None:
    outcome = dry_run("--nproc-per-node", "2", *ENTRY, *CUDA_FLAGS, "--elastic", MEGATRON_ELAS_PLATFORM="cuda")
    assert outcome.code == 2
    assert "copies kept by" in outcome.out
    assert outcome.err.splitlines() == [
        "megatron_elas: --elastic runs on the cpu platform only in this release (this machine has 'cuda'): copies "
        "and moves of state in device memory come next; leave --elastic out to train as usual"
    ]


CUDA_FLAGS = ("--no-rope-fusion", "--transformer-impl", "local", "--no-persist-layer-norm", "--no-one-logger")
"""Without them Megatron's check of the arguments asks for packages that are not here."""


def test_a_grid_that_is_not_covered_is_not_drawn_wrongly() -> None:
    outcome = dry_run("--nproc-per-node", "4", *ENTRY, "--context-parallel-size", "2", CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert outcome.code == 0, outcome.err
    assert "Grid and memory cannot be told with --context-parallel-size." in outcome.out
    assert "WORLD_SIZE=4" in outcome.out


def test_another_script_is_described_and_not_run(tmp_path: Path) -> None:
    script = write_script(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    outcome = dry_run("--nproc-per-node", "3", script, "--flag", "a word")
    assert (outcome.code, outcome.err) == (0, "")
    assert f"command     python {script} --flag 'a word'\n" in outcome.out
    assert "workers     3 on 1 node" in outcome.out
    assert len(rows(outcome.out, "LOCAL_RANK")) == 3
    assert not (tmp_path / "ran").exists()


def test_nothing_is_left_of_a_dry_run(tmp_path: Path) -> None:
    flags = ("--tensorboard-dir", str(tmp_path / "board"), "--save", str(tmp_path / "saved"), "--save-interval", "1")
    outcome = dry_run("--log-dir", str(tmp_path / "a/b"), "--exit-code-file", str(tmp_path / "code"), *ENTRY, *flags)
    assert outcome.code == 0, outcome.err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "wrong",
    [
        ("--pipeline-model-parallel-size", "3"),
        ("--exit-signal-handler",),
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in (
                ("--global-batch-size", "6"),
                ("--elastc",),
                ("--num-layers",),
                ("--num-layers", "5", "--pipeline-model-parallel-size", "2"),
                ("--hidden-size", "66"),
                ("--elastic-inject", "kill:worker=9@step=1,phase=forward"),
                ("@no/such.args",),
                ("--elastic-consistency", "exact"),
                ("--elastic-rng", "megatron", "--hidden-dropout", "0.1"),
                ("--elastic-audit", "1"),
                ("--elastic-consistency", "bitwise", "--cross-entropy-loss-fusion"),
            )
        ),
    ],
    ids=lambda words: words[0],
)
def test_wrong_arguments_are_refused_as_by_a_run(wrong: tuple[str, ...]) -> None:
    line = ("--nproc-per-node", "4", *ENTRY, "--elastic", *wrong)
    dry, real = dry_run(*line), elasrun(*line)
    assert (dry.code, dry.out) == (real.code, "") == (2, "")
    said = [line for line in real.err.splitlines() if line.startswith("megatron_elas: ")]
    assert dry.err.splitlines() == said and len(said) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        ("--nnodes", "2"),
        ("--nproc-per-node", "0"),
        ("--no-such-flag",),
        ("--log-dir", "/proc/no/folder"),
        ("--exit-code-file", "/no/folder/code"),
        ("--heartbeat-timeout-s", "0.1"),
    ],
    ids=lambda words: words[0],
)
def test_wrong_flags_of_the_launcher_are_refused_as_by_a_run(wrong: tuple[str, ...]) -> None:
    dry, real = dry_run(*wrong, *ENTRY), elasrun(*wrong, *ENTRY)
    assert (dry.code, dry.err, dry.out) == (real.code, real.err, "")
    assert dry.code == 2 and dry.err.count("\n") == 1


def test_help_of_the_training_entry_is_still_help() -> None:
    outcome = dry_run(*ENTRY, "--help")
    assert outcome.code == 0
    assert "--elastic-inject" in outcome.out and "--elastic-dry-run" not in outcome.out


# ---------------------------------------------------------------- beside the dry run: the code as a file


@pytest.mark.parametrize("code", [0, 7])
def test_the_first_node_writes_the_exit_code_when_asked(tmp_path: Path, code: int) -> None:
    script = write_script(tmp_path, f"import sys\nsys.exit({code})\n")
    outcome = elasrun("--exit-code-file", str(tmp_path / "code"), script)
    assert outcome.code == code
    assert json.loads((tmp_path / "code").read_text()) == code
