"""DESIGN: imports go down only; what needs no torch does not load it.

The contracts in pyproject.toml read the source; these tests look at what an import really loads,
which also sees imports that the contracts allow because they sit inside functions.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "megatron_elas"
WITHOUT_TORCH = ("spec", "schedule", "planner", "simulator", "control", "cli", "config")
WITHOUT_MEGATRON = ("runtime", "platform", "testing")

IMPORT_ALL = """
import importlib, pkgutil, sys
from importlib.machinery import ExtensionFileLoader
name, *unwanted = sys.argv[1:]
module = importlib.import_module(name)
if name.count(".") and hasattr(module, "__path__"):
    for found in pkgutil.walk_packages(module.__path__, name + "."):
        # A library of plain functions (megatron_elas/native.py) has the name of a module, but is none.
        is_library = isinstance(found.module_finder.find_spec(found.name).loader, ExtensionFileLoader)
        if not found.name.endswith("__main__") and not is_library:
            importlib.import_module(found.name)
loaded = [word for word in unwanted if word in sys.modules]
sys.exit("importing " + name + " loads " + ", ".join(loaded) if loaded else 0)
"""


def existing(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()]


def check_import(module: str, *unwanted: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, module, *unwanted],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_importing_the_project_loads_neither_torch_nor_megatron() -> None:
    check_import("megatron_elas", "torch", "megatron")


@pytest.mark.parametrize("name", existing(WITHOUT_TORCH))
def test_importing_all_of_a_torch_free_package_loads_neither_torch_nor_megatron(name: str) -> None:
    check_import(f"megatron_elas.{name}", "torch", "megatron")


@pytest.mark.parametrize("name", existing(("spec", "schedule")))
def test_importing_the_lowest_packages_loads_nothing_but_the_standard_library(name: str) -> None:
    check_import(f"megatron_elas.{name}", "numpy", "msgspec", "psutil", "websockets")


@pytest.mark.parametrize("name", existing(WITHOUT_MEGATRON))
def test_importing_all_of_a_package_below_host_does_not_load_megatron(name: str) -> None:
    check_import(f"megatron_elas.{name}", "megatron")


@pytest.mark.parametrize(
    ("file", "line", "chain"),
    [
        ("spec/job.py", "import torch", "megatron_elas.spec.job -> torch"),
        ("spec/job.py", "import megatron_elas.planner", "megatron_elas.spec.job -> megatron_elas.planner"),
        ("control/messages.py", "import torch.nn", "megatron_elas.control.messages -> torch"),
        ("runtime/__init__.py", "from megatron.core import mpu", "megatron_elas.runtime -> megatron"),
        ("host/__init__.py", "import megatron_elas.control", "megatron_elas.host -> megatron_elas.control"),
        ("strange.py", '"""A module without a place in the map."""', "strange"),
    ],
)
def test_the_contracts_refuse_a_forbidden_import(file: str, line: str, chain: str, tmp_path: Path) -> None:
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    shutil.copytree(PACKAGE, tmp_path / "megatron_elas", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "megatron_elas" / file).open("a") as source:
        source.write(f"\n{line}\n")
    program = (
        "import sys; sys.path.insert(0, '');"  # before this checkout on PYTHONPATH
        "from importlinter.cli import lint_imports_command as main; main()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, "--no-logo", "--no-cache"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 1
    assert chain in ran.stdout
