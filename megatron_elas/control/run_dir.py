"""The job's private folder on a node: sockets of the workers, and where ``elas`` finds the job.

A job is alive as long as its launcher holds the lock of the folder. Process ids would not do: the
temporary folder may be shared by containers that do not see each other's processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

PREFIX = "elas-"
JOB_FILE = "job.json"
LOCK_FILE = "lock"
"""Locked with flock(2) from the moment it has this name; the kernel unlocks it when the launcher ends, however."""
LONGEST_DIR = 80
"""Bytes. The path of a unix socket has 107, of which the socket's own name needs some."""


class JobFile(msgspec.Struct, frozen=True, kw_only=True):
    """What ``elas`` must know to talk to a job. Readable by its owner only: it holds the token."""

    run_id: str
    started_s: float
    address: str
    token: str
    command: tuple[str, ...]
    log_dir: str | None = None
    """On this node; None: nothing is written down."""


@contextlib.contextmanager
def make_run_dir() -> Iterator[Path]:
    """A new folder with mode 0700, locked while the context lasts and removed when it ends.

    Folders of launchers that were killed and could not do so are removed now.
    """
    parent = _find_parent()
    remove_stale(parent)
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        with _locked(path):
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def write_job_file(run_dir: Path, job: JobFile) -> None:
    """Publish the job to ``elas``, or what has changed about it; complete from the moment it is there."""
    temporary = run_dir / f".{JOB_FILE}"
    descriptor = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(job))
    temporary.rename(run_dir / JOB_FILE)


def find_jobs(parent: Path | None = None) -> list[JobFile]:
    """Running jobs of this user on this node, the newest last."""
    jobs = []
    for run_dir in _find_run_dirs(parent or _find_parent()):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            if not _is_stale(run_dir):
                jobs.append(msgspec.json.decode((run_dir / JOB_FILE).read_bytes(), type=JobFile))
    return sorted(jobs, key=lambda job: job.started_s)


def remove_stale(parent: Path) -> None:
    """Remove the folders of this user's jobs whose launcher is gone."""
    for run_dir in _find_run_dirs(parent):
        with contextlib.suppress(OSError):
            if _is_stale(run_dir):
                shutil.rmtree(run_dir, ignore_errors=True)


def _find_parent() -> Path:
    parent = Path(tempfile.gettempdir())
    return parent if len(str(parent)) <= LONGEST_DIR else Path("/tmp")


def _find_run_dirs(parent: Path) -> Iterator[Path]:
    for run_dir in parent.glob(f"{PREFIX}*"):
        # Others may write to the parent: only a folder that nobody else could have made counts.
        with contextlib.suppress(OSError):
            status = run_dir.lstat()
            if status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077:
                yield run_dir


@contextlib.contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Hold the folder's lock. Programs that are started meanwhile do not inherit it (close-on-exec)."""
    temporary = run_dir / f".{LOCK_FILE}"
    descriptor = os.open(temporary, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        temporary.rename(run_dir / LOCK_FILE)  # only now: nobody must see the lock before it is held
        yield
    finally:
        os.close(descriptor)


def _is_stale(run_dir: Path) -> bool:
    """Whether the launcher has ended. Raises OSError for a folder without a lock: no launcher has got that far yet."""
    descriptor = os.open(run_dir / LOCK_FILE, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
