"""What holds for every test: one thread per process, no left-over process or file, cheap tests first.

Temporary files go to a folder of this session, so that several sessions on one machine do not
blame each other. Code that spells out /tmp or uses /dev/shm is caught at the end of the session.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

# Before a test imports torch: many small processes with a thread per core each would crawl.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
    os.environ[_name] = "1"

REPO = Path(__file__).resolve().parent.parent
SESSION_MARK = "MEGATRON_ELAS_TEST_SESSION"
"""Environment variable by which programs that a test started are known, also when orphaned."""
SHARED_FOLDERS = (Path(tempfile.gettempdir()), Path("/dev/shm"))
OUR_PREFIXES = ("elas", "megatron_elas", "megatron-elas")
STAYING_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Python keeps one of each until it exits."""
STAYING_FILES = ("pymp-", "torchinductor_", "pytest-of-")
"""Kept by Python, torch and pytest until or beyond the end of the process."""
GRACE_S = 20.0
"""How long a process that was told to end may take, on a busy machine."""

FOLDER_ORDER = ("spec", "schedule", "planner", "simulator", "control", "architecture", "cli", "testing", "platform")
LATE_FOLDERS = ("runtime", "host", "golden", "distributed", "fault", "network")

_main_pid = os.getpid()
_session_tmp = Path(tempfile.mkdtemp(prefix="elas-tests-"))
_shared_before = {folder: set(os.listdir(folder)) for folder in SHARED_FOLDERS if folder.is_dir()}


def pytest_configure() -> None:
    """Point temporary files, imports and child processes of the session at this checkout."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(SHARED_FOLDERS[0]))  # tmp_path outlives the session
    os.environ["TMPDIR"] = str(_session_tmp)
    tempfile.tempdir = None
    os.environ[SESSION_MARK] = f"{_main_pid}"
    paths = [str(REPO), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
    hypothesis.settings.load_profile("repeatable")


def pytest_unconfigure() -> None:
    """Remove the session's folder."""
    if os.getpid() == _main_pid:
        shutil.rmtree(_session_tmp, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cheap tests first: by kind of test, then by folder, otherwise as written."""

    def cost(item: pytest.Item) -> tuple[int, int]:
        parts = item.path.relative_to(REPO / "tests").parts
        folder = parts[0] if len(parts) > 1 else ""
        order = (*FOLDER_ORDER, "", *LATE_FOLDERS)
        kind = 2 if item.get_closest_marker("slow") else 1 if item.get_closest_marker("process") else 0
        return kind, order.index(folder) if folder in order else len(order)

    items.sort(key=cost)


# ---------------------------------------------------------------- nothing is left


def _describe(process: psutil.Process) -> str:
    with process.oneshot():
        command = " ".join(process.cmdline())[:200]
        return f"pid {process.pid} ({process.status()}, parent {process.ppid()}): {command}"


def _running_children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _end(processes: set[psutil.Process]) -> list[str]:
    """Give the processes time to end, then kill them. Returns a line for each that had to be."""
    _, alive = psutil.wait_procs(processes, timeout=GRACE_S)
    lines = []
    for process in alive:
        try:
            line = _describe(process)
            if process.status() == psutil.STATUS_ZOMBIE or any(name in line for name in STAYING_PROCESSES):
                continue
            process.kill()
        except psutil.NoSuchProcess:
            continue
        lines.append(line)
    psutil.wait_procs(alive, timeout=0.1)
    return lines


def _staying(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return any(name in command for name in STAYING_PROCESSES)


def _orphans() -> set[psutil.Process]:
    """Processes that came from this session and have lost their parent.

    Started programs carry the session's mark in their environment. Forks that never ran a program
    do not; they have this process's command line and process group, and their new parent is init
    or another reaper among this process's ancestors.
    """
    me = psutil.Process()
    family = {me.pid, *(p.pid for p in me.children(recursive=True))}
    ancestors = {p.pid for p in me.parents()}
    reapers = {1, *ancestors} - {me.ppid()} | ({1} if me.ppid() == 1 else set())
    found = set()
    for process in psutil.process_iter():
        if process.pid in family or process.pid in ancestors:
            continue
        try:
            if process.create_time() < me.create_time() or process.uids().real != os.getuid():
                continue
            marked = process.environ().get(SESSION_MARK) == str(_main_pid)
            forked = (
                process.ppid() in reapers
                and process.cmdline() == me.cmdline()
                and os.getpgid(process.pid) == os.getpgid(0)
            )
        except (psutil.Error, ProcessLookupError):
            continue
        if (marked or forked) and not _staying(process):
            found.add(process)
    return found


def _own_files() -> set[str]:
    return {name for name in os.listdir(_session_tmp) if not name.startswith(STAYING_FILES)}


@pytest.fixture(autouse=True)
def nothing_is_left_by_the_test() -> Iterator[None]:
    """Fail a test that leaves a child process or a temporary file, and name it."""
    processes, files = _running_children(), _own_files()
    yield
    left = {p for p in _running_children() - processes if not _staying(p)}
    complaints = [f"left a process running: {line}" for line in (_end(left) if left else ())]
    left_files = _own_files() - files
    complaints += [f"left a temporary file: {name}" for name in sorted(left_files)]
    for name in left_files:
        path = _session_tmp / name
        is_folder = path.is_dir() and not path.is_symlink()
        shutil.rmtree(path, ignore_errors=True) if is_folder else path.unlink(missing_ok=True)
    if complaints:
        pytest.fail("\n".join(complaints), pytrace=False)


@pytest.fixture(autouse=True, scope="module")
def no_orphan_is_left_by_the_file() -> Iterator[None]:
    """Fail the last test of a file whose tests left processes without a parent."""
    yield
    if complaints := [f"left an orphan: {line}" for line in _end(_orphans())]:
        pytest.fail("\n".join(complaints), pytrace=False)


@pytest.fixture(autouse=True, scope="session")
def nothing_is_left_by_the_session() -> Iterator[None]:
    """Fail the session's last test when wider fixtures left something, or code wrote past TMPDIR."""
    yield
    left = {p for p in _running_children() if not _staying(p)}
    complaints = [f"left a process running: {line}" for line in (_end(left) if left else ())]
    complaints += [f"left a temporary file: {name}" for name in sorted(_own_files())]
    files = [
        str(folder / name)
        for folder, before in _shared_before.items()
        for name in sorted(set(os.listdir(folder)) - before)
        if name.startswith(OUR_PREFIXES) and not name.startswith("elas-tests-")
    ]
    if files and not _others_are_at_work():
        complaints += [f"left a file: {name}" for name in files]
    if complaints:
        pytest.fail("\n".join(complaints), pytrace=False)


def _others_are_at_work() -> bool:
    """Whether another test run or job on this machine may own new files in the shared folders."""
    me = psutil.Process()
    mine = {me.pid, *(p.pid for p in me.parents()), *(p.pid for p in me.children(recursive=True))}
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if process.pid not in mine and ("pytest" in command or "megatron_elas" in command):
            return True
    return False
