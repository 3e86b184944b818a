"""The job's private folder on a node: sockets of the workers, and where ``elas`` finds the job."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

PREFIX = "elas-"
JOB_FILE = "job.json"
LONGEST_DIR = 80
"""Bytes. The path of a unix socket has 107, of which the socket's own name needs some."""


class JobFile(msgspec.Struct, frozen=True, kw_only=True):
    """What ``elas`` must know to talk to a job. Readable by its owner only: it holds the token."""

    run_id: str
    pid: int
    """Of the launcher; the folder is stale when it is gone."""
    started_s: float
    address: str
    token: str
    command: tuple[str, ...]


@contextlib.contextmanager
def make_run_dir() -> Iterator[Path]:
    """A new folder with mode 0700, removed when the context ends.

    Folders of launchers that were killed and could not do so are removed now.
    """
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > LONGEST_DIR:
        parent = Path("/tmp")
    remove_stale(parent)
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def write_job_file(run_dir: Path, job: JobFile) -> None:
    """Publish the job to ``elas``; complete from the moment it is there."""
    temporary = run_dir / f".{JOB_FILE}"
    descriptor = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(job))
    temporary.rename(run_dir / JOB_FILE)


def find_jobs(parent: Path | None = None) -> list[JobFile]:
    """Running jobs of this user on this node, the newest last."""
    jobs = [job for _, job in _read_all(parent or Path(tempfile.gettempdir())) if _is_alive(job.pid)]
    return sorted(jobs, key=lambda job: job.started_s)


def remove_stale(parent: Path) -> None:
    """Remove the folders of this user's jobs whose launcher is gone."""
    for run_dir, job in _read_all(parent):
        if not _is_alive(job.pid):
            shutil.rmtree(run_dir, ignore_errors=True)


def _read_all(parent: Path) -> Iterator[tuple[Path, JobFile]]:
    for run_dir in parent.glob(f"{PREFIX}*"):
        # Others may write to the parent: only a folder that nobody else could have made counts.
        with contextlib.suppress(OSError, msgspec.DecodeError):
            status = run_dir.lstat()
            if status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077:
                yield run_dir, msgspec.json.decode((run_dir / JOB_FILE).read_bytes(), type=JobFile)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
