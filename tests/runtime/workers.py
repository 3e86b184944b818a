"""Forked workers for tests of the data plane: small, without launcher and controller."""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from megatron_elas.runtime.transport.sockets import SocketTransport

_PR_SET_PDEATHSIG = 1

KILLED = "killed"
"""Result of a worker that ended by SIGKILL."""


def run_workers(count: int, function: Callable[..., Any], *args: Any, timeout_s: float = 100.0) -> list[Any]:
    """Run ``function(worker, *args)`` in ``count`` forked processes and give what they returned, by worker.

    Raises:
        AssertionError: A worker raised (its traceback is in the text) or was not done in time.
    """
    pids, pipes = [], []
    for worker in range(count):
        reader, writer = os.pipe()
        with warnings.catch_warnings():  # the other thread is pytest's watchdog, which holds no lock
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            pid = os.fork()
        if not pid:
            os.close(reader)
            _become_worker(writer, function, worker, args)
        os.close(writer)
        pids.append(pid)
        pipes.append(reader)
    deadline = time.monotonic() + timeout_s
    try:
        outcomes = _read_all(pipes, deadline)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # a zombie does not mind; stopped ones end too
            os.waitpid(pid, 0)
        for reader in pipes:
            os.close(reader)
    failures = [f"worker {at}: {text}" for at, (kind, text) in enumerate(outcomes) if kind == "raised"]
    assert not failures, "\n".join(failures)
    return [value for _, value in outcomes]


def _read_all(pipes: list[int], deadline: float) -> list[tuple[str, Any]]:
    chunks: dict[int, list[bytes]] = {fd: [] for fd in pipes}
    poller = select.poll()
    for fd in pipes:
        poller.register(fd, select.POLLIN)
    waiting = set(pipes)
    while waiting:
        left_s = deadline - time.monotonic()
        ready = poller.poll(max(0, left_s) * 1e3)
        if not ready:
            break
        for fd, _ in ready:
            data = os.read(fd, 1 << 20)
            chunks[fd].append(data)
            if not data:
                poller.unregister(fd)
                waiting.discard(fd)
    outcomes: list[tuple[str, Any]] = []
    for fd in pipes:
        data = b"".join(chunks[fd])
        if data:
            outcomes.append(pickle.loads(data))
        elif fd in waiting:
            outcomes.append(("raised", "not done in time"))
        else:
            outcomes.append(("returned", KILLED))
    return outcomes


def _become_worker(writer: int, function: Callable[..., Any], worker: int, args: tuple[Any, ...]) -> NoReturn:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    status = 1
    try:
        try:
            outcome = ("returned", function(worker, *args))
            status = 0
        except BaseException:
            outcome = ("raised", traceback.format_exc())
        data = memoryview(pickle.dumps(outcome))
        while data:
            data = data[os.write(writer, data) :]
    finally:
        os._exit(status)


def introduce(worker: int, count: int, folder: Path, scheme: str = "unix") -> SocketTransport:
    """Make the transport of one of ``count`` workers, wait for the others' and tell it where they are."""
    listen = f"unix:{folder}/{worker}" if scheme == "unix" else "tcp:127.0.0.1:0"
    transport = SocketTransport(worker, listen, "secret")
    written = folder / f"{worker}.writing"
    written.write_text(transport.address)
    written.rename(folder / f"{worker}.address")
    files = [folder / f"{at}.address" for at in range(count)]
    wait_until(lambda: all(file.exists() for file in files))
    transport.set_addresses({at: file.read_text() for at, file in enumerate(files)})
    return transport


def wait_until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Poll a condition of another thread or process."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"did not come true within {limit_s:g} s"
        time.sleep(0.001)


def at_once(*functions: Callable[[], object]) -> None:
    """Run on a thread each and wait for all; raises the first error."""
    errors: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
