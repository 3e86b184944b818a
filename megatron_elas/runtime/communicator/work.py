"""Handles of operations, as ``torch.distributed`` gives them to callers."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future


class ElasticWork(Work):
    """Base: an operation with a result and perhaps an error. Errors surface in ``wait`` and in the future.

    Who runs the operation calls ``finish``, or ``complete`` and ``settle`` where it holds a lock in between: callbacks
    of the future may call anything.
    """

    # of the class until they are set: works are made often
    _error: BaseException | None = None
    _done = False
    _future: Future[Any] | None = None
    _settled = False

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def complete(self, error: BaseException | None) -> None:
        """Note that it has ended, with or without an error."""
        self._error = error
        self._done = True

    def settle(self) -> None:
        """Tell the future, if one was asked for. After ``complete``."""
        with _futures:
            future = self._future
            if future is None or self._settled:
                return
            self._settled = True
        if self._error is None:
            future.set_result(self._result)
        else:
            future.set_exception(self._error)

    def finish(self, error: BaseException | None) -> None:
        """``complete`` and ``settle``."""
        self.complete(error)
        self.settle()

    def is_completed(self) -> bool:
        """True when it has ended."""
        return self._done

    def is_success(self) -> bool:
        """True when it has ended without an error."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """The error it ended with."""
        return self._error

    def result(self) -> Any:
        """The tensors that it wrote."""
        return self._result

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it has ended."""
        raise NotImplementedError

    def get_future(self) -> Future[Any]:
        """A future of the result; it completes with the operation."""
        with _futures:
            if self._future is None:
                self._future = Future()
            future = self._future
        if self._done:
            self.settle()
        else:
            self._start()
        return future

    def _start(self) -> None:
        """Make sure that it proceeds without a ``wait``."""

    def _raise(self) -> bool:
        if self._error is not None:
            # a fresh traceback: the old one would grow with every call and keep tensors of the first alive
            raise self._error.with_traceback(None)
        return True


_futures = threading.Lock()
"""Guards who makes and settles a future; for all, as it is held for an instant only."""


class CompletedWork(ElasticWork):
    """Done before the call returned."""

    _done = True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True


class QueuedWork(ElasticWork):
    """Runs on the group's thread. ``finish`` is called there."""

    def __init__(self, result: Any) -> None:
        super().__init__(result)
        self._event = threading.Event()

    def complete(self, error: BaseException | None) -> None:
        """See ``ElasticWork``."""
        super().complete(error)
        self._event.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until completed.

        Raises:
            TimeoutError: It takes longer than a positive ``timeout``; the operation goes on.
        """
        limit_s = seconds(timeout)
        if not self._done and not self._event.wait(limit_s):
            raise TimeoutError(f"the operation did not complete within {limit_s:g} s")
        return self._raise()


class JoinedWork(ElasticWork):
    """Several operations as one."""

    def __init__(self, works: Sequence[Work], result: Any = ()) -> None:
        super().__init__(list(result))
        self._works = tuple(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all, in order.

        Raises:
            TimeoutError: It takes longer than a positive ``timeout``; the operations go on.
        """
        limit_s = seconds(timeout)
        deadline = None if limit_s is None else time.monotonic() + limit_s
        for work in self._works:
            if deadline is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 1e-6)))
        return True

    def is_completed(self) -> bool:
        """True when all are."""
        return all([work.is_completed() for work in self._works])  # asking starts some

    def is_success(self) -> bool:
        """True when all are."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """The first error."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> Future[Any]:
        """A future that completes when all have."""
        futures = [work.get_future() for work in self._works]
        if not futures:
            done: Future[Any] = Future()
            done.set_result(self._result)
            return done
        result = self._result

        def all_done(_: Future[Any]) -> Any:
            for future in futures:
                future.value()  # raises its error
            return result

        return torch.futures.collect_all(futures).then(all_done)


def as_one(works: list[Work], result: Any) -> Work:
    """The only one, or all of them joined."""
    return works[0] if len(works) == 1 else JoinedWork(works, result)


def seconds(timeout: timedelta | None) -> float | None:
    """Of a positive timeout; None: no limit, as torch says by none, zero or a negative one."""
    limit_s = timeout.total_seconds() if timeout is not None else 0.0
    return limit_s if limit_s > 0 else None
