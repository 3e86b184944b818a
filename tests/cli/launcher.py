"""Starts ``elasrun`` as users do, and looks at what is left of it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

WAIT_S = 100.0
TOY = str(Path(__file__).parent / "data" / "toy_elastic_worker.py")
FAST = ("--heartbeat-interval-s=0.05", "--heartbeat-timeout-s=3", "--settle-timeout-s=10", "--grace-s=1")
"""Whoever waits for one of the longer limits says a shorter one; on a busy machine nobody is lost by them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of a launch."""

    code: int
    out: str
    err: str


def elasrun(*arguments: str, environ: dict[str, str] | None = None) -> Outcome:
    """Run to the end."""
    with launched(*arguments, environ=environ) as job:
        return job.finish()


class Job:
    """A launch that may still run."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()

    def wait_for(self, pattern: str, count: int = 1) -> list[re.Match[str]]:
        """Until the pattern is so many times in its output; lines of fresh Pythons may run into each other."""

        def find() -> list[re.Match[str]]:
            return list(re.finditer(pattern, "".join(self.lines)))

        with self._changed:
            assert self._changed.wait_for(lambda: len(find()) >= count, WAIT_S), f"no {pattern!r} in {self.lines}"
            return find()

    def descendants(self) -> list[psutil.Process]:
        """Processes under the launcher, now."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def controller(self) -> psutil.Process:
        """The controller's process, now; there may be none for a moment."""
        return wait_until(lambda: next((p for p in self.descendants() if is_controller(p)), None))

    def workers(self) -> list[psutil.Process]:
        """Worker processes that live now, by the process id."""
        leaves = (p for p in self.descendants() if not p.children() and not is_controller(p))
        return sorted(leaves, key=lambda process: process.pid)

    def finish(self, wait_s: float = WAIT_S) -> Outcome:
        """Wait for its end."""
        code = self.process.wait(wait_s)
        self._reader.join(WAIT_S)
        assert self.process.stderr is not None
        return Outcome(code=code, out="".join(self.lines), err=self.process.stderr.read())

    def end(self) -> None:
        """Whatever happened."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(WAIT_S)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


@contextlib.contextmanager
def launched(*arguments: str, environ: dict[str, str] | None = None) -> Iterator[Job]:
    """Start, and make sure of the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_elas.cli.elasrun", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environ or {})},
    )
    job = Job(process)
    try:
        yield job
    finally:
        job.end()


def is_controller(process: psutil.Process) -> bool:
    """Whether the controller runs in it."""
    with contextlib.suppress(psutil.Error):
        return "megatron_elas.control.controller_process" in process.cmdline()
    return False


def wait_until[T](find: Callable[[], T | None]) -> T:
    """What ``find`` gives, once it gives something."""
    deadline = time.monotonic() + WAIT_S
    while (found := find()) is None:
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
    return found


def wait_gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that do not end."""
    _, alive = psutil.wait_procs(processes, timeout=WAIT_S)
    return alive


def write_script(folder: Path, text: str) -> str:
    """A worker's script."""
    path = folder / "script.py"
    path.write_text(text)
    return str(path)
