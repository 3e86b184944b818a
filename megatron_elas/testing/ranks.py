"""Runs a function as several ranks, each a fork of the test process.

What the test process has imported is there at once in every rank. Whatever happens, no rank is left:
those that still run when the time is up are killed, and they die with the test process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
GRACE_AFTER_FAILURE_S = 3.0
"""For the other ranks to end by themselves once one has failed: they usually wait for it in vain."""


class RankFailed(AssertionError):
    """A rank ended without a result: it died, was stopped by the time limit, or left by ``os._exit``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How one rank ended."""

    status: int
    """Exit status; minus the signal number for a signal. -9 for a rank that ran out of time."""
    result: Any = None
    """What the function returned; None when it did not."""
    error: BaseException | None = None
    """What it raised, with the rank's traceback as a note."""
    ended_s: float = 0.0
    """``time.monotonic()``."""
    out_of_time: bool = False


def run_ranks(n: int, fn: Callable[..., Any], timeout_s: float = 60.0, args: Sequence[Any] = ()) -> list[Any]:
    """Call ``fn(rank, n, *args)`` in ``n`` forks and collect what it returns, by rank.

    Call it from a process without other threads. Results and exceptions travel pickled.

    Raises:
        RankFailed: A rank died or did not end within ``timeout_s``.
        Exception: What a rank raised (the first in time), with its traceback as a note.
    """
    ends = run_mortal_ranks(n, fn, timeout_s, args, stop_on_error=True)
    failed = [(end.ended_s, rank) for rank, end in enumerate(ends) if end.status != 0]
    if failed:
        _, rank = min(failed)
        error = ends[rank].error
        if error is not None:
            raise error
        raise RankFailed(_describe(rank, ends[rank], timeout_s))
    return [end.result for end in ends]


def run_mortal_ranks(
    n: int,
    fn: Callable[..., Any],
    timeout_s: float = 60.0,
    args: Sequence[Any] = (),
    *,
    stop_on_error: bool = False,
) -> list[RankEnd]:
    """As ``run_ranks``, for tests in which ranks die: tells how each one ended.

    A rank that is not done within ``timeout_s`` is killed, and says so in its end.

    Args:
        n: Number of ranks.
        fn: Called as ``fn(rank, n, *args)``.
        timeout_s: For all ranks together.
        args: Further arguments.
        stop_on_error: Once a rank has failed, give the others only a few seconds.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    running = [_Rank(rank, fn, (rank, n, *args)) for rank in range(n)]
    ends: dict[int, RankEnd] = {}
    deadline = time.monotonic() + timeout_s
    try:
        with selectors.DefaultSelector() as selector:
            for rank in running:
                selector.register(rank.pipe, selectors.EVENT_READ, rank)
            while len(ends) < n and (left_s := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left_s):
                    rank = key.data
                    if rank.read():
                        continue
                    selector.unregister(rank.pipe)
                    end = ends[rank.number] = rank.reap()
                    if stop_on_error and end.status != 0:
                        deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE_S)
    finally:
        for rank in running:
            if rank.number not in ends:
                ends[rank.number] = rank.kill()
    return [ends[number] for number in range(n)]


class _Rank:
    """The test's end of one fork. Its pipe is open exactly as long as the fork lives."""

    def __init__(self, number: int, fn: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.number = number
        self._received = b""
        self.pipe, theirs = os.pipe()
        parent_pid = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self.pipe)
            _serve_rank(theirs, parent_pid, fn, arguments)
        os.close(theirs)

    def read(self) -> bool:
        """Take what was sent; False at the end."""
        data = os.read(self.pipe, 1 << 20)
        self._received += data
        return bool(data)

    def reap(self) -> RankEnd:
        """The end of a rank that has closed its pipe, or was killed."""
        os.close(self.pipe)
        _, status = os.waitpid(self._pid, 0)
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(EOFError, pickle.UnpicklingError):  # nothing, or half of it: it died
            result, error = pickle.loads(self._received)
            return RankEnd(status=code, result=result, error=error, ended_s=time.monotonic())
        return RankEnd(status=code, ended_s=time.monotonic())

    def kill(self) -> RankEnd:
        """End a rank that runs out of time."""
        os.kill(self._pid, signal.SIGKILL)
        end = self.reap()
        return RankEnd(status=end.status, ended_s=end.ended_s, out_of_time=True)


def _serve_rank(pipe: int, parent_pid: int, fn: Callable[..., Any], arguments: tuple[Any, ...]) -> NoReturn:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
    status = 0
    try:
        outcome: tuple[Any, BaseException | None] = (fn(*arguments), None)
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: the test is told of anything
        status, outcome = 1, (None, error)
    _send(pipe, outcome)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _send(pipe: int, outcome: tuple[Any, BaseException | None]) -> None:
    result, error = outcome
    if error is not None:
        text = "".join(traceback.format_exception(error))
        error.add_note(f"in a rank:\n{text}")
        try:
            pickle.loads(data := pickle.dumps(outcome))
        except Exception:  # an exception class may refuse to be pickled or built again in any way it likes
            data = pickle.dumps((None, RankFailed(text)))
    else:
        data = pickle.dumps((result, None))
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view) :]


def _describe(rank: int, end: RankEnd, timeout_s: float) -> str:
    if end.out_of_time:
        return f"rank {rank} was still running after {timeout_s:g} s"
    how = f"signal {signal.Signals(-end.status).name}" if end.status < 0 else f"status {end.status}"
    return f"rank {rank} ended with {how} and without a result"
