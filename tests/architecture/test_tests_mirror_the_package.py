"""A reader who knows a module finds its tests without searching."""

from __future__ import annotations

from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
TESTS = REPO / "tests"
PACKAGE = REPO / "megatron_elas"
FOLDERS_OF_THEIR_OWN = {"architecture", "benchmarks", "distributed", "fault", "golden", "network", "scripts"}
"""Tests of several packages together, or of programs beside the package."""


def test_every_folder_of_tests_belongs_to_a_package_or_has_an_agreed_name() -> None:
    strange = [
        str(folder.relative_to(REPO))
        for folder in sorted(TESTS.rglob("*/"))
        if folder.name not in {"__pycache__", "data"}
        and folder.relative_to(TESTS).parts
        and folder.relative_to(TESTS).parts[0] not in FOLDERS_OF_THEIR_OWN
        and not (PACKAGE / folder.relative_to(TESTS)).is_dir()
    ]
    assert not strange, f"neither a package of megatron_elas nor one of {sorted(FOLDERS_OF_THEIR_OWN)}: {strange}"


def test_every_test_file_is_one_that_pytest_collects() -> None:
    helpers = {"conftest.py", "__init__.py"}
    strange = [
        str(file.relative_to(REPO))
        for file in sorted(TESTS.rglob("*.py"))
        if file.name not in helpers and "def test_" in file.read_text() and not file.name.startswith("test_")
    ]
    assert not strange, f"these hold tests that are never run: {strange}"


def test_every_package_says_what_it_is() -> None:
    missing = [
        str(folder.relative_to(REPO))
        for folder in sorted({file.parent for file in PACKAGE.rglob("*.py")})
        if not (folder / "__init__.py").is_file()
    ]
    assert not missing, f"these folders have no __init__.py with a docstring, so no wheel carries them: {missing}"
