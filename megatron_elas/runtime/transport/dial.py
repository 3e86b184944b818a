"""Addresses of the data plane, listening on one and dialling one.

An address is ``unix:/path/to/socket`` or ``tcp:host:port``. Peers on one host should use unix sockets: they are
faster and need no open port.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from typing import NamedTuple

UNIX_PATH_BYTES = 107
"""Longest path of a unix socket on Linux."""

_RETRY_MS = 5


class Endpoint(NamedTuple):
    """A parsed address, as ``socket`` wants it."""

    family: socket.AddressFamily
    where: str | tuple[str, int]


class DialStopped(Exception):
    """The wake descriptor became readable before the connection stood."""


def parse_address(address: str) -> Endpoint:
    """Read ``unix:/path`` or ``tcp:host:port``.

    Raises:
        ValueError: It is neither, or the path is too long.
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
    if scheme == "tcp" and host and port.isdigit():
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return Endpoint(family, (host.strip("[]"), int(port)))
    raise ValueError(f"address must be unix:/path or tcp:host:port, got {address!r}")


def listen_on(address: str) -> tuple[socket.socket, str]:
    """Open a listener; give it and the address that peers dial (port 0 replaced by the real one).

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
        listener.listen(1024)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    if family == socket.AF_UNIX:
        os.chmod(str(where), 0o600)
        return listener, address
    host = address[len("tcp:") :].rpartition(":")[0]
    return listener, f"tcp:{host}:{listener.getsockname()[1]}"


def dial(address: str, wake_fd: int) -> socket.socket:
    """Connect and give a non-blocking socket. Ends early when ``wake_fd`` becomes readable.

    Raises:
        DialStopped: ``wake_fd`` became readable.
        OSError: Refused, unreachable, or no such socket file.
    """
    family, where = parse_address(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        while (code := sock.connect_ex(where)) not in (0, errno.EISCONN):
            if code not in (errno.EINPROGRESS, errno.EALREADY, errno.EAGAIN):
                raise OSError(code, os.strerror(code))
            poller = select.poll()
            poller.register(wake_fd, select.POLLIN)
            if code == errno.EAGAIN:  # the listener's backlog is full (unix sockets); nothing tells when it is not
                ready = poller.poll(_RETRY_MS)
            else:
                poller.register(sock, select.POLLOUT)
                ready = poller.poll()
            if any(fd == wake_fd for fd, _ in ready):
                raise DialStopped
            if ready and (code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                raise OSError(code, os.strerror(code))
        tune(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def tune(sock: socket.socket) -> None:
    """Options of a link's socket: non-blocking, no delay, a send buffer as large as the system allows."""
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
