"""The program of docs/process-groups.md runs as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

PAGE = Path(__file__).resolve().parents[1] / "docs" / "process-groups.md"


def test_the_program_of_the_page_goes_on_with_two_of_three_workers(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PAGE.read_text().partition("```python\n")[2].partition("```")[0])
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    for worker in range(3):
        assert f"worker {worker}: 3 workers" in done.stdout
    assert "worker 0 is rank 0 of 2: 2 workers" in done.stdout
    assert "worker 2 is rank 1 of 2: 2 workers" in done.stdout
    assert done.stdout.count("is rank") == 2
