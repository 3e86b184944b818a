"""The thread that accepts connections and reads their hello."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from megatron_elas.runtime.transport.dial import listen_on, tune
from megatron_elas.runtime.transport.frame import HELLO_BYTES, Hello, parse_hello

logger = logging.getLogger(__name__)

HELLO_LIMIT_S = 10.0
"""A connection that has not sent its whole hello by then is closed."""

MAX_STRANGERS = 1024
"""Connections without a whole hello at one time; when more come, the oldest is closed."""


class Listener:
    """Accepts links. A stranger (wrong token, no hello) is closed and logged; it cannot stop the others."""

    def __init__(
        self, address: str, digest: bytes, on_hello: Callable[[Hello, socket.socket], None], name: str
    ) -> None:
        """Listen and start the thread.

        Args:
            address: See ``dial.parse_address``.
            digest: Of the job token.
            on_hello: Called on the thread; owns the socket from then on.
            name: Of the thread.

        Raises:
            ValueError, OSError: See ``dial.listen_on``.
        """
        self._digest = digest
        self._on_hello = on_hello
        self._socket, self.address = listen_on(address)
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._strangers: dict[int, tuple[socket.socket, bytes, float]] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, close the listener and unfinished connections, remove the socket file."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        for stranger, _, _ in self._strangers.values():
            stranger.close()
        self._socket.close()
        os.close(self._stop)
        if self.address.startswith("unix:"):
            os.unlink(self.address[len("unix:") :])

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._stop, select.POLLIN)
        poller.register(self._socket, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poller.poll(self._next_limit_ms())]
            if self._stop in ready:
                return
            for fd in ready:
                if fd == self._socket.fileno():
                    self._accept(poller)
                elif fd in self._strangers:
                    self._read(fd, poller)
            now = time.monotonic()
            for fd in [fd for fd, (_, _, limit) in self._strangers.items() if limit <= now]:
                self._refuse(fd, poller, f"no whole hello within {HELLO_LIMIT_S:g} s")

    def _next_limit_ms(self) -> int | None:
        if not self._strangers:
            return None
        first = min(limit for _, _, limit in self._strangers.values())
        return max(0, int((first - time.monotonic()) * 1e3) + 1)

    def _accept(self, poller: select.poll) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError as error:  # gone again already, or out of descriptors
            logger.warning("could not accept a connection: %s", error)
            return
        sock.setblocking(False)
        if len(self._strangers) >= MAX_STRANGERS:
            self._refuse(next(iter(self._strangers)), poller, "too many unfinished connections")
        self._strangers[sock.fileno()] = (sock, b"", time.monotonic() + HELLO_LIMIT_S)
        poller.register(sock, select.POLLIN)
        self._read(sock.fileno(), poller)  # the hello usually is there with the connection

    def _read(self, fd: int, poller: select.poll) -> None:
        sock, have, limit = self._strangers[fd]
        try:
            data = sock.recv(HELLO_BYTES - len(have))
        except BlockingIOError:
            return
        except OSError as error:
            self._refuse(fd, poller, str(error))
            return
        if not data:
            self._refuse(fd, poller, "it closed before its hello")
            return
        have += data
        if len(have) < HELLO_BYTES:
            self._strangers[fd] = (sock, have, limit)
            return
        try:
            hello = parse_hello(have, self._digest)
        except ValueError as error:
            self._refuse(fd, poller, str(error))
            return
        del self._strangers[fd]
        poller.unregister(fd)
        tune(sock)
        self._on_hello(hello, sock)

    def _refuse(self, fd: int, poller: select.poll, why: str) -> None:
        sock, _, _ = self._strangers.pop(fd)
        poller.unregister(fd)
        sock.close()
        logger.warning("refused a connection to %s: %s", self.address, why)
