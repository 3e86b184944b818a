"""The job's private folder: who can read it, and that none stays."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron_elas.control.run_dir import LONGEST_DIR, JobFile, find_jobs, make_run_dir, remove_stale, write_job_file


def make_job_file(pid: int, started_s: float = 1.0) -> JobFile:
    return JobFile(
        run_id=f"job{started_s:g}", pid=pid, started_s=started_s, address="ws://x", token="t", command=("a",)
    )


@pytest.fixture
def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture(autouse=True)
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_private_short_and_removed() -> None:
    with make_run_dir() as run_dir:
        assert run_dir.stat().st_mode & 0o777 == 0o700
        (run_dir / "w0.sock").touch()
    assert not run_dir.exists()


def test_it_is_removed_when_the_job_fails() -> None:
    with pytest.raises(ValueError), make_run_dir() as run_dir:
        raise ValueError
    assert not run_dir.exists()


def test_a_long_temporary_folder_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * LONGEST_DIR)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with make_run_dir() as run_dir:
        assert run_dir.parent == Path("/tmp")


def test_jobs_are_found_newest_last_and_ended_ones_are_not(own_tmp: Path, ended_pid: int) -> None:
    with make_run_dir() as one, make_run_dir() as two, make_run_dir() as three:
        write_job_file(one, make_job_file(os.getpid(), 2.0))
        write_job_file(two, make_job_file(os.getpid(), 1.0))
        write_job_file(three, make_job_file(ended_pid, 3.0))
        assert [job.run_id for job in find_jobs()] == ["job1", "job2"]
        remove_stale(own_tmp)
        assert one.exists() and two.exists() and not three.exists()


def test_folders_that_others_could_have_made_are_not_believed(own_tmp: Path, ended_pid: int) -> None:
    with make_run_dir() as run_dir:
        write_job_file(run_dir, make_job_file(os.getpid()))
        run_dir.chmod(0o755)
        assert not find_jobs()
        run_dir.chmod(0o700)
        (own_tmp / "elas-link").symlink_to(run_dir)
        (own_tmp / "elas-broken").mkdir(mode=0o700)
        (own_tmp / "elas-broken" / "job.json").write_text("{")
        assert len(find_jobs()) == 1
