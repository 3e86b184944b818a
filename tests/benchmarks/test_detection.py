"""The benchmark of detection runs, and prints what is read from it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.process
def test_one_kill_and_one_stop_are_measured() -> None:
    command = [sys.executable, str(REPO / "benchmarks/detection.py"), "--sizes", "4", "--times", "1", "--stops", "1"]
    done = subprocess.run(command, text=True, capture_output=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    names = re.findall(r"^RESULT (\S+)=[\d.]+ ", done.stdout, re.MULTILINE)
    assert {"detect_kill_ms@4MiB", "detect_kill_pidfd_ms@4MiB", "detect_kill_eof_ms@4MiB", "detect_stop_ms@4MiB"} <= {
        *names
    }
