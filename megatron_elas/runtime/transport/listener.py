"""The thread that accepts connections and has them prove that they belong to the job."""

from __future__ import annotations

import errno
import logging
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Callable

from megatron_elas.runtime.transport.dial import listen_on, tune
from megatron_elas.runtime.transport.handshake import (
    ANSWER_BYTES,
    HELLO_BYTES,
    Hello,
    NotAMember,
    check_answer,
    make_challenge,
    parse_hello,
)

logger = logging.getLogger(__name__)

HELLO_LIMIT_S = 10.0
"""A connection that has not proven itself by then is closed."""

MAX_STRANGERS = 1024
"""Unproven connections at one time, or a quarter of the files that the process may open if that is less."""

PATIENCE_S = 1.0
"""While there are as many as allowed, no further one is accepted until the oldest is that old; then that one goes."""

_REFUSALS_EVERY_S = 1.0
"""Refusals are logged one by one when they are rarer, else counted."""

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class _Stranger:
    """A connection that has not proven itself: reading its hello, then its answer to our challenge."""

    __slots__ = ("accepted_s", "challenge", "hello", "received", "socket")

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.accepted_s = time.monotonic()
        self.received = b""
        self.hello = b""
        self.challenge = b""

    def advance(self, key: bytes, worker: int) -> Hello | None:
        """Read and answer what has arrived. Gives the hello when the stranger has proven itself.

        Raises:
            NotAMember: It has not, or wants another worker.
            OSError: It is gone.
        """
        while True:
            data = self._read(ANSWER_BYTES if self.hello else HELLO_BYTES)
            if data is None:
                return None
            if self.hello:
                check_answer(key, self.hello, self.challenge, data)
                return parse_hello(self.hello)
            hello = parse_hello(data)
            if hello.peer != worker or hello.worker == worker:
                raise NotAMember(f"its hello is from worker {hello.worker} to worker {hello.peer}")
            self.hello = data
            self.challenge = make_challenge(key, data)
            if self.socket.send(self.challenge) != len(self.challenge):
                raise OSError(errno.ENOBUFS, "it does not read")

    def _read(self, size: int) -> bytes | None:
        """``size`` bytes when they are all there, and not one more: frames may follow."""
        try:
            data = self.socket.recv(size - len(self.received))
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "it closed before it had proven itself")
        self.received += data
        if len(self.received) < size:
            return None
        whole, self.received = self.received, b""
        return whole


class Listener:
    """Accepts links. A stranger is closed and logged; it cannot stop the others."""

    def __init__(
        self,
        address: str,
        key: bytes,
        worker: int,
        on_member: Callable[[Hello, socket.socket], None],
        name: str,
        max_strangers: int = MAX_STRANGERS,
    ) -> None:
        """Listen and start the thread.

        Args:
            address: See ``dial.parse_address``.
            key: See ``handshake.make_key``.
            worker: Own worker id.
            on_member: Called on the thread; owns the socket from then on.
            name: Of the thread.
            max_strangers: See ``MAX_STRANGERS``.

        Raises:
            ValueError, OSError: See ``dial.listen_on``.
        """
        self._key = key
        self._worker = worker
        self._on_member = on_member
        may_open, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_strangers = max(1, min(max_strangers, may_open // 4))
        self._socket, self.address = listen_on(address)
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._strangers: dict[int, _Stranger] = {}
        """By descriptor, oldest first."""
        self._poller = select.poll()
        self._accepting = False
        self._pause_until_s = 0.0
        self._logged_s = 0.0
        self._unlogged = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, close the listener and unproven connections, remove the socket file."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        for stranger in self._strangers.values():
            stranger.socket.close()
        self._strangers.clear()
        self._socket.close()
        os.close(self._stop)
        if self.address.startswith("unix:"):
            os.unlink(self.address[len("unix:") :])

    def _run(self) -> None:
        self._poller.register(self._stop, select.POLLIN)
        while True:
            self._make_room()
            ready = [fd for fd, _ in self._poller.poll(self._next_ms())]
            if self._stop in ready:
                return
            for fd in ready:
                if fd == self._socket.fileno():
                    self._accept()
                elif fd in self._strangers:
                    self._advance(fd)

    def _make_room(self) -> None:
        """Close who has had its time; accept further ones only where there is room for them."""
        now = time.monotonic()
        while self._strangers:
            fd, oldest = next(iter(self._strangers.items()))
            age_s = now - oldest.accepted_s
            if age_s >= HELLO_LIMIT_S:
                self._refuse(fd, f"it has not proven itself within {HELLO_LIMIT_S:g} s")
            elif age_s >= PATIENCE_S and len(self._strangers) >= self._max_strangers:
                self._refuse(fd, "too many unproven connections")
            else:
                break
        accept = len(self._strangers) < self._max_strangers and now >= self._pause_until_s
        if accept and not self._accepting:
            self._poller.register(self._socket, select.POLLIN)
        elif self._accepting and not accept:
            self._poller.unregister(self._socket)
        self._accepting = accept

    def _next_ms(self) -> int | None:
        """Until ``_make_room`` has something to do."""
        limits = [] if self._accepting else [self._pause_until_s]
        if self._strangers:
            oldest = next(iter(self._strangers.values()))
            full = len(self._strangers) >= self._max_strangers
            limits = [oldest.accepted_s + (PATIENCE_S if full else HELLO_LIMIT_S)] + ([] if full else limits)
        if not limits:
            return None
        return max(0, int((min(limits) - time.monotonic()) * 1e3) + 1)

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno not in _NO_ROOM:  # it is gone again already
                return
            logger.warning("could not accept a connection to %s: %s", self.address, error)
            if self._strangers:
                self._refuse(next(iter(self._strangers)), "its descriptor is needed")
            else:
                self._pause_until_s = time.monotonic() + PATIENCE_S
            return
        sock.setblocking(False)
        fd = sock.fileno()
        self._strangers[fd] = _Stranger(sock)
        self._poller.register(fd, select.POLLIN)
        self._advance(fd)  # the hello usually is there with the connection

    def _advance(self, fd: int) -> None:
        stranger = self._strangers[fd]
        try:
            hello = stranger.advance(self._key, self._worker)
            if hello is None:
                return
            tune(stranger.socket)
        except (NotAMember, OSError) as error:
            why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            self._refuse(fd, why, left=isinstance(error, ConnectionError))
            return
        del self._strangers[fd]
        self._poller.unregister(fd)
        try:
            self._on_member(hello, stranger.socket)
        except Exception:  # the others are to be heard
            logger.exception("could not make a link of a connection from worker %d", hello.worker)
            stranger.socket.close()

    def _refuse(self, fd: int, why: str, *, left: bool = False) -> None:
        """Close a connection; ``left``: it has gone by itself, as a member does that needs the link no more."""
        sock = self._strangers.pop(fd).socket
        self._poller.unregister(fd)
        sock.close()
        if left:
            logger.debug("a connection to %s ended early: %s", self.address, why)
            return
        now = time.monotonic()
        self._unlogged += 1
        if now - self._logged_s < _REFUSALS_EVERY_S:
            return
        more = f", and {self._unlogged - 1} more since the last such line" if self._unlogged > 1 else ""
        logger.warning("refused a connection to %s: %s%s", self.address, why, more)
        self._logged_s, self._unlogged = now, 0
