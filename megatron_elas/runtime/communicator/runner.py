"""The thread that runs a group's asynchronous operations, in the order they were asked for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from megatron_elas.runtime.communicator.work import QueuedWork


class Runner:
    """One first-in-first-out thread, started with the first operation."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._queue: deque[tuple[Callable[[], None], QueuedWork]] = deque()
        self._in_flight = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def busy(self) -> bool:
        """True while an operation is queued or runs."""
        return self._in_flight > 0

    def submit(self, operation: Callable[[], None], result: Any) -> QueuedWork:
        """Run ``operation`` after those submitted before."""
        work = QueuedWork(result)
        with self._changed:
            if self._closed:
                raise RuntimeError(f"{self._name} was shut down; no further operation can run")
            self._in_flight += 1
            self._queue.append((operation, work))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return work

    def drain(self) -> None:
        """Wait until nothing is queued and nothing runs."""
        with self._changed:
            while self._in_flight:
                self._changed.wait()

    def close(self) -> None:
        """End the thread after what is queued."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._closed:
                        return
                    self._changed.wait()
                operation, work = self._queue.popleft()
            error: BaseException | None = None
            try:
                operation()
            except BaseException as raised:  # surfaces in wait(), on the caller's thread
                error = raised.with_traceback(None)
            work.finish(error)
            del operation, work, error
            with self._changed:
                self._in_flight -= 1
                self._changed.notify_all()
