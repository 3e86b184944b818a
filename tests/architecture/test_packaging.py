"""pyproject.toml, the tested versions and the package say the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
RANGES = {
    canonicalize_name(range_.name): range_
    for range_ in map(Requirement, PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"])
}
PINS = {
    canonicalize_name(pin.name): pin
    for line in (REPO / "requirements/tested.txt").read_text().splitlines()
    if line and not line.startswith("#")
    for pin in [Requirement(line)]
}


def test_every_direct_dependency_has_one_tested_version() -> None:
    assert sorted(RANGES) == sorted(PINS)


@pytest.mark.parametrize("name", sorted(PINS))
def test_the_tested_version_lies_in_the_range(name: str) -> None:
    (pin,) = PINS[name].specifier
    assert pin.operator == "=="
    assert RANGES[name].specifier.contains(pin.version)


@pytest.mark.parametrize("command", sorted(PROJECT["scripts"]))
def test_a_command_names_a_function_that_exists(command: str) -> None:
    module, function = PROJECT["scripts"][command].split(":")
    file = REPO / (module.replace(".", "/") + ".py")
    assert file.is_file()
    assert re.search(rf"^def {function}\(", file.read_text(), re.MULTILINE)
