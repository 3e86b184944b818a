"""Runs small training jobs for the tests: imports Megatron once, then forks the workers of each job.

The test process starts this file as a program and talks to it in lines of JSON: a job in, its result out. It ends
when its input does, and its workers end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """How a job ended."""

    statuses: list[int]
    """Exit status per rank; -9 for one that was killed."""
    logs: list[str]
    """What each rank wrote."""


class Forker:
    """The test process's end. Use ``running_forker``."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(
        self,
        workers: int,
        target: str,
        folder: Path,
        *args: Any,
        environ: dict[str, str] | None = None,
        timeout_s: float = 100.0,
    ) -> JobResult:
        """Run ``target`` (``module:function``) in forked workers; it gets ``args`` and gives the exit status.

        A worker that is still there after ``timeout_s`` is killed.
        """
        store = _serve_store()
        job = {
            "workers": workers,
            "target": target,
            "folder": str(folder),
            "args": list(args),
            "environ": {"MASTER_PORT": str(store.port), **(environ or {})},
            "timeout_s": timeout_s,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the forker ended; its standard error is above"
        logs = [(folder / f"rank{rank}.log").read_text() for rank in range(workers)]
        return JobResult(statuses=json.loads(answer), logs=logs)


def _serve_store() -> Any:
    """A rendezvous store on a free loopback port, outside the workers."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@contextlib.contextmanager
def running_forker() -> Iterator[Forker]:
    """Start the program, and end it when done."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Forker(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# ---------------------------------------------------------------- the program's end


def _serve() -> None:
    from megatron_elas.pretrain_gpt import preload

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Megatron prints while importing is no answer
    preload()
    assert threading.active_count() == 1
    for line in sys.stdin:
        job = json.loads(line)
        answers.write(json.dumps(_run_job(job)) + "\n")
        answers.flush()


def _run_job(job: dict[str, Any]) -> list[int]:
    pids = [_fork_worker(rank, job) for rank in range(job["workers"])]
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + job["timeout_s"]
    while len(statuses) < len(pids):
        for rank, pid in enumerate(pids):
            if rank not in statuses:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    statuses[rank] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    return [statuses[rank] for rank in range(len(pids))]


def _fork_worker(rank: int, job: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    _become_worker(rank, job)


def _become_worker(rank: int, job: dict[str, Any]) -> NoReturn:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job["workers"]),
        LOCAL_WORLD_SIZE=str(job["workers"]),
        MASTER_ADDR="127.0.0.1",
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    os.environ.update(job["environ"])
    log = os.open(Path(job["folder"]) / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    module, _, name = job["target"].partition(":")
    status = 1
    try:
        status = getattr(importlib.import_module(module), name)(*job["args"])
    except BaseException:  # the worker's last frame: whatever it is goes to the log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.path.remove(str(Path(__file__).resolve().parent))
    _serve()
