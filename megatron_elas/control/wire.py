"""Settings that both ends of a control connection share."""

from __future__ import annotations

import hmac
import socket
from collections.abc import Mapping
from typing import TypedDict

from megatron_elas.control.messages import MAX_MESSAGE_BYTES

OPEN_TIMEOUT_S = 10.0
"""For connecting and for a client's first message."""

KEEPALIVE_S = 5
"""An idle connection is probed this often."""
KEEPALIVE_PROBES = 3
"""The connection ends when so many in a row are not answered."""

AUTHORIZATION = "Authorization"


class ConnectionOptions(TypedDict):
    """Keyword arguments of ``websockets``, the same for client and server."""

    compression: None
    max_size: int
    open_timeout: float
    ping_interval: None
    close_timeout: float


OPTIONS = ConnectionOptions(
    compression=None,
    max_size=MAX_MESSAGE_BYTES,
    open_timeout=OPEN_TIMEOUT_S,
    # Heartbeats are messages of their own; pings would end links of workers that are stopped and wanted back.
    ping_interval=None,
    close_timeout=1.0,
)


def detect_dead_peers(connection: socket.socket) -> None:
    """Have the kernel end an idle connection when the other host, or the way to it, is gone.

    The controller's end of a worker's link is idle most of the time, so it ends there though the worker's, which has
    heartbeats on the way, takes minutes. The kernel answers for a process that is stopped, whose link stays therefore;
    with TCP_USER_TIMEOUT it would not when its buffer is full. Nothing happens to connections that are not TCP.
    """
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def make_headers(token: str) -> dict[str, str]:
    """What a client sends to prove that it belongs to the job."""
    return {AUTHORIZATION: f"Bearer {token}"}


def is_authorized(headers: Mapping[str, str], token: str) -> bool:
    """Whether the client knows the token. Takes the same time whatever it sent."""
    given = headers.get(AUTHORIZATION, "")
    return hmac.compare_digest(given.encode(), f"Bearer {token}".encode())
