"""megatron_elas.install(): nothing without --elastic, and what is refused before Megatron is touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_elas import own_script
from megatron_elas.spec.errors import BadUsage, WrongVersion

INSTALL = """
import sys
before, words = set(sys.modules), list(sys.argv)
import megatron_elas
megatron_elas.install()
assert sys.argv == words
print(sorted(set(sys.modules) - before))
"""


@pytest.mark.process
@pytest.mark.parametrize("flags", [[], ["--num-layers", "2", "--save", "x--elastic"]])
def test_without_an_elastic_flag_installing_loads_and_changes_nothing(flags: list[str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", INSTALL, *flags], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "['megatron_elas']\n"), ran.stderr


def test_a_script_of_another_megatron_than_the_one_to_be_imported_is_refused(tmp_path: Path) -> None:
    own_script._check_origin(tmp_path)
    (tmp_path / "megatron/core").mkdir(parents=True)
    with pytest.raises(BadUsage, match=f"start elasrun with PYTHONPATH={tmp_path}, or without --preload"):
        own_script._check_origin(tmp_path)


def test_a_checkout_whose_helper_can_neither_be_found_nor_built_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_script.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WrongVersion, match="install pybind11, or install the checkout with pip install -e"):
        own_script._check_dataset_helper()
