"""Handles of operations, as ``torch.distributed`` gives them to callers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Work
from torch.futures import Future

from megatron_elas.runtime.transport.base import ProtocolError
from megatron_elas.spec.errors import EpochChanged


class ElasticWork(Work):
    """Base: an operation with a result and perhaps an error. Errors surface in ``wait`` and in the future."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result
        self._error: BaseException | None = None

    def is_success(self) -> bool:
        """True when it has completed without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """The error it ended with."""
        return self._error

    def result(self) -> Any:
        """The tensors that it wrote."""
        return self._result

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def get_future(self) -> Future[Any]:
        """A future of the result. Here: wait and give a completed one."""
        future: Future[Any] = Future()
        self._settle(future)
        return future

    def _settle(self, future: Future[Any]) -> None:
        if self._error is None:
            future.set_result(self._result)
        else:
            future.set_exception(self._error)

    def _raise(self) -> bool:
        if self._error is not None:
            # a fresh traceback: the old one would grow with every call and keep tensors of the first alive
            raise self._error.with_traceback(None)
        return True


class CompletedWork(ElasticWork):
    """Done before the call returned."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True


class QueuedWork(ElasticWork):
    """Runs on the group's thread. ``finish`` is called there."""

    def __init__(self, result: Any) -> None:
        super().__init__(result)
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._future: Future[Any] | None = None

    def finish(self, error: BaseException | None) -> None:
        """Complete, with or without an error."""
        with self._lock:
            self._error = error
            self._done.set()
            future = self._future
        if future is not None:
            self._settle(future)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until completed.

        Raises:
            TimeoutError: It takes longer than a positive ``timeout``.
        """
        limit_s = timeout.total_seconds() if timeout else 0.0
        if not self._done.wait(limit_s if limit_s > 0 else None):
            raise TimeoutError(f"the operation did not complete within {limit_s:g} s")
        return self._raise()

    def is_completed(self) -> bool:
        """True when it has run."""
        return self._done.is_set()

    def get_future(self) -> Future[Any]:
        """A future that completes with the operation."""
        with self._lock:
            if self._future is not None:
                return self._future
            future: Future[Any] = Future()
            if not self._done.is_set():
                self._future = future
                return future
            self._future = future
        self._settle(future)
        return future


class DeferredReceive(ElasticWork):
    """A receive that happens in ``wait``, after the receives that were asked for before."""

    def __init__(
        self,
        result: Any,
        receive_up_to: Callable[[DeferredReceive], None],
        receive: Callable[[], None],
        source: int,
    ) -> None:
        """``receive_up_to`` calls ``receive`` of all waiting receives of this peer, this one last."""
        super().__init__(result)
        self._receive_up_to = receive_up_to
        self._receive: Callable[[], None] | None = receive
        self._source = source

    def receive(self) -> None:
        """Receive now; the error surfaces in ``wait``."""
        assert self._receive is not None, "received twice"
        try:
            self._receive()
        except (EpochChanged, ProtocolError) as error:
            self.finish(error.with_traceback(None))
        else:
            self.finish(None)

    def finish(self, error: BaseException | None) -> None:
        """Complete, with or without an error."""
        self._error = error
        self._receive = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Receive. ``timeout`` is not looked at: a lost peer ends the wait."""
        if self._receive is not None:
            self._receive_up_to(self)
        return self._raise()

    def is_completed(self) -> bool:
        """True when it was received; asking does not receive."""
        return self._receive is None

    def source_rank(self) -> int:
        """Group rank of the sender."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Receive and give a completed future."""
        if self._receive is not None:
            self._receive_up_to(self)
        return super().get_future()


class JoinedWork(ElasticWork):
    """Several operations as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__([])
        self._works = tuple(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all, in order."""
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        """True when all are."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """True when all are."""
        return all(work.is_success() for work in self._works)

    def get_future(self) -> Future[Any]:
        """Wait for all and give a completed future."""
        self.wait()
        return super().get_future()
