"""Both ends of a control connection prove that they know the token, which never crosses the wire."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.sync.server import serve as serve_sync

from megatron_elas.control.messages import StatusRequest, encode
from megatron_elas.control.wire import (
    MAX_STRANGER_BYTES,
    NONCE_HEADER,
    OPTIONS,
    PROOF_HEADER,
    Gate,
    control_key,
    dial,
    dial_async,
)
from megatron_elas.proof import NONCE_BYTES, NotAMember, make_nonce, prove
from tests.control.served import TOKEN, WAIT_S, Served, serving

NONCE = bytes(NONCE_BYTES)


@contextlib.contextmanager
def half_open(served: Served, nonce: bytes = NONCE) -> Iterator[tuple[ClientConnection, bytes, str]]:
    """A connection whose client has proven nothing yet; the controller's nonce and proof."""
    with connect(served.address, additional_headers={NONCE_HEADER: nonce.hex()}, proxy=None) as connection:
        assert connection.response is not None
        headers = connection.response.headers
        yield connection, bytes.fromhex(headers[NONCE_HEADER]), headers[PROOF_HEADER]


def wait_closed(connection: ClientConnection) -> tuple[int | None, list[str | bytes]]:
    """The close code, and what was said before."""
    said: list[str | bytes] = []
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            said.append(connection.recv(timeout=WAIT_S))
    return (closed.value.sent or closed.value.rcvd).code if closed.value.sent or closed.value.rcvd else None, said


def test_the_controller_proves_itself_first_and_anew_each_time() -> None:
    key = control_key(TOKEN)
    with serving(2) as served, half_open(served) as (_, one, first), half_open(served) as (_, two, second):
        assert first == prove(key, b"controller", NONCE, one).hex()
        assert second == prove(key, b"controller", NONCE, two).hex()
        assert one != two


@pytest.mark.parametrize("how", ["nothing", "own proof", "wrong token", "other nonce", "not a proof", "a message"])
def test_a_client_that_does_not_prove_itself_is_refused(how: str, caplog: pytest.LogCaptureFixture) -> None:
    with serving(2) as served, half_open(served) as (connection, theirs, proof):
        answers = {
            "nothing": "",
            "own proof": proof,
            "wrong token": prove(control_key("other"), b"client", NONCE, theirs).hex(),
            "other nonce": prove(control_key(TOKEN), b"client", NONCE, make_nonce()).hex(),
            "not a proof": "xyz",
            "a message": encode(StatusRequest()),
        }
        connection.send(answers[how])
        assert wait_closed(connection) == (1008, [])
    assert "refused a client" in caplog.text


def test_a_recorded_proof_opens_nothing() -> None:
    with serving(2) as served:
        with half_open(served) as (connection, theirs, _):
            proof = prove(control_key(TOKEN), b"client", NONCE, theirs).hex()
            connection.send(proof)
            assert connection.recv(timeout=WAIT_S) == "admitted"
        with half_open(served) as (connection, _, _):
            connection.send(proof)
            assert wait_closed(connection) == (1008, [])


def test_a_client_without_a_nonce_is_refused_before_anything_is_said() -> None:
    with serving(2) as served:
        for headers in ({}, {NONCE_HEADER: "00"}, {NONCE_HEADER: "zz" * NONCE_BYTES}):
            with pytest.raises(InvalidStatus) as refused:
                connect(served.address, additional_headers=headers, proxy=None)
            assert refused.value.response.status_code == 401


def test_little_is_read_of_a_stranger() -> None:
    with serving(2) as served, half_open(served) as (connection, _, _):
        connection.send("x" * (MAX_STRANGER_BYTES + 1))
        code, said = wait_closed(connection)
        assert (code, said) == (1009, []), "message too big"


def test_who_is_admitted_may_send_long_messages() -> None:
    with serving(2) as served, dial(served.address, TOKEN) as connection:
        connection.send('{"type":"StatusRequest","padding":"' + "x" * (1 << 20) + '"}')
        assert "gathering" in str(connection.recv(timeout=WAIT_S))


def test_a_controller_that_does_not_know_the_token_is_found_out_before_the_client_proves_anything() -> None:
    got: list[str | bytes] = []

    def listen(connection) -> None:
        with contextlib.suppress(ConnectionClosed):
            got.append(connection.recv())

    with serve_sync(listen, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            port = server.socket.getsockname()[1]
            with pytest.raises(NotAMember):
                dial(f"ws://127.0.0.1:{port}", TOKEN)
            with pytest.raises(NotAMember):
                asyncio.run(dial_async(f"ws://127.0.0.1:{port}", TOKEN))
        finally:
            server.shutdown()
            thread.join()
    assert got == []


def test_a_controller_of_another_job_hears_no_proof() -> None:
    heard: list[str | bytes] = []

    async def run() -> None:
        async def converse(connection: ServerConnection) -> None:
            with contextlib.suppress(ConnectionClosed):
                heard.append(await connection.recv())

        gate = Gate("another")
        async with serve(converse, "127.0.0.1", 0, process_response=gate.greet, **OPTIONS) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            with pytest.raises(NotAMember):
                await dial_async(f"ws://127.0.0.1:{port}", TOKEN)

    asyncio.run(run())
    assert heard == []


def test_the_token_does_not_cross_the_wire() -> None:
    """Everything between a client and its controller, through a relay that keeps it."""
    token = "a token that is easy to find"

    async def run() -> bytes:
        gate, seen = Gate(token), bytearray()

        async def converse(connection: ServerConnection) -> None:
            await gate.admit(connection)
            await connection.send(str(await connection.recv()))

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1 << 16):
                seen.extend(data)
                writer.write(data)
            writer.close()

        async with serve(converse, "127.0.0.1", 0, process_response=gate.greet, **OPTIONS) as server:
            port = next(iter(server.sockets)).getsockname()[1]

            async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                there, back = await asyncio.open_connection("127.0.0.1", port)
                await asyncio.gather(pump(reader, back), pump(there, writer))

            async with await asyncio.start_server(relay, "127.0.0.1", 0) as relaying:
                address = relaying.sockets[0].getsockname()
                connection = await dial_async(f"ws://127.0.0.1:{address[1]}", token)
                await connection.send("hello")
                assert await connection.recv() == "hello"
                await connection.close()
        return bytes(seen)

    seen = asyncio.run(run())
    assert b"Upgrade: websocket" in seen and PROOF_HEADER.encode() in seen
    assert token.encode() not in seen and control_key(token).hex().encode() not in seen


def test_a_port_that_says_nothing_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIONS, "open_timeout", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        dial(f"ws://127.0.0.1:{silent.getsockname()[1]}", TOKEN)
