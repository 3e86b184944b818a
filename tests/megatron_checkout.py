"""Finds a real checkout of Megatron-LM for tests, and copies what of it is run."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

VARIABLE = "MEGATRON_LM_ROOT"
CACHED = Path.home() / ".cache" / "megatron_elas" / "Megatron-LM-core_v0.19.0"
HELPER = "helpers_cpp*.so"
UNUSED = shutil.ignore_patterns("__pycache__", "*.md", "*.yaml", "*.json", "kernels")


def find_checkout() -> Path:
    """Its top folder; skips the test, saying why, when there is none."""
    given = os.environ.get(VARIABLE)
    root = Path(given) if given else CACHED
    if not (root / "pretrain_gpt.py").is_file():
        pytest.skip(f"no checkout of Megatron-LM core_v0.19.x: {VARIABLE} is not set to one, and {CACHED} is none")
    return root


def copy_checkout(target: Path) -> Path:
    """A copy of that checkout, without a repository and without what training on the CPU does not need."""
    root = find_checkout()
    target.mkdir(parents=True)
    for script in root.glob("*.py"):
        shutil.copy(script, target)
    shutil.copytree(root / "megatron", target / "megatron", ignore=UNUSED)
    return target


def give_dataset_helper(checkout: Path) -> None:
    """Put the wheel's C++ helper into a checkout that has not built its own; skips when they are not of one source."""
    datasets = checkout / "megatron/core/datasets"
    if any(datasets.glob(HELPER)):
        return
    spec = importlib.util.find_spec("megatron.core.datasets.helpers_cpp")
    if spec is None or spec.origin is None:
        pytest.skip("neither the checkout nor the installed megatron-core has a built helpers_cpp")
    built = Path(spec.origin)
    if (built.parent / "helpers.cpp").read_bytes() != (datasets / "helpers.cpp").read_bytes():
        pytest.skip(f"the checkout has no built helpers_cpp, and {built} is built from another helpers.cpp")
    shutil.copy(built, datasets)
