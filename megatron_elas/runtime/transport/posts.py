"""The thread that sends what a post could not send at once."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

from megatron_elas.runtime.transport.link import Link
from megatron_elas.spec.errors import PeerLost


class PostSender:
    """Pumps links with queued posts whenever their sockets are writable. The thread starts with the first one."""

    def __init__(self, name: str, on_lost: Callable[[PeerLost], None]) -> None:
        """``on_lost`` is called on the thread when a link breaks."""
        self._name = name
        self._on_lost = on_lost
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._links: dict[int, Link] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, link: Link) -> None:
        """Send what is queued on ``link``, from now on."""
        with self._lock:
            if self._closed:
                return
            self._links[link.fd] = link
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the thread; what is queued stays queued."""
        with self._lock:
            self._closed = True
            thread = self._thread
            os.eventfd_write(self._wake, 1)
        if thread is not None:
            thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                links = dict(self._links)
            poller = select.poll()
            poller.register(self._wake, select.POLLIN)
            for fd in links:
                poller.register(fd, select.POLLOUT)
            for fd, _ in poller.poll():
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                elif self._pumped(links[fd]):
                    self._drop(links[fd])

    def _pumped(self, link: Link) -> bool:
        try:
            return link.pump()
        except PeerLost as lost:
            self._on_lost(lost)
            return True

    def _drop(self, link: Link) -> None:
        with self._lock:
            # a post may have queued more since it was pumped; its watch() waits for this lock or came before it
            if self._links.get(link.fd) is link and link.idle():
                del self._links[link.fd]
