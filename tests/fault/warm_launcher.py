"""Runs ``elasrun`` without the seconds that every job takes to import Megatron.

The test starts this file as a program, which imports Megatron once. For each job it forks a process that becomes
``elasrun``; that one forks, before anything else, the process that will be its starter and needs no preloading any
more. All the rest is as in a job that a user starts. What a job leaves running becomes a child of this program
(``PR_SET_CHILD_SUBREAPER``), so it is seen, told of and killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.01
_GRACE_S = 20.0
"""From SIGTERM to SIGKILL for a job that is out of time."""
_PRELOADED = "megatron_elas.pretrain_gpt:preload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a job ended."""

    code: int
    out_of_time: bool
    left: list[str]
    """Command lines of processes that were there after ``elasrun`` had ended."""


class WarmLauncher:
    """The test's end. Use ``running_warm_launcher``."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, arguments: Sequence[str], environ: dict[str, str], output: Path, timeout_s: float) -> Ended:
        """``elasrun`` with these arguments to its end; what it prints goes to ``output``."""
        job = {"arguments": list(arguments), "environ": environ, "output": str(output), "timeout_s": timeout_s}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the warm launcher ended; its standard error is above"
        return Ended(**json.loads(answer))


@contextlib.contextmanager
def running_warm_launcher() -> Iterator[WarmLauncher]:
    """Start the program, and end it when done."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield WarmLauncher(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# ---------------------------------------------------------------- the program's end


def _serve() -> None:
    import gc

    import megatron_elas.cli.elasrun
    from megatron_elas.pretrain_gpt import preload

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Megatron prints while importing is no answer
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    preload()
    import megatron_elas.worker  # noqa: F401  (what every worker imports: once for all)

    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        answers.write(json.dumps(_run_job(json.loads(line))) + "\n")
        answers.flush()


def _run_job(job: dict[str, Any]) -> dict[str, Any]:
    pid = _fork(lambda: _become_elasrun(job))
    deadline, out_of_time = time.monotonic() + job["timeout_s"], False
    while not (done := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL if out_of_time else signal.SIGTERM)
            deadline, out_of_time = time.monotonic() + _GRACE_S, True
        time.sleep(_POLL_S)
    return {"code": os.waitstatus_to_exitcode(done[1]), "out_of_time": out_of_time, "left": _end_orphans()}


def _end_orphans() -> list[str]:
    """Kill all children; gives what they were."""
    import psutil

    left = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(f"pid {process.pid} ({process.status()}): {' '.join(process.cmdline())[:200]}")
            process.kill()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    return left


def _fork(run: Callable[[], int]) -> int:
    """Run in a fork that ends with this process; gives its pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    status = 1
    try:
        if os.getppid() == parent:
            status = run()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:  # the fork's last frame: whatever it is goes to the output
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _become_elasrun(job: dict[str, Any]) -> int:
    from megatron_elas.cli import elasrun

    output = os.open(job["output"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, targets in ((output, (1, 2)), (null, (0,))):
        for target in targets:
            os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(job["environ"])
    ours, theirs = socket.socketpair()
    pid = _fork(lambda: _become_starter(ours, theirs))
    theirs.close()

    start_program = asyncio.create_subprocess_exec

    async def take_fork(*command: str, **options: Any) -> Any:
        if "megatron_elas.control.starter_process" not in command:
            return await start_program(*command, **options)
        (*_command, fd, watch_fd, agent_pid, preloaded) = command
        assert (int(agent_pid), preloaded) == (os.getpid(), _PRELOADED), command
        assert [int(fd), int(watch_fd)] == list(options["pass_fds"])
        socket.send_fds(ours, [json.dumps(options["env"]).encode()], options["pass_fds"])
        ours.close()
        return _Fork(pid)

    asyncio.create_subprocess_exec = take_fork  # type: ignore[assignment]
    return elasrun.main(job["arguments"])


def _become_starter(elasruns: socket.socket, own: socket.socket) -> NoReturn:
    """Wait until ``elasrun`` starts its starter, and be that."""
    from megatron_elas.control import starter_process

    elasruns.close()
    environ, fds, _, _ = socket.recv_fds(own, 1 << 20, 2)
    own.close()
    if not fds:
        sys.exit(0)  # elasrun ended before it came to that
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(json.loads(environ))
    # All is imported; but what is there now is frozen, as in every starter, and is no worker's.
    sys.argv = ["starter", *map(str, fds), str(os.getppid()), "gc:collect"]
    starter_process.main()


class _Fork:
    """As much of ``asyncio.subprocess.Process`` as the agent's handle uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    async def wait(self) -> int:
        while self._status is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self._status = os.waitstatus_to_exitcode(status)
            else:
                await asyncio.sleep(_POLL_S)
        return self._status

    @property
    def returncode(self) -> int | None:
        return self._status

    def kill(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)


if __name__ == "__main__":
    _repo = str(Path(__file__).resolve().parents[2])
    sys.path = [_repo, *(entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent)]
    _serve()
