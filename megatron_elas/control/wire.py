"""Control connections: their settings, and how both ends prove that they know the job's token.

The opening handshake of a WebSocket carries the nonces, hexadecimal: the client's in a header of the request, the
controller's nonce and proof in headers of the answer. The client checks the proof and sends its own as its first
message; nothing else is read of it before, nor more than a few bytes. The controller answers with ``ADMITTED``.

====================================== ==============================================================================
controller's proof                     HMAC-SHA256(key, "controller" + client's nonce + controller's nonce)
client's proof                         HMAC-SHA256(key, "client" + client's nonce + controller's nonce)
====================================== ==============================================================================
"""

from __future__ import annotations

import asyncio
import http
import socket
import weakref
from typing import TypedDict

from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.asyncio.client import connect as connect_async
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.client import ClientConnection, connect

from megatron_elas.control.messages import MAX_MESSAGE_BYTES
from megatron_elas.proof import NONCE_BYTES, PROOF_BYTES, NotAMember, check_proof, make_key, make_nonce, prove

OPEN_TIMEOUT_S = 10.0
"""For connecting, for the proof of a client, and for its first message."""

KEEPALIVE_S = 5
"""An idle connection is probed this often."""
KEEPALIVE_PROBES = 3
"""The connection ends when so many in a row are not answered."""

BACKLOG = 4096
"""Connections that wait to be accepted, also while there is no controller."""

PROTOCOL_VIOLATION = 1008
"""WebSocket close code: policy violation. Who gets it need not come back."""

NONCE_HEADER = "Elas-Nonce"
PROOF_HEADER = "Elas-Proof"
ADMITTED = "admitted"
MAX_STRANGER_BYTES = 4096
"""Of the first message of a client, which has not proven itself yet."""


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


def control_key(token: str) -> bytes:
    """The secret that proofs for control connections are made with."""
    return make_key(token, b"megatron_elas control")


# ---------------------------------------------------------------- client


def dial(address: str, token: str) -> ClientConnection:
    """A connection to the controller, both ends of which have proven themselves.

    Args:
        address: ``ws://host:port``.
        token: Shared secret of the job.

    Raises:
        InvalidURI: The address is none.
        NotAMember: The controller does not know the token, or this process does not know that of its job.
        OSError, InvalidHandshake: Nobody answers, or not in time, or something else does.
    """
    nonce = make_nonce()
    # proxy: an HTTP proxy of the environment must not see what stays inside the cluster.
    connection = connect(address, additional_headers={NONCE_HEADER: nonce.hex()}, proxy=None, **OPTIONS)
    try:
        connection.send(_answer(connection.response, control_key(token), nonce))
        connection.recv(timeout=OPEN_TIMEOUT_S)
    except ConnectionClosed as error:
        raise ConnectionResetError(f"it hung up while shaking hands: {error}") from error
    except BaseException:
        connection.close()
        raise
    detect_dead_peers(connection.socket)
    return connection


async def dial_async(address: str, token: str) -> AsyncConnection:
    """``dial``, on the running event loop."""
    nonce = make_nonce()
    connection = await connect_async(address, additional_headers={NONCE_HEADER: nonce.hex()}, proxy=None, **OPTIONS)
    try:
        await connection.send(_answer(connection.response, control_key(token), nonce))
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            await connection.recv()
    except ConnectionClosed as error:
        raise ConnectionResetError(f"it hung up while shaking hands: {error}") from error
    except BaseException:
        await connection.close()
        raise
    detect_dead_peers(connection.transport.get_extra_info("socket"))
    return connection


def _answer(response: Response | None, key: bytes, nonce: bytes) -> str:
    """This client's proof. Raises NotAMember when the controller's is wrong."""
    headers = dict(response.headers.raw_items()) if response is not None else {}
    theirs = _read(headers.get(NONCE_HEADER, ""), NONCE_BYTES)
    check_proof(_read(headers.get(PROOF_HEADER, ""), PROOF_BYTES), key, b"controller", nonce, theirs)
    return prove(key, b"client", nonce, theirs).hex()


# ---------------------------------------------------------------- controller


class Gate:
    """The controller's side, for all its connections."""

    def __init__(self, token: str) -> None:
        self._key = control_key(token)
        # Weak: a client may leave between the two calls.
        self._nonces: weakref.WeakKeyDictionary[ServerConnection, tuple[bytes, bytes]] = weakref.WeakKeyDictionary()

    def greet(self, connection: ServerConnection, request: Request, response: Response) -> Response | None:
        """Put the proof into the answer to a client's request; ``process_response`` of ``websockets``."""
        try:
            theirs = _read(dict(request.headers.raw_items()).get(NONCE_HEADER, ""), NONCE_BYTES)
        except NotAMember:
            return connection.respond(http.HTTPStatus.UNAUTHORIZED, f"no {NONCE_HEADER}\n")
        own = make_nonce()
        response.headers[NONCE_HEADER] = own.hex()
        response.headers[PROOF_HEADER] = prove(self._key, b"controller", theirs, own).hex()
        self._nonces[connection] = theirs, own
        _limit_messages(connection, MAX_STRANGER_BYTES)
        return None

    async def admit(self, connection: ServerConnection) -> None:
        """Read the client's proof, its first message.

        Raises:
            NotAMember: It is wrong.
            ConnectionClosed: The client left, or sent too much.
        """
        theirs, own = self._nonces.pop(connection)
        proof = await connection.recv()
        check_proof(_read(proof if isinstance(proof, str) else "", PROOF_BYTES), self._key, b"client", theirs, own)
        _limit_messages(connection, MAX_MESSAGE_BYTES)
        await connection.send(ADMITTED)


def _read(text: str, num_bytes: int) -> bytes:
    """A nonce or proof. Raises NotAMember when it is none."""
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    if len(data) != num_bytes:
        raise NotAMember(f"it sent no {num_bytes} bytes in hexadecimal")
    return data


def _limit_messages(connection: ServerConnection, max_bytes: int) -> None:
    # Its name since websockets 15.1, and before.
    for name in ("max_message_size", "max_size"):
        if hasattr(connection.protocol, name):
            setattr(connection.protocol, name, max_bytes)
            return
    raise AttributeError("this version of websockets has no limit for messages of one connection")
