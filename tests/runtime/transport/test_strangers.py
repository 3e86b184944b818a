"""Who may connect: members only, and whatever others send, members can link all the while."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_elas.runtime.transport import listener
from megatron_elas.runtime.transport.base import Part
from megatron_elas.runtime.transport.dial import Dial
from megatron_elas.runtime.transport.frame import HEADER, MAGIC
from megatron_elas.runtime.transport.handshake import (
    CHALLENGE_BYTES,
    Hello,
    HelloKind,
    Verdict,
    answer_challenge,
    make_key,
    pack_hello,
)
from megatron_elas.runtime.transport.sockets import SocketTransport
from megatron_elas.spec.errors import EpochChanged, PeerLost
from tests.runtime.transport.test_sockets import CHANNEL, check_works
from tests.runtime.transport.together import data, next_epoch, room, transports
from tests.runtime.workers import wait_until

KEY = make_key("secret")
SEEDS = range(40)


def connect(transport: SocketTransport) -> socket.socket:
    scheme, _, rest = transport.address.partition(":")
    if scheme == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(5)
        sock.connect(rest)
        return sock
    host, _, port = rest.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def is_refused(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def receive(sock: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        more = sock.recv(size - len(got))
        assert more, f"closed after {len(got)} of {size} bytes"
        got += more
    return got


def link_as(transport: SocketTransport, hello: Hello) -> socket.socket:
    """Connect as a member does, up to the answer."""
    sock = connect(transport)
    packed = pack_hello(hello)
    sock.sendall(packed)
    sock.sendall(answer_challenge(KEY, packed, receive(sock, CHALLENGE_BYTES)))
    return sock


# ---------------------------------------------------------------- before the handshake is over


def test_a_wrong_token_is_refused_by_both_sides(pair: list[SocketTransport], tmp_path: Path) -> None:
    with contextlib.closing(SocketTransport(5, f"unix:{tmp_path}/5", "guess")) as stranger:
        stranger.set_addresses({0: pair[0].address})
        with pytest.raises(PeerLost, match=r"worker 0 .*does not know the token"):
            stranger.exchange(CHANNEL, 0, [Part(0, data(8))], [Part(0, room(8))])
        pair[0].set_addresses({1: pair[1].address, 5: stranger.address})
        with pytest.raises(PeerLost, match=r"worker 5 .*does not know the token"):
            pair[0].exchange(CHANNEL, 0, [Part(5, data(8))], [])
    assert not pair[0]._links


def test_a_listener_that_only_pretends_gets_no_frame(tmp_path: Path) -> None:
    """It echoes whatever it is sent, or makes up a challenge."""
    for number, reply in enumerate((lambda hello: hello, lambda hello: os.urandom(CHALLENGE_BYTES))):
        path = tmp_path / f"false{number}"
        with (
            socket.socket(socket.AF_UNIX) as false,
            contextlib.closing(SocketTransport(1, f"unix:{tmp_path}/1", "secret")) as transport,
        ):
            false.bind(str(path))
            false.listen(1)
            heard: list[bytes] = []

            def answer(false: socket.socket = false, reply: Callable[[bytes], bytes] = reply) -> None:
                sock, _ = false.accept()
                with sock:
                    hello = receive(sock, 64)
                    sock.sendall(reply(hello))
                    heard.append(hello + sock.recv(1000))  # noqa: B023

            thread = threading.Thread(target=answer)
            thread.start()
            transport.set_addresses({0: f"unix:{path}"})
            with pytest.raises(PeerLost, match=r"could not dial unix:.*does not know the token"):
                transport.post(CHANNEL, 0, Part(0, memoryview(b"tensor")))
            thread.join(5)
            assert len(heard[0]) == 64, "it was told more than the hello"


def test_a_recorded_connection_is_refused_when_it_is_played_again(pair: list[SocketTransport]) -> None:
    packed = pack_hello(Hello(HelloKind.LINK, 4, 0, CHANNEL, 0))
    with connect(pair[0]) as first:
        first.sendall(packed)
        answer = answer_challenge(KEY, packed, receive(first, CHALLENGE_BYTES))
        first.sendall(answer)
        wait_until(lambda: (4, CHANNEL) in pair[0]._links)
        with connect(pair[0]) as again:
            again.sendall(packed)
            receive(again, CHALLENGE_BYTES)
            again.sendall(answer)
            assert is_refused(again)
        kept = pair[0]._links[4, CHANNEL]
        assert kept.lost is None and not kept.hung_up(), "a replay took the place of the link"


def test_a_challenge_of_one_member_is_no_answer_to_another(pair: list[SocketTransport]) -> None:
    """Between two members: have the one prove itself, and present the proof to the other."""
    packed = pack_hello(Hello(HelloKind.OFFER, 0, 1, CHANNEL, 0))
    with connect(pair[1]) as sock:
        sock.sendall(packed)
        proof = receive(sock, CHALLENGE_BYTES)[32:]
        sock.sendall(proof)
        assert is_refused(sock)
    assert not pair[1]._links


@pytest.mark.parametrize(
    "hello",
    [
        Hello(HelloKind.LINK, 4, 9, CHANNEL, 0),  # for somebody else
        Hello(HelloKind.LINK, 0, 0, CHANNEL, 0),  # from ourselves
        Hello(3, 4, 0, CHANNEL, 0),  # type: ignore[arg-type]  # of no kind
    ],
)
def test_a_hello_that_cannot_be_is_refused(unix_pair: list[SocketTransport], hello: Hello) -> None:
    with connect(unix_pair[0]) as sock:
        sock.sendall(pack_hello(hello))
        assert is_refused(sock)
    check_works(unix_pair)


def test_a_member_of_the_wrong_rank_cannot_declare_a_link(unix_pair: list[SocketTransport]) -> None:
    """Links are declared by the higher id and offered by the lower one, or two could arise for one channel."""
    with link_as(unix_pair[1], Hello(HelloKind.LINK, 0, 1, CHANNEL, 0)) as sock:
        assert is_refused(sock)
    with link_as(unix_pair[0], Hello(HelloKind.OFFER, 1, 0, CHANNEL, 0)) as sock:
        assert is_refused(sock)
    assert not unix_pair[0]._links and not unix_pair[1]._links


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_a_stranger_sends_members_link_meanwhile(unix_pair: list[SocketTransport], seed: int) -> None:
    """Random bytes, truncated and bent handshakes, silence, and hanging up, many at once."""
    chance = random.Random(seed)
    with contextlib.ExitStack() as stack:
        open_ones = []
        for _ in range(20):
            target = unix_pair[chance.randrange(2)]
            sock = stack.enter_context(connect(target))
            hello = pack_hello(
                Hello(chance.choice(list(HelloKind)), chance.randrange(9), target.worker, chance.getrandbits(64), 0)
            )
            bent = bytearray(hello)
            bent[chance.randrange(len(bent))] ^= 1 << chance.randrange(8)
            with contextlib.suppress(ConnectionError):
                match chance.randrange(7):
                    case 0:
                        pass
                    case 1:
                        sock.sendall(chance.randbytes(chance.randrange(1, 4000)))
                    case 2:
                        sock.sendall(hello[: chance.randrange(1, len(hello))])
                    case 3:
                        sock.sendall(hello + chance.randbytes(chance.randrange(1, 32)))
                    case 4:
                        sock.sendall(hello + chance.randbytes(32 + chance.randrange(1000)))
                    case 5:
                        sock.sendall(bytes(bent) + chance.randbytes(32))
                    case 6:
                        sock.sendall(hello)
                        sock.close()
            open_ones.append(sock)
        check_works(unix_pair, tag=seed)
        assert all(set(transport._links) == {(1 - transport.worker, CHANNEL)} for transport in unix_pair)
    assert all(transport._connections._listener._thread.is_alive() for transport in unix_pair)


def test_hundreds_that_say_nothing_stop_nobody(pair: list[SocketTransport]) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(400):
            stack.enter_context(connect(pair[number % 2]))
        check_works(pair)
    check_works(pair, tag=100)
    wait_until(lambda: not any(transport._connections._listener._strangers for transport in pair))


def test_when_there_are_too_many_the_oldest_goes_and_members_still_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "PATIENCE_S", 0.1)
    members: list[tuple[Hello, socket.socket]] = []
    made = listener.Listener(
        f"unix:{tmp_path}/0", KEY, 0, lambda *member: members.append(member), "accept", max_strangers=4
    )
    with contextlib.closing(made), contextlib.ExitStack() as stack:
        silent = []
        for _ in range(10):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.settimeout(5)
            sock.connect(f"{tmp_path}/0")
            silent.append(sock)
        dial = Dial(made.address, Hello(HelloKind.LINK, 1, 0, CHANNEL, 0), KEY)
        stack.callback(dial.close)
        wait_until(lambda: dial.advance() is Verdict.TAKEN)
        wait_until(lambda: bool(members))
        members[0][1].close()
        assert is_refused(silent[0])
        assert len(made._strangers) <= 4


def test_a_stranger_has_limited_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with transports(2, tmp_path) as made, connect(made[0]) as half:
        half.sendall(pack_hello(Hello(HelloKind.LINK, 1, 0, CHANNEL, 0)))
        receive(half, CHALLENGE_BYTES)
        with monkeypatch.context() as patched:
            patched.setattr(listener, "HELLO_LIMIT_S", 0.1)
            with connect(made[0]) as silent:  # the listener looks at its clock again
                assert is_refused(half)
                assert is_refused(silent)
        check_works(made)


def test_a_worker_without_free_descriptors_does_not_spin_and_links_when_it_has_some(
    unix_pair: list[SocketTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "PATIENCE_S", 0.1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    fillers: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        began = os.times()
        for sock in waiting:
            sock.connect(unix_pair[0].address.removeprefix("unix:"))
        wait_until(lambda: unix_pair[0]._connections._listener._pause_until_s > 0)
        threading.Event().wait(0.3)
        spent_s = os.times().user + os.times().system - began.user - began.system
        assert spent_s < 0.2, "it kept trying to accept"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)
        for sock in waiting:
            sock.close()
    check_works(unix_pair)


def test_a_flood_of_strangers_does_not_flood_the_log(
    unix_pair: list[SocketTransport], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(50):
        with connect(unix_pair[0]) as sock:
            sock.sendall(bytes(64))
            assert is_refused(sock)
    lines = [record for record in caplog.records if "refused a connection" in record.getMessage()]
    assert 1 <= len(lines) <= 10


# ---------------------------------------------------------------- after it


@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_member_gone_mad_sends_ends_the_operation_and_not_the_worker(
    unix_pair: list[SocketTransport], seed: int
) -> None:
    """Random bytes, cut frames and lengths beyond all bounds, where a frame of 8 bytes is expected."""
    chance = random.Random(seed)
    tags = (1, 2, chance.getrandbits(64))
    lengths = (0, 7, 8, 9, 1 << 31, (1 << 64) - 1, chance.getrandbits(64))
    frame = HEADER.pack(
        chance.choice([MAGIC, 0]), chance.choice([0, 1, 9]), chance.choice(tags), chance.choice(lengths)
    )
    sent = chance.choice([frame, frame[: chance.randrange(24)], frame + chance.randbytes(100), chance.randbytes(200)])
    with link_as(unix_pair[0], Hello(HelloKind.LINK, 7, 0, CHANNEL, 0)) as mad:
        unix_pair[0].set_addresses({1: unix_pair[1].address, 7: "unix:/nowhere"})
        wait_until(lambda: (7, CHANNEL) in unix_pair[0]._links)
        mad.sendall(sent)
        mad.shutdown(socket.SHUT_WR)
        got = room(8)
        with contextlib.suppress(EpochChanged, RuntimeError):  # RuntimeError: ProtocolError
            unix_pair[0].exchange(CHANNEL, 1, [], [Part(7, got)])
            assert sent[:24] == HEADER.pack(MAGIC, 0, 1, 8) and got == sent[24:32]
        for transport in unix_pair:
            transport.cancel()
        unix_pair[0].adopt(1, lost=[7])
        unix_pair[1].adopt(1, lost=())
        check_works(unix_pair)
        assert (7, CHANNEL) not in unix_pair[0]._links


def test_one_that_was_counted_as_lost_is_refused_and_its_successor_is_not(unix_pair: list[SocketTransport]) -> None:
    unix_pair[0].set_addresses({1: unix_pair[1].address, 6: "unix:/old"})
    for transport in unix_pair:
        transport.cancel()
    unix_pair[0].adopt(3, lost=[6])
    unix_pair[1].adopt(3, lost=())
    for epoch in (2, 3):
        with link_as(unix_pair[0], Hello(HelloKind.LINK, 6, 0, CHANNEL, epoch)) as sock:
            assert is_refused(sock)
    with link_as(unix_pair[0], Hello(HelloKind.LINK, 6, 0, CHANNEL, 4)):
        wait_until(lambda: (6, CHANNEL) in unix_pair[0]._links)
        unix_pair[0].set_addresses({1: unix_pair[1].address, 6: "unix:/new"})
        next_epoch(unix_pair, 4)
        assert (6, CHANNEL) in unix_pair[0]._links
