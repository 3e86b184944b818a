"""``scripts/check_on_device.py`` on a machine without accelerator: what it says, and its checks on a stand-in."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).resolve().parents[2]
PROGRAM = REPO / "scripts" / "check_on_device.py"
STAND_IN = "tests.scripts.stand_in_device:StandIn"


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_on_device", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_on_device"] = module
    spec.loader.exec_module(module)
    return module


def test_without_an_accelerator_one_sentence_and_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ran = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 77
    assert ran.stdout.count("\n") == 1 and "no CUDA or NPU device" in ran.stdout


def test_a_number_of_devices_out_of_range_is_refused() -> None:
    ran = subprocess.run(
        [sys.executable, PROGRAM, "--devices", "9"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 2
    assert "got 9" in ran.stderr


@pytest.mark.slow
@pytest.mark.process
def test_every_check_passes_on_a_stand_in_with_real_processes_and_real_deaths(program: ModuleType) -> None:
    outcomes = program.run(STAND_IN, [0, 0, 0, 0], 100.0)
    told = {outcome.name: outcome for outcome in outcomes}
    assert list(told) == list(program.CHECKS)
    assert told["asynchronous operations"].status == "not available"
    wrong = [str(outcome) for outcome in outcomes if outcome.status == "fail"]
    assert not wrong, "\n".join(wrong)
    assert sum(outcome.status == "pass" for outcome in outcomes) == len(program.CHECKS) - 1
    assert told["rebuild after an abort"].detail == "new"
    assert told["other groups stay as they are"].detail == "keep"
    assert told["shrink after a death"].detail == "shrink"


@pytest.mark.process
def test_a_single_device_runs_what_a_group_of_one_can(program: ModuleType) -> None:
    told = {outcome.name: outcome for outcome in program.run(STAND_IN, [0], 60.0)}
    assert told["all_reduce"].status == "pass" and told["all_reduce"].ms > 0
    assert told["other groups stay as they are"].status == "pass"
    assert told["shrink after a death"].status == "not available"
    assert told["shrink after a death"].detail == "needs 2 devices"


@pytest.mark.slow
@pytest.mark.process
def test_the_last_line_sums_up_and_the_code_follows_it(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "find_devices", lambda: (STAND_IN, 1, "stand-in"))
    monkeypatch.setattr(sys, "argv", ["check_on_device.py"])
    assert program.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 of 1 x stand-in" and "two processes on one device:" in lines
    alone, together = lines[1 : 1 + len(program.CHECKS)], lines[2 + len(program.CHECKS) : -1]
    assert len(alone) == len(together) == len(program.CHECKS)
    passed = sum(line.startswith("pass") for line in (*alone, *together))
    rest = 2 * len(program.CHECKS) - passed
    assert lines[-1].startswith(f"check_on_device: {passed} pass, 0 fail, {rest} not available, in ")
    assert passed == 6 + 13  # what needs streams, or more devices, is not there


def test_outcomes_of_workers_are_joined(program: ModuleType, tmp_path: Path) -> None:
    def tell(worker: int, *outcomes: tuple[str, str, float, str]) -> None:
        lines = [json.dumps(dict(zip(("name", "status", "ms", "detail"), o, strict=True))) for o in outcomes]
        (tmp_path / f"results-{worker}").write_text("\n".join(lines))

    tell(0, ("inner group made", "pass", 3.0, ""), ("all_reduce", "pass", 1.0, ""))
    tell(1, ("inner group made", "pass", 5.0, "slow"), ("all_reduce", "fail", 1.0, "wrong sum"))
    told = {outcome.name: outcome for outcome in program.collect(tmp_path, 2, ["", "ended with 1"])}
    assert (told["inner group made"].status, told["inner group made"].ms) == ("pass", 5.0)
    assert (told["all_reduce"].status, told["all_reduce"].detail) == ("fail", "worker 1: wrong sum")
    assert told["all_gather"].status == "not available" and "before it failed" in told["all_gather"].detail


def test_a_worker_that_vanished_is_named_with_its_last_words(program: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "results-0").write_text('{"name": "inner group made", "status": "pass", "ms": 1.0, "detail": ""}')
    (tmp_path / "output-1").write_text("loading\nRuntimeError: no driver\n")
    first = program.collect(tmp_path, 2, ["", "ended with 1"])[0]
    assert (first.status, first.detail) == ("fail", "worker 1 ended with 1: RuntimeError: no driver")


def test_two_processes_on_one_device_may_be_refused(program: ModuleType) -> None:
    failed = program.Outcome(name="inner group made", status="fail", detail="Duplicate GPU detected")
    refused = program.share_device([failed])
    assert [outcome.status for outcome in refused] == ["not available"]
    passed = program.Outcome(name="inner group made", status="pass", ms=1.0)
    assert program.share_device([passed]) == [passed]
