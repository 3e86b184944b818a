"""The demonstration tells the truth, and notices when the runs differ."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def demo() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("demo", REPO / "scripts/demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.process
def test_a_worker_is_killed_and_both_runs_agree() -> None:
    ran = subprocess.run(
        [sys.executable, str(REPO / "scripts/demo.py"), "--steps", "6", "--at", "2", "--worker", "1"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert "fault strikes: kill:worker=1@step=2,phase=forward,microbatch=1" in ran.stdout
    assert ran.stdout.count("---- recovered: epoch 1 ") == 1
    assert len(re.findall(r"^ +\d +[\d.]+ +[\d.]+ +\S+  \d+-\d+ same$", ran.stdout, re.MULTILINE)) == 6
    assert "Every step has the same samples" in ran.stdout


SAMPLES = {0: {0: [0, 1], 1: [0, 1]}, 1: {0: [2, 3], 1: [2, 3]}}


@pytest.mark.parametrize(
    ("losses", "samples", "agree"),
    [
        ({1: 5.0, 2: 4.0 + 1e-6}, SAMPLES, True),
        ({1: 5.0, 2: 4.001}, SAMPLES, False),
        ({1: 5.0}, SAMPLES, False),
        ({1: 5.0, 2: 4.0}, {**SAMPLES, 1: {0: [2, 3], 1: [2, 4]}}, False),
    ],
    ids=["rounding", "another-loss", "a-missing-step", "another-sample"],
)
def test_runs_agree_only_with_the_same_losses_and_samples_in_every_step(
    demo: ModuleType, losses: dict[int, float], samples: dict[int, dict[int, list[int]]], agree: bool
) -> None:
    assert demo.compare({1: 5.0, 2: 4.0}, losses, SAMPLES, samples) is agree
