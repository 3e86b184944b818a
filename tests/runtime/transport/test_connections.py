"""Who dials whom, how long, and what is left when it fails."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_elas.runtime.transport import dialler
from megatron_elas.runtime.transport.base import Part
from megatron_elas.runtime.transport.dial import VANISHED_S, listen_on, parse_address
from megatron_elas.runtime.transport.sockets import SocketTransport
from megatron_elas.spec.errors import EpochChanged, PeerLost
from tests.runtime.transport.test_sockets import CHANNEL, check_works
from tests.runtime.transport.together import data, in_thread, next_epoch, room, transports
from tests.runtime.workers import wait_until


@contextlib.contextmanager
def unanswering(path: Path) -> Iterator[str]:
    """An address where dialling neither succeeds nor fails, as a host without power: a listener with a full queue."""
    with contextlib.ExitStack() as stack:
        deaf = stack.enter_context(socket.socket(socket.AF_UNIX))
        deaf.bind(str(path))
        deaf.listen(0)
        while True:
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            if waiting.connect_ex(str(path)) != 0:
                break
        yield f"unix:{path}"


@contextlib.contextmanager
def silent(path: Path) -> Iterator[str]:
    """An address where connections are accepted and nothing is said, as by a stopped process."""
    with socket.socket(socket.AF_UNIX) as quiet:
        quiet.bind(str(path))
        quiet.listen(1000)
        yield f"unix:{path}"


def link_up(made: list[SocketTransport], channels: list[int]) -> None:
    """All at once, every worker with every other one, on all channels."""
    joins = [
        in_thread(
            lambda own=own: own.open_links([(other.worker, c) for other in made if other is not own for c in channels])
        )
        for own in made
    ]
    for join in joins:
        join()


def check_one_link_per_channel(made: list[SocketTransport], channels: list[int]) -> None:
    """Both ends have it, and it is the same one."""
    wanted = [{(other.worker, c) for other in made if other is not own for c in channels} for own in made]
    wait_until(lambda: [set(own._links) for own in made] == wanted)  # the dialled side may be a moment behind
    for own in made:
        for (peer, channel), link in own._links.items():
            other = made[peer]._links[own.worker, channel]
            assert link.sock.getpeername() == other.sock.getsockname()
            assert not link.hung_up()


@pytest.mark.parametrize("scheme", ["unix", "tcp"])
def test_links_that_both_sides_open_at_once_come_about_once(tmp_path: Path, scheme: str) -> None:
    channels = list(range(6))
    with transports(4, tmp_path, scheme) as made:
        link_up(made, channels)
        check_one_link_per_channel(made, channels)
        links = [dict(own._links) for own in made]
        link_up(made, channels)
        assert [dict(own._links) for own in made] == links, "what is there was dialled again"


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_opening_gives_one_link(tmp_path: Path, seed: int) -> None:
    """Each side begins at its own time, from several threads, for overlapping sets."""
    chance = random.Random(seed)
    with transports(3, tmp_path) as made:
        joins = []
        for _ in range(12):
            own, other = chance.sample(made, 2)
            wanted = [(other.worker, channel) for channel in chance.sample(range(4), 3)]
            joins.append(in_thread(lambda own=own, wanted=wanted: own.open_links(wanted)))
            time.sleep(chance.random() * 0.002)
        for join in joins:
            join()
        for own in made:
            for (peer, channel), link in own._links.items():
                wait_until(lambda own=own, peer=peer, c=channel: (own.worker, c) in made[peer]._links)
                other_end = made[peer]._links[own.worker, channel]
                assert link.sock.getpeername() == other_end.sock.getsockname()
        assert all(not transport._connections._dialling for transport in made)
        assert all(not transport._connections._wakers for transport in made)


def test_the_lower_side_alone_can_open_a_link(tmp_path: Path) -> None:
    with transports(2, tmp_path) as made:
        made[0].open_links([(1, CHANNEL)])
        check_one_link_per_channel(made, [CHANNEL])
        check_works(made)
        check_one_link_per_channel(made, [CHANNEL])


def test_a_link_is_offered_before_its_peer_knows_our_address(tmp_path: Path) -> None:
    low, high = (SocketTransport(worker, f"unix:{tmp_path}/{worker}", "secret") for worker in (0, 1))
    with contextlib.closing(low), contextlib.closing(high):
        low.set_addresses({1: high.address})
        low.post(CHANNEL, 0, Part(1, data(10)))
        got = room(10)
        high.set_addresses({0: low.address})
        high.exchange(CHANNEL, 0, [], [Part(0, got)])
        assert got == data(10)


def test_an_offer_whose_time_comes_between_looking_and_waiting_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_ms = dialler.Dialler._next_ms

    def late(of: dialler.Dialler) -> int | None:
        time.sleep(2 * dialler.OFFER_AFTER_S)
        return next_ms(of)

    monkeypatch.setattr(dialler.Dialler, "_next_ms", late)
    with transports(2, tmp_path) as made:
        in_thread(lambda: made[0].open_links([(1, CHANNEL)]))()
        check_one_link_per_channel(made, [CHANNEL])


def test_an_offer_that_crosses_a_dial_which_then_ends_is_made_again(tmp_path: Path) -> None:
    """The higher side says that it is dialling, and stops; the lower one must not wait for ever."""
    with transports(2, tmp_path) as made:
        low, high = made
        with high._connections.changed:
            assert high._connections.claim((0, CHANNEL))
        join = in_thread(lambda: low.open_links([(1, CHANNEL)]))
        wait_until(lambda: low._connections._dialling == set())  # answered: crossed
        time.sleep(0.05)
        assert not low._links
        high._connections.unclaim([(0, CHANNEL)])
        join()
        check_one_link_per_channel(made, [CHANNEL])


# ---------------------------------------------------------------- failing


def dials_left(transport: SocketTransport) -> int:
    return len(transport._connections._dialling) + len(transport._connections._wakers)


@pytest.mark.usefixtures("engine")
def test_a_peer_that_says_for_ever_that_it_dials_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialler, "CONNECT_LIMIT_S", 0.1)
    monkeypatch.setattr(dialler, "ANSWER_LIMIT_S", 1.0)
    with transports(2, tmp_path) as made:
        low, high = made
        with high._connections.changed:
            assert high._connections.claim((0, CHANNEL))
        join = in_thread(lambda: low.exchange(CHANNEL, 0, [], [Part(1, room(1))]))
        with pytest.raises(PeerLost, match=r"says that it dials .*, but made no link within \d\.\d s") as caught:
            join()
        assert caught.value.peer == 1
        assert not dials_left(low)
        high._connections.unclaim([(0, CHANNEL)])
        next_epoch(made)
        check_works(made)


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize(("kind", "says"), [("unanswering", "accepted no connection"), ("silent", "did not answer")])
def test_a_peer_that_does_not_answer_in_time_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: int, kind: str, says: str
) -> None:
    monkeypatch.setattr(dialler, "CONNECT_LIMIT_S", 0.2)
    monkeypatch.setattr(dialler, "ANSWER_LIMIT_S", 0.2)
    peer = 1 - worker
    make = unanswering if kind == "unanswering" else silent
    with (
        make(tmp_path / "deaf") as deaf,
        contextlib.closing(SocketTransport(worker, f"unix:{tmp_path}/{worker}", "secret")) as transport,
    ):
        transport.set_addresses({peer: deaf})
        transport.name_channels(lambda channel: f"group DATA_PARALLEL, channel {channel}")
        fds = len(os.listdir("/proc/self/fd"))
        started = time.monotonic()
        with pytest.raises(PeerLost, match=rf"could not dial {deaf}: it .*{says} within \d") as caught:
            transport.post(CHANNEL, 0, Part(peer, data(1)))
        assert caught.value.peer == peer
        assert "(group DATA_PARALLEL, channel 7, epoch 0)" in caught.value.detail
        assert 0.2 <= time.monotonic() - started < 5
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= fds)  # garbage of earlier tests may go too
        assert not dials_left(transport)
        with pytest.raises(PeerLost):  # the epoch has ended
            transport.post(CHANNEL + 1, 0, Part(peer, data(1)))


def test_one_limit_holds_for_all_together_and_the_others_get_their_links(tmp_path: Path) -> None:
    with silent(tmp_path / "deaf") as deaf, transports(3, tmp_path) as made:
        addresses = {transport.worker: transport.address for transport in made} | {9: deaf}
        made[2].set_addresses(addresses)
        with pytest.raises(PeerLost, match=r"did not answer within \d") as caught:
            made[2].open_links([(0, CHANNEL), (9, CHANNEL), (1, CHANNEL)], limit_s=1.0)
        assert caught.value.peer == 9
        assert set(made[2]._links) == {(0, CHANNEL), (1, CHANNEL)}
        next_epoch(made)
        assert set(made[2]._links) == {(0, CHANNEL), (1, CHANNEL)}


def test_a_dead_address_is_told_at_once(tmp_path: Path) -> None:
    with transports(1, tmp_path, "tcp") as made:
        listener, address = listen_on("tcp:127.0.0.1:0")
        listener.close()
        made[0].set_addresses({3: address})
        with pytest.raises(PeerLost, match=rf"could not dial {address}: Connection refused \(channel 7, epoch 0\)"):
            made[0].open_links([(3, CHANNEL)])
        assert not dials_left(made[0])


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.usefixtures("engine")
def test_an_address_that_is_none_is_refused_and_the_next_one_is_dialled(tmp_path: Path, worker: int) -> None:
    with transports(2, tmp_path) as made:
        own, peer = made[worker], made[1 - worker]
        own.set_addresses({peer.worker: "nowhere"})
        with pytest.raises(ValueError, match="must be unix:/path or tcp:host:port"):
            own.exchange(CHANNEL, 0, [], [Part(peer.worker, room(1))])
        assert not dials_left(own)
        own.set_addresses({peer.worker: peer.address})
        check_works(made)  # nothing had moved: the epoch goes on
        next_epoch(made)
        check_works(made)


def test_a_link_that_cannot_be_made_ends_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with transports(2, tmp_path) as made:
        low, high = made
        failures = []

        def fail(*_: object) -> None:
            failures.append(1)
            raise MemoryError("by the test")

        with monkeypatch.context() as patched:
            patched.setattr(low, "make_link", fail)
            high.open_links([(0, CHANNEL)])  # the peer's end is closed at once
            wait_until(lambda: bool(failures))
            link = high._links[0, CHANNEL]
            wait_until(link.hung_up)
        assert "could not make a link of a connection from worker 1" in caplog.text
        next_epoch(made)
        check_works(made)


def test_nothing_is_dialled_when_a_peer_cannot_be(tmp_path: Path) -> None:
    with transports(2, tmp_path) as made:
        for wrong in ((0, CHANNEL), (8, CHANNEL)):
            with pytest.raises(ValueError, match=r"cannot send to itself|worker 8 has no address"):
                made[0].open_links([(1, CHANNEL), wrong])
        assert not made[0]._links and not made[1]._links


@pytest.mark.parametrize("kind", ["unanswering", "silent"])
def test_a_cancel_ends_dials_at_once_and_the_next_epoch_dials_anew(tmp_path: Path, kind: str) -> None:
    make = unanswering if kind == "unanswering" else silent
    with make(tmp_path / "deaf") as deaf, transports(2, tmp_path) as made:
        addresses = {transport.worker: transport.address for transport in made}
        made[1].set_addresses({0: deaf})
        fds = len(os.listdir("/proc/self/fd"))
        join = in_thread(lambda: made[1].open_links([(0, channel) for channel in range(50)]))
        wait_until(lambda: len(made[1]._connections._dialling) == 50)
        started = time.perf_counter()
        made[1].cancel()
        with pytest.raises(EpochChanged):
            join()
        assert time.perf_counter() - started < 2
        assert not dials_left(made[1])
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= fds)  # garbage of earlier tests may go too
        made[1].set_addresses(addresses)
        next_epoch(made)
        made[1].open_links([(0, channel) for channel in range(50)])
        check_one_link_per_channel(made, list(range(50)))


def test_a_peer_found_lost_while_others_are_dialled_ends_the_wait(tmp_path: Path) -> None:
    """It takes the place of its old address, which never answers: the dial goes on to the new one."""
    with silent(tmp_path / "deaf") as deaf, transports(2, tmp_path) as made:
        made[1].set_addresses({0: deaf})
        join = in_thread(lambda: made[1].open_links([(0, CHANNEL)]))
        wait_until(lambda: bool(made[1]._connections._dialling))
        made[0].open_links([(1, CHANNEL + 1)])  # the listener is not held up meanwhile
        made[1].close()
        with pytest.raises(EpochChanged):
            join()


def test_no_thread_is_made_for_dialling(tmp_path: Path) -> None:
    with transports(2, tmp_path) as made:
        before = threading.active_count()
        link_up(made, list(range(30)))
        wait_until(lambda: threading.active_count() <= before)


# ---------------------------------------------------------------- addresses


def test_addresses_of_both_internet_protocols() -> None:
    assert parse_address("tcp:[::1]:80") == (socket.AF_INET6, ("::1", 80))
    assert parse_address("tcp:10.0.0.1:80") == (socket.AF_INET, ("10.0.0.1", 80))
    for wrong in ("tcp:[::1]", "tcp:10.0.0.1:65536", "tcp::80", "udp:10.0.0.1:80"):
        with pytest.raises(ValueError, match="must be unix:/path or tcp:host:port"):
            parse_address(wrong)
    with pytest.raises(ValueError, match="cannot be dialled by peers"):
        listen_on("tcp:[::]:0")


def test_a_listener_tells_a_numeric_address_so_that_nobody_has_to_resolve_names() -> None:
    listener, address = listen_on("tcp:localhost:0")
    with listener:
        assert address == f"tcp:127.0.0.1:{listener.getsockname()[1]}"


def test_links_go_over_version_six_too(tmp_path: Path) -> None:
    try:
        probe, _ = listen_on("tcp:[::1]:0")
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    probe.close()
    made = [SocketTransport(worker, "tcp:[::1]:0", "secret") for worker in (0, 1)]
    with contextlib.closing(made[0]), contextlib.closing(made[1]):
        for transport in made:
            transport.set_addresses({other.worker: other.address for other in made})
        check_works(made)


def test_a_link_over_tcp_has_the_documented_limits(tmp_path: Path) -> None:
    with transports(2, tmp_path, "tcp") as made:
        check_works(made)
        for transport in made:
            (link,) = transport._links.values()
            options = {
                name: link.sock.getsockopt(level, getattr(socket, name))
                for level, name in (
                    (socket.SOL_SOCKET, "SO_KEEPALIVE"),
                    (socket.IPPROTO_TCP, "TCP_KEEPIDLE"),
                    (socket.IPPROTO_TCP, "TCP_KEEPINTVL"),
                    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT"),
                    (socket.IPPROTO_TCP, "TCP_NODELAY"),
                )
            }
            assert options == {
                "SO_KEEPALIVE": 1, "TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 15, "TCP_USER_TIMEOUT": VANISHED_S * 1000,
                "TCP_NODELAY": 1,
            }  # fmt: skip
