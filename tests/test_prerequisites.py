"""Without the Python or the packages it needs, every program says so in one sentence and ends with 6."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_elas.prerequisites import check_prerequisites
from megatron_elas.spec.errors import WrongVersion

REPO = Path(__file__).resolve().parents[1]
READ_BY_ANY_PYTHON = (
    *("__init__.py", "prerequisites.py", "pretrain_gpt.py", "cli/__init__.py", "spec/__init__.py", "spec/errors.py"),
    *("../scripts/demo.py", "../scripts/prepare_data.py"),
)
"""What is read before the version is checked."""
PROGRAMS = {
    "elasrun": (["-m", "megatron_elas.cli.elasrun", "--help"], "msgspec, psutil, websockets"),
    "elas": (["-m", "megatron_elas.cli.elas", "status"], "msgspec, psutil, websockets"),
    "pretrain_gpt": (["-m", "megatron_elas.pretrain_gpt"], "torch, megatron-core, numpy"),
    "demo": (["scripts/demo.py"], "torch, megatron-core, numpy, msgspec, psutil, websockets, sentencepiece"),
    "prepare_data": (["scripts/prepare_data.py", "docs"], "torch, megatron-core, numpy, sentencepiece"),
}


def test_an_old_python_is_told_what_is_needed_and_what_to_do() -> None:
    with pytest.raises(WrongVersion) as caught:
        check_prerequisites([], version=(3, 11, 7))
    told = str(caught.value)
    assert told.startswith(f"this needs Python 3.12 or newer, but runs in Python 3.11.7 at {sys.executable}: ")
    assert "make venv" in told
    assert "pip install -e ." in told


def test_a_complete_installation_passes() -> None:
    check_prerequisites(["msgspec", "torch"], version=(3, 12, 0))


@pytest.mark.parametrize("name", READ_BY_ANY_PYTHON)
def test_what_comes_before_the_check_can_be_read_by_an_old_python(name: str) -> None:
    ast.parse((REPO / "megatron_elas" / name).read_text(), feature_version=(3, 8))


@pytest.mark.process
@pytest.mark.parametrize("program", PROGRAMS)
def test_missing_packages_are_named(program: str) -> None:
    words, missing = PROGRAMS[program]
    ran = subprocess.run(
        [sys.executable, "-S", *words],  # without the packages that are installed
        cwd=REPO,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 6
    assert f" does not have {missing}: run 'make venv'" in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert ran.stdout == ""
