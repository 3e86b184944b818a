"""Runs that several tests compare with, made once per session."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.configurations import SAVED, STEPS, Configuration
from tests.fault.runs import REPO, Run, run_job

Train = Callable[..., Run]
TIMEOUT_S = 280


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of data with short documents."""
    prefix = tmp_path_factory.mktemp("documents") / "short"
    subprocess.run([sys.executable, str(REPO / "tests/distributed/documents.py"), str(prefix)], check=True)
    return prefix


@pytest.fixture(scope="session")
def train(documents: Path) -> Train:
    """Runs a configuration to its end: ``train(configuration, folder, faults, more flags)``."""

    def run(configuration: Configuration, folder: Path, faults: tuple[str, ...] = (), *flags: str) -> Run:
        return run_job(
            folder, (*configuration.flags, *flags), workers=configuration.workers, faults=faults, steps=STEPS,
            batch=configuration.batch, model=configuration.model(documents), timeout_s=TIMEOUT_S,
        )  # fmt: skip

    return run


@pytest.fixture(scope="session")
def undisturbed(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Configuration], Run]:
    """The run of a configuration without a fault."""
    runs: dict[str, Run] = {}

    def run(configuration: Configuration) -> Run:
        if configuration.name not in runs:
            folder = tmp_path_factory.mktemp("undisturbed") / configuration.name
            runs[configuration.name] = train(configuration, folder)
        return runs[configuration.name]

    return run


@pytest.fixture(scope="session")
def struck(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Configuration], tuple[Run, Path]]:
    """The run of a configuration in which its last worker is lost first, and the checkpoints it saved."""
    runs: dict[str, tuple[Run, Path]] = {}

    def run(configuration: Configuration) -> tuple[Run, Path]:
        if configuration.name not in runs:
            folder = tmp_path_factory.mktemp("struck") / configuration.name
            checkpoints = folder.with_name("checkpoints")
            saving = ("--ckpt-format=torch_dist", f"--save={checkpoints}", f"--save-interval={SAVED}")
            faults = configuration.faults(configuration.workers - 1)
            runs[configuration.name] = train(configuration, folder, faults, *saving), checkpoints
        return runs[configuration.name]

    return run
