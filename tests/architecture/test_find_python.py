"""The set-up scripts choose a Python by running candidates, and explain what they cannot use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def find_python(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script where only ``path`` and the system's tools can be found."""
    return subprocess.run(
        ["bash", str(REPO / "scripts/find_python.sh")],
        env={"PATH": f"{path}:/usr/bin:/bin", "HOME": str(path), **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def make_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def hide_system_pythons(folder: Path) -> None:
    for name in ("python3.12", "python3.13", "python3.14", "python3.15", "python3", "python"):
        make_program(folder / name, "echo 'command not found' >&2; exit 127")


def test_a_name_on_path_that_does_not_run_is_passed_over_for_one_that_does(tmp_path: Path) -> None:
    hide_system_pythons(tmp_path)
    make_program(tmp_path / ".pyenv/versions/3.12.9/bin/python", f'exec "{sys.executable}" "$@"')
    ran = find_python(tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert os.path.realpath(ran.stdout.strip()) == os.path.realpath(sys.executable)


def test_without_a_python_it_says_in_one_sentence_what_it_tried_and_how_to_get_one(tmp_path: Path) -> None:
    hide_system_pythons(tmp_path)
    ran = find_python(tmp_path)
    assert ran.returncode == 6
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1
    assert "tried: python3.12 (does not run), " in ran.stderr
    assert "apt-get install python3.12-venv" in ran.stderr


def test_a_python_that_the_user_named_is_not_replaced_by_another(tmp_path: Path) -> None:
    make_program(tmp_path / "mine", "exit 1")
    ran = find_python(tmp_path, PYTHON=str(tmp_path / "mine"))
    assert ran.returncode == 6
    assert ran.stdout == ""
    assert f"PYTHON={tmp_path}/mine cannot be used (does not run): name a Python 3.12" in ran.stderr


def set_up(venv: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(REPO / "scripts/setup_venv.sh")],
        env={"PATH": os.environ["PATH"], "VENV": str(venv)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_folder_that_cannot_be_made_gets_one_sentence() -> None:
    ran = set_up("/proc/venv")
    assert ran.returncode == 1
    assert ran.stderr == (
        "megatron_elas: VENV=/proc/venv cannot be created: name a folder in one that you may write to.\n"
    )


def test_a_folder_with_other_things_in_it_is_refused_and_nothing_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").touch()
    ran = set_up(tmp_path / "mine")
    assert ran.returncode == 1
    assert f"VENV={tmp_path}/mine is no virtual environment" in ran.stderr
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "mine", tmp_path / "mine/thesis.txt"]
