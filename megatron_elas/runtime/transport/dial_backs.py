"""The threads that dial back peers that knocked.

Not the listener's thread: when the host of a peer loses its power right after the knock, TCP tries to reach it for
minutes, in which all others would wait for their links. There is at most one thread per (peer, channel), and it ends
with its dial.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class DialBacks:
    """Starts the threads, and ends them in ``close``."""

    def __init__(self, name: str, dial_back: Callable[[int, int], None]) -> None:
        """Prepare; no thread runs yet.

        Args:
            name: Of the threads.
            dial_back: Called with peer and channel, on a thread of its own. Must return soon once ``stop_fd`` is
                readable.
        """
        self._name = name
        self._dial_back = dial_back
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._threads: dict[tuple[int, int], threading.Thread] = {}
        self._again: set[tuple[int, int]] = set()
        """Asked for while their thread was at work: it may just have failed, so it tries once more."""
        self._closed = False

    @property
    def stop_fd(self) -> int:
        """Readable from ``close`` on."""
        return self._stop

    def ask(self, peer: int, channel: int) -> None:
        """Have the peer dialled; returns at once."""
        key = (peer, channel)
        with self._lock:
            if self._closed:
                return
            if key in self._threads:
                self._again.add(key)
                return
            thread = threading.Thread(target=self._run, args=key, name=self._name, daemon=True)
            self._threads[key] = thread
            thread.start()

    def close(self) -> None:
        """End all threads. ``ask`` does nothing from now on."""
        with self._lock:
            self._closed = True
            threads = list(self._threads.values())
            os.eventfd_write(self._stop, 1)
        for thread in threads:
            thread.join()
        os.close(self._stop)

    def _run(self, peer: int, channel: int) -> None:
        key = (peer, channel)
        while True:
            try:
                self._dial_back(peer, channel)
            finally:
                with self._lock:
                    again = key in self._again and not self._closed
                    self._again.discard(key)
                    if not again:
                        del self._threads[key]
            if not again:
                return
