"""Addresses of the data plane, listening on one, and one attempt to link with a peer.

An address is ``unix:/path/to/socket`` or ``tcp:host:port``. Peers on one host should use unix sockets: they are
faster and need no open port.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from typing import NamedTuple

from megatron_elas.runtime.transport.handshake import (
    CHALLENGE_BYTES,
    Hello,
    HelloKind,
    NotAMember,
    Verdict,
    answer_challenge,
    pack_hello,
)

UNIX_PATH_BYTES = 107
"""Longest path of a unix socket on Linux."""

VANISHED_S = 120
"""A TCP link breaks when its peer's host has acknowledged nothing for that long, idle or not.

The second line only: heartbeats to the controller notice a vanished host within ten seconds. Not shorter, because Linux
counts the time in which a living peer does not read what it was sent just the same.
"""

_PROBE_AFTER_S = 30
_PROBE_EVERY_S = 15
_RETRY_S = 0.005


class Endpoint(NamedTuple):
    """A parsed address, as ``socket`` wants it."""

    family: socket.AddressFamily
    where: str | tuple[str, int]


def parse_address(address: str) -> Endpoint:
    """Read ``unix:/path``, ``tcp:host:port`` or ``tcp:[IPv6 address]:port``.

    Raises:
        ValueError: It is none of them, or the path is too long.
    """
    scheme, _, rest = address.partition(":")
    if scheme == "unix" and rest:
        if len(os.fsencode(rest)) > UNIX_PATH_BYTES:
            raise ValueError(
                f"unix socket path has {len(os.fsencode(rest))} bytes, at most {UNIX_PATH_BYTES} are possible: {rest}; "
                "use a shorter run directory, for example under /tmp"
            )
        return Endpoint(socket.AF_UNIX, rest)
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host and port.isascii() and port.isdigit() and int(port) < 1 << 16:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return Endpoint(family, (host.strip("[]"), int(port)))
    raise ValueError(f"address must be unix:/path or tcp:host:port, got {address!r}")


def listen_on(address: str) -> tuple[socket.socket, str]:
    """Open a listener; give it and the address that peers dial: numeric, port 0 replaced by the real one.

    The host of a TCP address is what peers dial, so ``0.0.0.0`` is refused.

    Raises:
        ValueError: See ``parse_address``; or the host is a wildcard.
        OSError: The address is taken or not ours.
    """
    family, where = parse_address(address)
    if where[0] in ("0.0.0.0", "::"):
        raise ValueError(f"{address} cannot be dialled by peers: name the interface's own address or host name")
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        if family == socket.AF_UNIX:
            os.chmod(str(where), 0o600)
        listener.listen(1024)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    if family == socket.AF_UNIX:
        return listener, address
    host, port = listener.getsockname()[:2]
    return listener, f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"


def tune(sock: socket.socket) -> None:
    """Options of a link's socket: no delay, a large send buffer, a limit for hosts that vanish."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, VANISHED_S * 1000)


class Dial:
    """One attempt: connect, hello, challenge, answer and, for an offer, the verdict. Never blocks.

    States: connecting -> asking (hello sent) -> judged (offer: answer sent) -> over. ``advance`` moves on.
    """

    def __init__(self, address: str, hello: Hello, key: bytes) -> None:
        """Prepare; ``advance`` begins.

        Raises:
            ValueError: See ``parse_address``.
            OSError: No socket could be made.
        """
        endpoint = parse_address(address)
        self._where = endpoint.where
        self.address = address
        self.hello = hello
        self.begun = False
        self.started_s = time.monotonic()
        self.connected_s: float | None = None
        """When the peer's host had accepted the connection."""
        self._key = key
        self._packed = pack_hello(hello)
        self._received = b""
        self._answered = False
        self.retry_s: float | None = None
        """When to call ``advance`` although nothing is ready (the listener's queue was full)."""
        self.socket = socket.socket(endpoint.family, socket.SOCK_STREAM)
        self.socket.setblocking(False)

    @property
    def events(self) -> int:
        """What to poll the socket for; 0 while only time helps."""
        if self.retry_s is not None:
            return 0
        return select.POLLOUT if self.connected_s is None else select.POLLIN

    def advance(self) -> Verdict | None:
        """Go on as far as possible.

        Returns:
            None when it has to wait; else what has become of the attempt.

        Raises:
            OSError: Refused, unreachable, no such socket file, closed.
            NotAMember: The other side does not know the token.
        """
        self.begun = True
        if self.connected_s is None:
            if not self._connect():
                return None
            self.connected_s = time.monotonic()
            self._send(self._packed)
        if not self._answered:
            if not self._receive(CHALLENGE_BYTES):
                return None
            self._send(answer_challenge(self._key, self._packed, self._received))
            self._answered = True
            self._received = b""
            if self.hello.kind is HelloKind.LINK:
                tune(self.socket)
                return Verdict.TAKEN
        if not self._receive(1):
            return None
        if self._received[0] not in tuple(Verdict):
            raise NotAMember("its verdict is none")
        tune(self.socket)
        return Verdict(self._received[0])

    def close(self) -> None:
        """Give up."""
        self.socket.close()

    def _connect(self) -> bool:
        self.retry_s = None
        code = self.socket.connect_ex(self._where)
        if code in (0, errno.EISCONN):
            return True
        if code == errno.EAGAIN:  # the listener's queue is full (unix sockets); nothing tells when it is not
            self.retry_s = time.monotonic() + _RETRY_S
        elif code not in (errno.EINPROGRESS, errno.EALREADY):
            raise OSError(code, os.strerror(code))
        return False

    def _send(self, data: bytes) -> None:
        if self.socket.send(data) != len(data):  # the socket is new, so there is room for a few bytes
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    def _receive(self, size: int) -> bool:
        """Read up to ``size`` bytes in all, and not one more: frames may follow."""
        try:
            data = self.socket.recv(size - len(self._received))
        except BlockingIOError:
            return False
        if not data:
            raise OSError(errno.ECONNRESET, "it closed the connection; has it another token, or counts us as lost?")
        self._received += data
        return len(self._received) == size
