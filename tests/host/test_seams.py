"""The list of seams matches the installed Megatron, and reading it changes nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_elas.host import versions
from megatron_elas.spec.errors import WrongVersion

LOOK = """
import sys
from megatron_elas.host import seams
assert "torch" not in sys.modules and "megatron" not in sys.modules, "importing the seams imports torch or Megatron"
from megatron_elas.platform import cpu
cpu.install()
findings = seams.check_all()
assert not findings, findings
from megatron_elas.host import patching
assert not patching._active, "checking has applied something"
rows = seams.all_rows()
assert all(row.reason for row in rows)
patches = [row for row in rows if row.build is not None]
before = [patching._locate(row.symbol).original for row in patches]
with patching.apply(rows):
    assert seams.check_all() == []
assert before == [patching._locate(row.symbol).original for row in patches], "reverting left a substitute"
print(len(rows), len(patches))
"""


@pytest.mark.process
def test_every_row_matches_the_installed_megatron_and_can_be_applied_and_reverted() -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOOK], capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.returncode == 0, ran.stderr
    rows, patches = map(int, ran.stdout.split()[-2:])
    assert rows > patches > 0


def test_an_old_python_is_told() -> None:
    assert versions._check_python((3, 11)) == "Python 3.11 is too old: use Python 3.12 or later"
    assert versions._check_python((3, 13)) is None


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cu130", "2.14.1", "2.12.0a0+git"])
def test_a_torch_in_range_is_accepted(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "__version__", version)
    assert versions._check_torch() is None


@pytest.mark.parametrize("version", ["2.10.1", "2.15.0", "3.0.0"])
def test_a_torch_out_of_range_is_told(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "__version__", version)
    assert f"torch {version} is outside the supported range 2.11 to 2.14" in (versions._check_torch() or "")


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ("0.18.0", "megatron-core 0.18.0 is outside the supported range 0.19.x"),
        ("(not installed)", "megatron.core cannot be imported"),
    ],
)
def test_another_megatron_is_told(version: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_megatron", lambda: version)
    with pytest.raises(WrongVersion, match=text):
        versions.require_versions()
