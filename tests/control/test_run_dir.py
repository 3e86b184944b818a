"""The job's private folder: who can read it, that none stays, and that a running job keeps its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_elas.control.run_dir import LONGEST_DIR, JobFile, find_jobs, make_run_dir, remove_stale, write_job_file

LAUNCHER = """
import sys
from megatron_elas.control.run_dir import JobFile, make_run_dir, write_job_file
with make_run_dir() as run_dir:
    write_job_file(run_dir, JobFile(run_id="job3", started_s=3.0, address="ws://x", token="t", command=("a",)))
    print(run_dir, flush=True)
    sys.stdin.read()
"""


def make_job_file(started_s: float = 1.0) -> JobFile:
    return JobFile(run_id=f"job{started_s:g}", started_s=started_s, address="ws://x", token="t", command=("a",))


@contextlib.contextmanager
def launcher(parent: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process with a folder of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={"PYTHONPATH": ":".join(sys.path), "TMPDIR": str(parent)},
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


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
        write_job_file(run_dir, make_job_file(4.0))
        assert "job4" in [job.run_id for job in find_jobs()]


def test_jobs_are_found_newest_last_and_ended_ones_are_not(own_tmp: Path) -> None:
    with make_run_dir() as one, make_run_dir() as two, launcher(own_tmp) as (process, three):
        write_job_file(one, make_job_file(2.0))
        write_job_file(two, make_job_file(1.0))
        assert [job.run_id for job in find_jobs()] == ["job1", "job2", "job3"]
        process.kill()
        process.wait()
        assert [job.run_id for job in find_jobs()] == ["job1", "job2"]
        assert three.exists()
        remove_stale(own_tmp)
        assert one.exists() and two.exists() and not three.exists()


def test_a_running_job_keeps_its_folder_whatever_its_process_id_is_here(own_tmp: Path) -> None:
    """As seen from a container that shares /tmp: nothing but the lock tells that the launcher lives."""
    with launcher(own_tmp) as (_, theirs):
        assert "pid" not in (theirs / "job.json").read_text()
        for _ in range(2):
            remove_stale(own_tmp)
            assert theirs.exists() and [job.run_id for job in find_jobs()] == ["job3"]


def test_a_folder_whose_launcher_has_not_locked_it_yet_is_left_alone(own_tmp: Path) -> None:
    (own_tmp / "elas-new").mkdir(mode=0o700)
    (own_tmp / "elas-new" / ".lock").touch()
    remove_stale(own_tmp)
    assert (own_tmp / "elas-new").exists() and not find_jobs()


def test_programs_that_the_launcher_starts_do_not_inherit_the_lock(own_tmp: Path) -> None:
    with contextlib.ExitStack() as stack:
        with make_run_dir() as run_dir:
            kept = stack.enter_context(subprocess.Popen(["sleep", "60"], close_fds=False))
            stack.callback(kept.kill)
            (own_tmp / "elas-copy").mkdir(mode=0o700)
            (own_tmp / "elas-copy" / "lock").hardlink_to(run_dir / "lock")
        remove_stale(own_tmp)
        assert not (own_tmp / "elas-copy").exists()


def test_folders_that_others_could_have_made_are_not_believed(own_tmp: Path) -> None:
    with make_run_dir() as run_dir:
        write_job_file(run_dir, make_job_file())
        run_dir.chmod(0o755)
        assert not find_jobs()
        run_dir.chmod(0o700)
        (own_tmp / "elas-link").symlink_to(run_dir)
        (own_tmp / "elas-broken").mkdir(mode=0o700)
        (own_tmp / "elas-broken" / "job.json").write_text("{")
        assert len(find_jobs()) == 1
