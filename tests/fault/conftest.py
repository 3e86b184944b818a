"""What several files of fault tests compare with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault.runs import Run, run_job

GRID = ("--pipeline-model-parallel-size=2",)
"""With four workers: two stages of two cells."""


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The undisturbed run of four workers on GRID. Files with another job of their own have another one."""
    folder: Path = tmp_path_factory.mktemp("calm")
    return run_job(folder / "run", GRID, workers=4, timeout_s=200)
