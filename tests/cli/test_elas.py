"""``elas``: finds the job by itself, asks the controller, and says what it hears."""

from __future__ import annotations

import sys
import tempfile
import types
from pathlib import Path

import pytest

from megatron_elas.cli import elas
from tests.cli.launcher import FAST, TOY, launched
from tests.control.jobs import make_job
from tests.control.served import TOKEN, joined, serving

pytestmark = pytest.mark.process


def test_a_running_job_is_found_looked_at_and_struck(capsys: pytest.CaptureFixture[str]) -> None:
    with launched("--nproc-per-node", "4", *FAST, TOY, "2", "2", "1") as job:
        job.wait_for("starts", 4)
        assert elas.main(["status"]) == 0
        assert "running, epoch 0: stage 0: [0] [1] | stage 1: [2] [3]" in capsys.readouterr().out
        step = 1_000_000
        assert elas.main(["inject", f"kill:worker=9@step={step},phase=between"]) == 2
        assert "no worker 9" in capsys.readouterr().err
        # The toy strikes between steps; far enough ahead to arrive in time, near enough to wait for.
        steps = [int(line.split("step ")[1].split(",")[0]) for line in status_lines(capsys)]
        assert elas.main(["inject", f"kill:worker=3@step={max(steps) + 50},phase=between"]) == 0
        assert "worker 3 will be struck" in capsys.readouterr().out
        outcome = job.finish()
    assert outcome.code == 0 and "lost     worker 3" in outcome.out, outcome


def status_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert elas.main(["status"]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("worker")]


def test_without_a_job_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert elas.main(["status"]) == 2
    assert capsys.readouterr().err == (
        "elas: no job of yours runs on this node: name one with --controller ws://HOST:PORT\n"
    )


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
        assert "does not answer" in capsys.readouterr().err


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


def test_the_job_file_is_for_its_owner_only() -> None:
    with launched("--nproc-per-node", "1", *FAST, TOY, "1", "1", "1") as job:
        job.wait_for("starts")
        files = list(Path(tempfile.gettempdir()).glob("elas-*/job.json"))
        assert [oct(path.stat().st_mode & 0o777) for path in files] == ["0o600"]
        assert oct(files[0].parent.stat().st_mode & 0o777) == "0o700"
        job.process.terminate()
        assert job.finish().code == 143
