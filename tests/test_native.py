"""C libraries are found beside their sources, and not used when these are newer."""

from __future__ import annotations

import logging
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from megatron_elas import native
from megatron_elas.runtime import transport

FOLDER = Path(transport.__file__).parent


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with a copy of the transport's library, built just now."""
    for suffix in EXTENSION_SUFFIXES:
        built = FOLDER / f"_core{suffix}"
        if built.exists():
            (tmp_path / built.name).write_bytes(built.read_bytes())
            return tmp_path
    pytest.skip("the C library is not built: no compiler")


def test_a_library_is_loaded_also_without_its_sources(copied: Path) -> None:
    library = native.load(copied, "_core")
    assert library is not None
    assert library.elas_run is not None


def test_a_library_older_than_its_sources_is_not_used(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = copied / "core_link.h"
    source.touch()
    (library,) = copied.glob("*.so")
    os.utime(library, (source.stat().st_atime, source.stat().st_mtime - 10))
    with caplog.at_level(logging.WARNING):
        assert native.load(copied, "_core") is None
    assert "is older than its sources and not used: run 'make native'" in caplog.text


def test_the_switch_and_a_missing_library_give_none(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.load(copied, "_other") is None
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.load(copied, "_core") is None
