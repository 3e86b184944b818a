"""``elas``: finds the job by itself, asks the controller, and says what it hears."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_elas.cli import elas
from megatron_elas.cli.running_jobs import find_controller
from megatron_elas.control.run_dir import JobFile, make_run_dir, write_job_file
from tests.cli.launcher import FAST, TOY, launched
from tests.control.jobs import make_job
from tests.control.served import TOKEN, joined, serving
from tests.megatron_checkout import copy_checkout

pytestmark = pytest.mark.process


def test_a_running_job_is_found_looked_at_and_struck(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    go_on = tmp_path / "now"
    with launched(
        "--nproc-per-node", "4", "--rdzv-id=run7", *FAST, TOY, "2", "2", "1", environ={"TOY_STEPS_WHEN": str(go_on)}
    ) as job:
        job.wait_for("starts", 4)
        assert elas.main(["status"]) == 0
        head, where, *more = capsys.readouterr().out.splitlines()
        assert re.fullmatch(r"job run7 at ws://127\.0\.0\.1:\d+:", head)
        assert where == "running, epoch 0: stage 0 (layer 0): [0] [1] | stage 1 (layer 1): [2] [3]"
        assert [line for line in more if line.startswith("consistency: numerical")]
        # The time of a step is there once one was measured.
        workers = [line for line in more if not line.startswith(("consistency:", "step time:"))]
        pids = {int(re.findall(r"worker \d: step .+?, pid (\d+) on ", line)[0]) for line in workers}
        assert pids == {child.pid for child in job.workers()}
        step = 1_000_000
        assert elas.main(["inject", f"kill:worker=9@step={step},phase=between"]) == 2
        assert re.match(r"job run7 at .*: .* there is no worker 9", capsys.readouterr().err)
        while not all(": step 5, " in line for line in status_lines(capsys)):
            time.sleep(0.02)
        assert elas.main(["inject", "kill:worker=3@step=9,phase=between"]) == 0
        assert re.match(r"job run7 at ws:.*: worker 3 will be struck", capsys.readouterr().out)
        job.wait_for("worker 3 was told of kill")
        go_on.touch()
        outcome = job.finish()
    assert outcome.code == 0 and "lost     worker 3" in outcome.out, outcome


def status_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert elas.main(["status"]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("worker")]


def test_without_a_job_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert elas.main(["status"]) == 2
    assert capsys.readouterr().err == (
        "elas: no job of yours runs on this node: wait until it has started, or name one with --controller ws://HOST:PORT\n"
    )


def publish(
    run_dir: Path, run_id: str, port: int, command: Sequence[str] = ("train.py", "--x"), started_s: float = 1.0
) -> None:
    job = JobFile(
        run_id=run_id, started_s=started_s, address=f"ws://127.0.0.1:{port}", token=TOKEN, command=tuple(command)
    )
    write_job_file(run_dir, job)


def test_of_several_jobs_none_is_struck_unless_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    fault = "kill:worker=1@step=1000000,phase=between"
    with (
        serving(2) as served,
        joined(served, make_job(pipeline=1, data=2)) as members,
        make_run_dir() as one,
        make_run_dir() as two,
    ):
        port = int(served.address.rpartition(":")[2])
        publish(one, "abc1", port)
        publish(two, "abd2", 1, ["-m", "other", *["--long"] * 100], started_s=2.0)
        for arguments in (["status"], ["inject", fault], ["inject", fault, "--job", "ab"]):
            assert elas.main(arguments) == 2
            [line] = capsys.readouterr().err.splitlines()
            assert line.startswith("elas: 2 jobs of yours run on this node, name one with --job RUN_ID: abc1 at ws://")
            assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \(train\.py --x\); abd2 at .*\(-m other", line)
            assert len(line) < 300
        assert elas.main(["inject", fault, "--job", "abc"]) == 0
        assert capsys.readouterr().out == f"job test at {served.address}: worker 1 will be struck: {fault}\n"
        assert members[1].injected.get(timeout=10) == fault
        assert elas.main(["status", "--controller", served.address]) == 0
        assert elas.main(["status", "--job", "x"]) == 2
        assert "no job of yours on this node has a run id that begins with 'x': abc1 at" in capsys.readouterr().err
        assert elas.main(["status", "--job", "abc1", "--controller", served.address]) == 2


def test_a_run_id_that_begins_another_names_its_own_job_and_two_nodes_are_one_job(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with make_run_dir() as one, make_run_dir() as two, make_run_dir() as three:
        publish(one, "run", 1)
        publish(two, "run", 1)
        publish(three, "run2", 2)
        assert find_controller(None, "run", None) == ("ws://127.0.0.1:1", TOKEN)
        publish(two, "run", 3)
        assert elas.main(["status", "--job", "run"]) == 2
        assert "2 jobs of yours run on this node, name one with --controller" in capsys.readouterr().err


def test_a_controller_can_be_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(2) as served, joined(served, make_job(pipeline=1, data=2)):
        monkeypatch.delenv("ELAS_TOKEN", raising=False)
        assert elas.main(["status", "--controller", served.address]) == 2
        assert "set ELAS_TOKEN" in capsys.readouterr().err
        monkeypatch.setenv("ELAS_TOKEN", TOKEN)
        assert elas.main(["status", "--controller", served.address]) == 0
        assert "worker 1: step 0" in capsys.readouterr().out
        monkeypatch.setenv("ELAS_TOKEN", "wrong")
        assert elas.main(["status", "--controller", served.address]) == 1
        assert "does not share the secret" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["inject"], ["inject", "nonsense"], ["dance"], ["status", "--controller", "x"]]
)
def test_bad_usage_is_one_sentence_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELAS_TOKEN", TOKEN)
    assert elas.main(arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(("problems", "code"), [([], 0), (["megatron.x moved"], 6)])
def test_the_doctor_says_what_moved(
    problems: list[str], code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [types.SimpleNamespace(id="row", problem=problem) for problem in problems]
    seams = types.ModuleType("megatron_elas.host.seams")
    seams.check_all = lambda: findings  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron_elas.host.seams", seams)
    assert elas.main(["doctor"]) == code
    assert all(problem in capsys.readouterr().out for problem in problems)


@pytest.mark.parametrize("moved", [False, True])
def test_the_doctor_looks_at_a_checkout_when_given_one(moved: bool, tmp_path: Path) -> None:
    checkout = copy_checkout(tmp_path / "Megatron-LM")
    if moved:
        file = checkout / "megatron/training/arguments.py"
        text = file.read_text()
        file.write_text(text.replace("def parse_args(extra_args_provider=None,", "def parse_args(provider=None,"))
        assert file.read_text() != text
    command = [sys.executable, "-W", "ignore", "-m", "megatron_elas.cli.elas", "doctor", str(checkout)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == (6 if moved else 0), ran.stdout + ran.stderr
    assert ("megatron.training.arguments:parse_args (entry.parse-args) has changed" in ran.stdout) == moved
    assert len(ran.stdout.splitlines()) == 1


def test_the_doctor_refuses_what_is_no_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert elas.main(["doctor", str(tmp_path)]) == 2
    assert f"{tmp_path} is no Megatron-LM checkout" in capsys.readouterr().err


def test_the_job_file_is_for_its_owner_only() -> None:
    with launched("--nproc-per-node", "1", *FAST, TOY, "1", "1", "1") as job:
        job.wait_for("starts")
        files = list(Path(tempfile.gettempdir()).glob("elas-*/job.json"))
        assert [oct(path.stat().st_mode & 0o777) for path in files] == ["0o600"]
        assert oct(files[0].parent.stat().st_mode & 0o777) == "0o700"
        job.process.terminate()
        assert job.finish().code == 143
