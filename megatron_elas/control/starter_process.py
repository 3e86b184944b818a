"""The process that workers are forked from. Run by ``Starter``; its parent is the agent.

It may preload what all workers need, once: importing Megatron takes seconds, a fork takes
milliseconds. It stays single-threaded, so forking is safe at any time. It dies with its agent, and
its workers die with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from typing import NoReturn

from megatron_elas.control.parent_death import die_with_parent
from megatron_elas.control.starter_messages import (
    PreloadFailed,
    Ready,
    SignalWorker,
    StarterMessage,
    StartWorker,
    WorkerEnded,
    decode_to_starter,
    encode_line,
)
from megatron_elas.control.worker_start import become_worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A worker process. The descriptor becomes readable when it ends."""

    worker: int
    pid: int
    pidfd: int


class StarterProcess:
    """Serves the agent's requests until it hangs up."""

    def __init__(self, agent: socket.socket, watch_fd: int) -> None:
        self._agent = agent
        self._watch_fd = watch_fd
        self._received = b""
        self._children: dict[int, Child] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(agent, selectors.EVENT_READ)

    def say(self, message: StarterMessage) -> None:
        """Tell the agent. It may be gone; then the next read says so."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._agent.sendall(encode_line(message))

    def serve(self) -> None:
        """Work until the agent closes its end; then nothing of the workers is left."""
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._reap(key.data)
                elif not self._read():
                    self._end_all()
                    return

    def _read(self) -> bool:
        try:
            data = self._agent.recv(1 << 20)
        except ConnectionResetError:  # it closed its end with a message of ours unread
            data = b""
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            match decode_to_starter(line):
                case StartWorker() as request:
                    self._start(request)
                case SignalWorker(worker=worker, signum=signum):
                    self._signal(worker, signum)
        return bool(data)

    def _start(self, request: StartWorker) -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # None when elasrun was started with it closed
                stream.flush()
        starter_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._forget()
            become_worker(request, starter_pid, self._watch_fd)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it did so itself, or has run exec since
            os.setpgid(pid, pid)
        child = Child(worker=request.worker, pid=pid, pidfd=os.pidfd_open(pid))
        self._children[request.worker] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)

    def _forget(self) -> None:
        """In a forked child: let go of what belongs to the starter."""
        self._selector.close()
        self._agent.close()
        for child in self._children.values():
            os.close(child.pidfd)
        self._children.clear()

    def _signal(self, worker: int, signum: int) -> None:
        if worker in self._children:
            signal.pidfd_send_signal(self._children[worker].pidfd, signum)

    def _reap(self, child: Child) -> None:
        # Its process group first: as long as the leader is not waited for, the number cannot be another's.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        at_s = time.time()
        _, status = os.waitpid(child.pid, 0)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        del self._children[child.worker]
        self.say(WorkerEnded(worker=child.worker, status=os.waitstatus_to_exitcode(status), at_s=at_s))

    def _end_all(self) -> None:
        for child in tuple(self._children.values()):
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        for child in tuple(self._children.values()):
            self._reap(child)


def preload(what: str) -> None:
    """Call ``module:function``, and keep the garbage collector from touching what it loaded.

    A collection in a fork would write to every object's header and so copy the shared pages.
    """
    module, _, function = what.partition(":")
    getattr(importlib.import_module(module), function)()
    gc.collect()
    gc.freeze()


def main() -> NoReturn:
    """``python -m megatron_elas.control.starter_process FD WATCH_FD AGENT_PID [PRELOAD]``."""
    fd, watch_fd, agent_pid, *what = sys.argv[1:]
    die_with_parent(int(agent_pid))
    starter = StarterProcess(socket.socket(fileno=int(fd)), int(watch_fd))
    try:
        for name in what:
            preload(name)
    except Exception as error:  # whatever the user's module raises: the agent has to be told
        traceback.print_exc()
        starter.say(PreloadFailed(sentence=f"cannot preload {what[0]}: {type(error).__name__}: {error}"))
        sys.exit(1)
    starter.say(Ready())
    starter.serve()
    sys.exit(0)


if __name__ == "__main__":
    main()
