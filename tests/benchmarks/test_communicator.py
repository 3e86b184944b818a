"""The benchmark of the communicator measures what it says, and leaves nothing behind, also when it is interrupted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

REPO = Path(__file__).resolve().parents[2]
TINY = ["--workers", "2", "--sizes", "1KiB", "--turns", "1", "--cancel-rounds", "2", "--regroup-workers", "4"]
CANCEL_AND_COLLECTIVES = {
    *(f"{name}_vs_gloo@1KiBx2" for name in ("all_reduce", "reduce_scatter", "all_gather", "p2p")),
    *(f"cancel_ms_{name}" for name in ("p50", "p99", "max")),
}
REGROUP = {
    *(f"{ours}_vs_{theirs}@4" for ours in ("edit", "edit_ops") for theirs in ("full", "full_nodestroy", "partial")),
    *(f"join_ops_vs_{theirs}@4" for theirs in ("full", "full_nodestroy", "partial")),
}

pytestmark = pytest.mark.process


def start(tmp_path: Path, *flags: str) -> subprocess.Popen[str]:
    """The benchmark, with all its temporary files in ``tmp_path``."""
    environ = {**os.environ, "PYTHONPATH": str(REPO), "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(REPO / "benchmarks" / "communicator.py"), *flags]
    return subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def results_of(process: subprocess.Popen[str]) -> dict[str, float]:
    """The figures it prints until it ends well."""
    told, _ = process.communicate(timeout=100)
    assert process.returncode == 0, told
    return {name: float(value) for name, value in re.findall(r"^RESULT (\S+)=(\S+) \w+$", told, re.MULTILINE)}


def test_collectives_and_cancelling_are_measured_under_their_names(tmp_path: Path) -> None:
    results = results_of(start(tmp_path, "--only", "collectives", "cancel", *TINY))
    assert results.keys() == CANCEL_AND_COLLECTIVES
    assert all(value > 0 for value in results.values())
    assert results["cancel_ms_p50"] <= results["cancel_ms_p99"] <= results["cancel_ms_max"]
    assert not list(tmp_path.glob("elas-*"))


@pytest.mark.slow
def test_removing_and_joining_are_measured_under_their_names(tmp_path: Path) -> None:
    results = results_of(start(tmp_path, "--only", "regroup", *TINY))
    assert results.keys() == REGROUP
    assert all(value > 0 for value in results.values())
    assert not list(tmp_path.glob("elas-*"))


def test_an_interrupted_run_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    process = start(tmp_path, "--only", "cancel", "--cancel-rounds", "100000")
    benchmark = psutil.Process(process.pid)
    deadline = time.monotonic() + 80
    while len(ranks := benchmark.children()) < 4 or len(list(tmp_path.glob("*/*.address"))) < 4:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=80)
    assert process.returncode == 128 + signal.SIGTERM
    assert not [rank for rank in ranks if rank.is_running()]
    assert not list(tmp_path.glob("elas-*"))


@pytest.mark.slow
def test_a_grid_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    process = start(tmp_path, "--regroup-workers", "6")
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "--regroup-workers 6: TP 2 x PP 2 x DP N/4 needs a multiple of 4" in told
