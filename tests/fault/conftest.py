"""What several files of fault tests compare with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fault.migrations import Job
from tests.fault.runs import REPO, Run, run_job
from tests.fault.warm_launcher import WarmLauncher, running_warm_launcher

GRID = ("--pipeline-model-parallel-size=2",)
"""With four workers: two stages of two cells."""


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The undisturbed run of four workers on GRID. Files with another job of their own have another one."""
    folder: Path = tmp_path_factory.mktemp("calm")
    return run_job(folder / "run", GRID, workers=4)


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmLauncher]:
    """Launches jobs without the seconds that importing Megatron takes."""
    with running_warm_launcher() as launcher:
        yield launcher


@pytest.fixture(scope="session")
def undisturbed(warm: WarmLauncher, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """The run of a job of ``migrations.py`` in which nothing moves and nobody is lost, made when first asked for."""
    runs: dict[tuple[object, ...], Run] = {}

    def run(job: Job, *flags: str) -> Run:
        if (job, *flags) not in runs:
            runs[(job, *flags)] = job.run(tmp_path_factory.mktemp("calm") / "run", warm, mode="off", flags=flags)
        return runs[(job, *flags)]

    return run


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of data with short documents."""
    prefix = tmp_path_factory.mktemp("documents") / "short"
    subprocess.run([sys.executable, str(REPO / "tests/distributed/documents.py"), str(prefix)], check=True)
    return prefix
