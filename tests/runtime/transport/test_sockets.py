from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_elas.runtime.transport.base import Part, ProtocolError, Transport
from megatron_elas.runtime.transport.frame import HEADER, HEADER_BYTES, MAGIC, MAX_PAYLOAD
from megatron_elas.runtime.transport.native_link import LOOK
from megatron_elas.runtime.transport.sockets import SocketTransport
from megatron_elas.spec.errors import EpochChanged, PeerLost
from tests.runtime.transport.conftest import needs_library
from tests.runtime.transport.together import MIB, data, in_thread, next_epoch, room, transports
from tests.runtime.workers import KILLED, introduce, run_workers, wait_until

CHANNEL = 7
LIMIT_S = 5.0
"""From a cancel to the exception, whatever the peer does, on an overloaded machine."""


pytestmark = pytest.mark.usefixtures("engine")


def implements(transport: SocketTransport) -> Transport:
    """Checked by the type checker."""
    return transport


def check_works(made: list[SocketTransport], tag: int = 99, size: int = 100_000) -> None:
    """Both directions carry the right bytes."""
    rooms = [room(size), room(size)]
    joins = [
        in_thread(
            lambda at=at: made[at].exchange(CHANNEL, tag, [Part(1 - at, data(size, at))], [Part(1 - at, rooms[at])])
        )
        for at in (0, 1)
    ]
    for join in joins:
        join()
    assert rooms[0] == data(size, 1)
    assert rooms[1] == data(size, 0)


def link_fds(transport: SocketTransport) -> list[int]:
    return sorted(link.fd for link in transport._links.values())


# ---------------------------------------------------------------- moving bytes


@pytest.mark.parametrize("size", [0, 1, MAX_PAYLOAD - 1, MAX_PAYLOAD, MAX_PAYLOAD + 1, 9 * MIB + 5])
def test_both_sides_may_send_more_than_the_sockets_hold(pair: list[SocketTransport], size: int) -> None:
    check_works(pair, size=size)


def test_parts_for_one_peer_arrive_in_their_order(pair: list[SocketTransport]) -> None:
    sizes = [3, 0, 2 * MIB, 1]
    rooms = [room(size) for size in sizes]
    sent = in_thread(lambda: pair[0].exchange(CHANNEL, 5, [Part(1, data(size, size % 7)) for size in sizes], []))
    pair[1].exchange(CHANNEL, 5, [], [Part(0, buffer) for buffer in rooms])
    sent()
    assert rooms == [data(size, size % 7) for size in sizes]


def test_a_post_does_not_wait_for_the_receiver_and_its_bytes_are_taken(pair: list[SocketTransport]) -> None:
    size = 5 * MIB
    for transport, peer in zip(pair, (1, 0), strict=True):
        for tag in range(3):
            buffer = memoryview(bytearray(data(size, tag)))
            transport.post(CHANNEL, tag, Part(peer, buffer))
            buffer[:] = bytes(size)
    for transport, peer in zip(pair, (1, 0), strict=True):
        for tag in range(3):
            got = room(size)
            transport.exchange(CHANNEL, tag, [], [Part(peer, got)])
            assert got == data(size, tag)


def test_posts_and_exchanges_of_one_link_keep_their_order(unix_pair: list[SocketTransport]) -> None:
    size = 2 * MIB
    unix_pair[0].post(CHANNEL, 1, Part(1, data(size)))
    sent = in_thread(lambda: unix_pair[0].exchange(CHANNEL, 2, [Part(1, data(size, 2))], []))
    for tag in (1, 2):
        got = room(size)
        unix_pair[1].exchange(CHANNEL, tag, [], [Part(0, got)])
        assert got == data(size, tag)
    sent()


def test_threads_use_channels_of_one_peer_at_the_same_time(unix_pair: list[SocketTransport]) -> None:
    def talk(at: int, channel: int) -> None:
        for turn in range(30):
            size = 1 + (turn * 7919 * channel) % (MIB // 2)
            got = room(size)
            unix_pair[at].exchange(channel, turn, [Part(1 - at, data(size, channel))], [Part(1 - at, got)])
            assert got == data(size, channel)

    joins = [in_thread(lambda at=at, c=c: talk(at, c)) for at in (0, 1) for c in (1, 2, 3)]
    for join in joins:
        join()


def test_either_side_may_be_the_first_to_use_a_link(unix_pair: list[SocketTransport]) -> None:
    for channel, (sender, receiver) in enumerate([(0, 1), (1, 0)]):
        unix_pair[sender].post(channel, 0, Part(receiver, data(10)))
        got = room(10)
        unix_pair[receiver].exchange(channel, 0, [], [Part(sender, got)])
        assert got == data(10)
        assert all(sum(key[1] == channel for key in t._links) == 1 for t in unix_pair)


# ---------------------------------------------------------------- epochs


def test_a_frame_of_an_older_epoch_is_dropped(unix_pair: list[SocketTransport]) -> None:
    unix_pair[0].post(CHANNEL, 1, Part(1, data(1000)))
    unix_pair[0].post(CHANNEL, 2, Part(1, data(3 * MIB)))
    next_epoch(unix_pair)
    check_works(unix_pair, tag=1)


def test_a_frame_of_a_newer_epoch_ends_the_operation_and_is_kept(unix_pair: list[SocketTransport]) -> None:
    check_works(unix_pair)
    ahead, behind = unix_pair
    ahead.cancel()
    ahead.adopt(1, lost=())
    ahead.post(CHANNEL, 3, Part(1, data(5)))
    with pytest.raises(EpochChanged, match="worker 0 is in epoch 1 already"):
        behind.exchange(CHANNEL, 2, [], [Part(0, room(5))])
    with pytest.raises(EpochChanged, match="epoch 0 ended on worker 1"):
        behind.post(CHANNEL, 2, Part(0, data(5)))
    behind.adopt(1, lost=())
    got = room(5)
    behind.exchange(CHANNEL, 3, [], [Part(0, got)])
    assert got == data(5)


def test_links_without_a_use_are_closed_at_both_ends_and_can_be_made_anew(unix_pair: list[SocketTransport]) -> None:
    check_works(unix_pair)
    [(_, channel)] = unix_pair[0]._links
    next_epoch(unix_pair)
    unix_pair[0].keep_links(lambda peer, of: (peer, of) == (1, channel))
    check_works(unix_pair, tag=1)
    for transport in unix_pair:
        transport.keep_links(lambda peer, of: of != channel)
        assert not transport._links
    check_works(unix_pair, tag=2)


def test_epochs_only_grow(unix_pair: list[SocketTransport]) -> None:
    next_epoch(unix_pair, 4)
    with pytest.raises(ValueError, match="epoch 4 cannot be adopted after 4"):
        unix_pair[0].adopt(4, lost=())


@pytest.mark.parametrize("offer", [("tag", 2, 8), ("length", 1, 9), ("many frames", 1, 3 * MIB)])
def test_mixed_up_operations_are_told_apart_and_poison_the_epoch(
    unix_pair: list[SocketTransport], offer: tuple[str, int, int]
) -> None:
    _, tag, size = offer
    unix_pair[0].post(CHANNEL, tag, Part(1, data(size)))
    with pytest.raises(ProtocolError, match="expected tag 0x1 with 8 bytes"):
        unix_pair[1].exchange(CHANNEL, 1, [], [Part(0, room(8))])
    with pytest.raises(EpochChanged, match="different operations"):
        unix_pair[1].exchange(CHANNEL, 1, [], [Part(0, room(8))])
    next_epoch(unix_pair)
    check_works(unix_pair)


# ---------------------------------------------------------------- cancelling


def test_cancel_ends_every_wait_and_the_links_stay(pair: list[SocketTransport]) -> None:
    check_works(pair)
    links = [link_fds(transport) for transport in pair]
    waits: list[Callable[[], object]] = [
        lambda: pair[0].exchange(CHANNEL, 1, [], [Part(1, room(8))]),  # nobody sends
        lambda: pair[0].exchange(CHANNEL, 1, [Part(1, data(64 * MIB))], []),  # nobody receives: cut half-way
        lambda: pair[0].exchange(CHANNEL, 1, [Part(1, data(64 * MIB))], [Part(1, room(64 * MIB))]),
    ]
    for epoch, wait in enumerate(waits, start=1):
        join = in_thread(wait)
        time.sleep(0.05)
        started = time.perf_counter()
        pair[0].cancel()
        with pytest.raises(EpochChanged):
            join()
        took_s = time.perf_counter() - started
        print(f"cancel took {took_s * 1e3:.2f} ms")
        assert took_s < LIMIT_S
        assert pair[0].cancelled
        with pytest.raises(EpochChanged):
            pair[0].post(CHANNEL, 1, Part(1, data(8)))
        next_epoch(pair, epoch)
        check_works(pair, size=3 * MIB)
    assert [link_fds(transport) for transport in pair] == links


def test_cancel_ends_the_wait_for_a_link(unix_pair: list[SocketTransport], tmp_path: Path) -> None:
    """The peer has a listener, but nobody accepts."""
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(f"{tmp_path}/deaf")
        deaf.listen(1)
        unix_pair[0].set_addresses({1: f"unix:{tmp_path}/deaf"})
        join = in_thread(lambda: unix_pair[0].post(CHANNEL, 1, Part(1, data(8))))
        time.sleep(0.05)
        unix_pair[0].cancel()
        with pytest.raises(EpochChanged):
            join()


def test_a_buffer_is_not_read_after_a_cancelled_exchange(unix_pair: list[SocketTransport]) -> None:
    """What completes the cut frame are zeros, sent in the new epoch and dropped by the peer."""
    buffer = memoryview(bytearray(8 * MIB))
    join = in_thread(lambda: unix_pair[0].exchange(CHANNEL, 1, [Part(1, buffer)], []))
    wait_until(lambda: (1, CHANNEL) in unix_pair[0]._links and unix_pair[0]._links[1, CHANNEL].queued > 0)
    wait_until(lambda: (0, CHANNEL) in unix_pair[1]._links)
    time.sleep(0.02)
    unix_pair[0].cancel()
    with pytest.raises(EpochChanged):
        join()
    [link] = unix_pair[0]._links.values()
    assert 0 < link.queued < HEADER_BYTES + MAX_PAYLOAD
    buffer[:] = b"x" * len(buffer)
    for transport in unix_pair:
        transport.cancel()
    unix_pair[0].adopt(1, lost=())
    [theirs] = unix_pair[1]._links.values()
    seen = bytearray()
    while len(seen) < HEADER_BYTES + MAX_PAYLOAD or len(seen) % (HEADER_BYTES + MAX_PAYLOAD):
        link.pump()
        with contextlib.suppress(BlockingIOError):
            seen += theirs.sock.recv(MIB)
    assert b"xx" not in seen
    unix_pair[1].adopt(1, lost=())
    check_works(unix_pair)


def test_a_signal_is_handled_while_an_operation_waits(unix_pair: list[SocketTransport]) -> None:
    """A handler that returns changes nothing; one that raises ends the operation and lets go of its buffers.

    Signals come again and again until one was handled: Python does not see one that comes right before a system call
    until that has ended.
    """
    handled: list[str] = []
    act: list[Callable[[], None]] = []

    def handle(number: int, frame: object) -> None:
        if act:
            act.pop()()

    def send() -> None:
        handled.append("returned")
        later.append(in_thread(lambda: unix_pair[1].exchange(CHANNEL, 1, [Part(0, data(8))], [])))

    def fail() -> None:
        handled.append("raised")
        raise InterruptedError("by the test")

    later: list[Callable[[], object]] = []
    before = signal.signal(signal.SIGALRM, handle)
    try:
        got = room(8)
        act.append(send)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        unix_pair[0].exchange(CHANNEL, 1, [], [Part(1, got)])
        signal.setitimer(signal.ITIMER_REAL, 0)
        later[0]()
        assert got == data(8)
        assert handled == ["returned"]
        buffer = memoryview(bytearray(64 * MIB))
        [link] = unix_pair[0]._links.values()

        def interrupt() -> None:
            wait_until(lambda: link.queued > 0)
            act.append(fail)
            while act:
                os.kill(os.getpid(), signal.SIGALRM)
                time.sleep(0.01)

        interrupter = threading.Thread(target=interrupt)
        with pytest.raises(InterruptedError):
            interrupter.start()
            unix_pair[0].exchange(CHANNEL, 2, [Part(1, buffer)], [])
        interrupter.join()
        assert handled == ["returned", "raised"]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(EpochChanged, match="broken off by InterruptedError"):
        unix_pair[0].post(CHANNEL, 3, Part(1, data(1)))
    assert link.queued < HEADER_BYTES + MAX_PAYLOAD
    next_epoch(unix_pair)
    check_works(unix_pair)


@needs_library
def test_an_interrupt_right_after_the_core_has_returned_lets_go_of_the_operation(
    unix_pair: list[SocketTransport], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == "python":
        pytest.skip("of the C core")
    core, ended = unix_pair[0]._engine._core, []  # type: ignore[attr-defined]

    class Interrupted:
        def __getattr__(self, name: str) -> object:
            return getattr(core, name)

        def elas_run(self, arguments: int) -> int:
            assert core.elas_run(arguments) == LOOK
            raise KeyboardInterrupt

        def elas_abandon(self, arguments: int) -> None:
            ended.append(arguments)
            core.elas_abandon(arguments)

    buffer = memoryview(bytearray(64 * MIB))
    with monkeypatch.context() as patched:
        patched.setattr(unix_pair[0]._engine, "_core", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            unix_pair[0].exchange(CHANNEL, 1, [Part(1, buffer)], [])
    assert len(ended) == 1
    [link] = unix_pair[0]._links.values()
    assert link.queued < HEADER_BYTES + MAX_PAYLOAD
    next_epoch(unix_pair)
    check_works(unix_pair)


def test_a_buffer_that_cannot_be_written_to_is_refused_and_the_epoch_goes_on(unix_pair: list[SocketTransport]) -> None:
    with pytest.raises(TypeError, match="a buffer that receives must be writable"):
        unix_pair[0].exchange(CHANNEL, 1, [Part(1, data(8))], [Part(1, data(8))])
    check_works(unix_pair, tag=1)


@pytest.mark.process
def test_a_stopped_peer_does_not_delay_the_cancel(tmp_path: Path) -> None:
    def body(worker: int) -> object:
        transport = introduce(worker, 2, tmp_path)
        peer = 1 - worker
        mine = memoryview(worker.to_bytes(1) * 4 + os.getpid().to_bytes(4))
        theirs = room(8)
        transport.exchange(CHANNEL, 0, [Part(peer, mine)], [Part(peer, theirs)])
        pid = int.from_bytes(theirs[4:])
        if worker == 1:
            transport.exchange(CHANNEL, 1, [], [Part(0, room(1))])  # stopped here, and continued in the end
            with pytest.raises(EpochChanged, match="worker 0 is in epoch 9 already"):
                transport.exchange(CHANNEL, 3, [], [Part(0, room(64 * MIB))])
            transport.cancel()
            transport.adopt(9, lost=())
        else:
            os.kill(pid, signal.SIGSTOP)
            transport.exchange(CHANNEL, 1, [Part(1, data(1))], [])
            worst_s = 0.0
            for epoch in range(1, 9):
                join = in_thread(lambda: transport.exchange(CHANNEL, 3, [Part(1, data(64 * MIB))], [Part(1, room(8))]))
                time.sleep(0.02)
                started = time.perf_counter()
                transport.cancel()
                with pytest.raises(EpochChanged):
                    join()
                worst_s = max(worst_s, time.perf_counter() - started)
                transport.adopt(epoch, lost=())
            print(f"worst cancel with a stopped peer: {worst_s * 1e3:.2f} ms")
            assert worst_s < LIMIT_S
            os.kill(pid, signal.SIGCONT)
            transport.cancel()
            transport.adopt(9, lost=())
        got = room(3 * MIB)
        transport.exchange(CHANNEL, 5, [Part(peer, data(3 * MIB, worker))], [Part(peer, got)])
        assert got == data(3 * MIB, peer)
        transport.close()
        return True

    assert run_workers(2, body) == [True, True]


# ---------------------------------------------------------------- lost peers


@pytest.mark.process
def test_a_killed_peer_is_named(tmp_path: Path) -> None:
    def body(worker: int) -> object:
        transport = introduce(worker, 3, tmp_path)
        others = [at for at in range(3) if at != worker]
        transport.exchange(CHANNEL, 0, [Part(at, data(1)) for at in others], [Part(at, room(1)) for at in others])
        if worker == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost, match=r"link to worker 1 broke: .*channel 7, epoch 0") as caught:
            transport.exchange(CHANNEL, 1, [], [Part(1, room(1))])
        assert caught.value.peer == 1
        with pytest.raises(PeerLost) as caught:  # also on other links: the epoch has ended
            transport.post(CHANNEL, 1, Part(2 - worker, data(1)))
        assert caught.value.peer == 1
        transport.adopt(1, lost=[1])
        with pytest.raises(PeerLost, match="it left before epoch 1"):
            transport.post(CHANNEL, 1, Part(1, data(1)))
        transport.adopt(2, lost=[1])
        got = room(9)
        transport.exchange(CHANNEL, 0, [Part(2 - worker, data(9))], [Part(2 - worker, got)])
        transport.close()
        return bytes(got) == bytes(data(9))

    assert run_workers(3, body) == [True, KILLED, True]


@pytest.mark.parametrize("worker", [0, 1])
def test_a_dial_that_is_refused_means_the_peer_is_lost(tmp_path: Path, worker: int) -> None:
    peer = 1 - worker
    with contextlib.closing(SocketTransport(worker, f"unix:{tmp_path}/{worker}", "secret")) as transport:
        transport.set_addresses({peer: f"unix:{tmp_path}/{peer}"})
        with pytest.raises(PeerLost, match=r"could not dial unix:.*No such file .*channel 7, epoch 0"):
            transport.post(CHANNEL, 0, Part(peer, data(1)))


def test_a_post_to_a_peer_that_dies_later_fails_the_next_operation(unix_pair: list[SocketTransport]) -> None:
    unix_pair[0].post(CHANNEL, 0, Part(1, data(8 * MIB)))
    wait_until(lambda: bool(unix_pair[1]._links))
    unix_pair[1].close()
    wait_until(lambda: unix_pair[0]._failure is not None)
    with pytest.raises(PeerLost, match="worker 1"):
        unix_pair[0].post(CHANNEL + 1, 0, Part(1, data(1)))


def test_a_broken_link_between_living_workers_is_made_anew_in_the_next_epoch(unix_pair: list[SocketTransport]) -> None:
    check_works(unix_pair)
    for breaker, epoch in ((0, 1), (1, 2)):
        (link,) = unix_pair[breaker]._links.values()
        link.close("broken by the test")
        next_epoch(unix_pair, epoch)
        check_works(unix_pair)


# ---------------------------------------------------------------- the wire format


def test_random_bytes_on_a_link_break_it(unix_pair: list[SocketTransport]) -> None:
    check_works(unix_pair)
    (link,) = unix_pair[1]._links.values()
    link.sock.send(b"x" * 100)
    with pytest.raises(PeerLost, match="bytes arrived that are no frame"):
        unix_pair[0].exchange(CHANNEL, 0, [], [Part(1, room(8))])


def test_the_header_is_as_documented() -> None:
    assert HEADER.pack(MAGIC, 1, 2, 3) == struct.pack("<I", 0xE1A557F2) + struct.pack("<IQQ", 1, 2, 3)


# ---------------------------------------------------------------- limits and ends


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("unix:", "must be unix:/path or tcp:host:port"),
        ("tcp:localhost", "must be unix:/path or tcp:host:port"),
        ("tcp:0.0.0.0:0", "cannot be dialled by peers"),
        ("unix:/tmp/" + "x" * 120, "at most 107 are possible"),
    ],
)
def test_an_address_that_cannot_work_is_refused(address: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SocketTransport(0, address, "secret")


def test_a_peer_without_address_and_oneself_are_refused(unix_pair: list[SocketTransport]) -> None:
    with pytest.raises(ValueError, match="worker 0 cannot send to itself"):
        unix_pair[0].post(CHANNEL, 0, Part(0, data(1)))
    with pytest.raises(ValueError, match="worker 9 has no address"):
        unix_pair[0].post(CHANNEL, 0, Part(9, data(1)))


@pytest.mark.parametrize("scheme", ["unix", "tcp"])
def test_close_leaves_no_descriptor_thread_or_file(tmp_path: Path, scheme: str) -> None:
    gc.collect()  # of earlier tests
    fds, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    with transports(2, tmp_path, scheme) as made:
        check_works(made)
        made[0].post(CHANNEL, 1, Part(1, data(4 * MIB)))
        join = in_thread(lambda: made[0].exchange(CHANNEL + 1, 1, [], [Part(1, room(8))]))
        wait_until(lambda: len(made[1]._links) == 2)
        made[0].close()
        made[0].close()
        with pytest.raises(EpochChanged):
            join()
    wait_until(lambda: threading.active_count() <= threads)
    gc.collect()
    wait_until(lambda: set(os.listdir("/proc/self/fd")) <= fds)
    assert not os.listdir(tmp_path)
