"""Wrong use, and limits of time: everybody who waits gets an error, and nobody takes wrong bytes for right ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_elas.runtime.transport.base import Part, ProtocolError
from megatron_elas.runtime.transport.frame import HEADER, MAGIC, OBJECTION, OBJECTION_BYTES
from megatron_elas.runtime.transport.program import Program, Region, Round, Transfer
from megatron_elas.runtime.transport.sockets import SocketTransport
from megatron_elas.spec.errors import EpochChanged, PeerLost
from tests.runtime.transport.together import MIB, all_at_once, data, in_thread, next_epoch, room, transports
from tests.runtime.workers import wait_until

CHANNEL = 5
OTHER = 6

pytestmark = pytest.mark.usefixtures("engine")


def link_all(made: list[SocketTransport], pairs: list[tuple[int, int]]) -> None:
    """Open the links of CHANNEL between these pairs."""
    for low, high in pairs:
        made[low].post(CHANNEL, 0, Part(high, data(1)))
        made[high].exchange(CHANNEL, 0, [], [Part(low, room(1))])


def check_works(made: list[SocketTransport], pairs: list[tuple[int, int]], epoch: int = 1) -> None:
    next_epoch(made, epoch)
    for low, high in pairs:
        for sender, receiver in ((low, high), (high, low)):
            got = room(3 * MIB)
            sent = in_thread(lambda a=sender, b=receiver: made[a].exchange(CHANNEL, 9, [Part(b, data(3 * MIB))], []))
            made[receiver].exchange(CHANNEL, 9, [], [Part(sender, got)])
            sent()
            assert got == data(3 * MIB)


def test_who_waits_for_somebody_who_waits_for_the_culprit_is_told(tmp_path: Path) -> None:
    """0 and 1 disagree; 2 waits for 1, and 3 for 2, with no link to either of the two."""
    pairs = [(0, 1), (1, 2), (2, 3)]
    with transports(4, tmp_path) as made:
        link_all(made, pairs)
        made[0].post(CHANNEL, 77, Part(1, data(8)))
        outcomes = all_at_once(
            [
                lambda: made[0].exchange(CHANNEL, 1, [], [Part(1, room(4))]),
                lambda: made[1].exchange(CHANNEL, 2, [], [Part(0, room(8))]),
                lambda: made[2].exchange(CHANNEL, 2, [], [Part(1, room(8))]),
                lambda: made[3].exchange(CHANNEL, 2, [], [Part(2, room(8))]),
            ]
        )
        noticed = str(outcomes[1])
        assert noticed.startswith("worker 0, channel 5, epoch 0: expected tag 0x2 with 8 bytes, got tag 0x4d")
        for at in (0, 2, 3):
            assert isinstance(outcomes[at], ProtocolError)
            assert str(outcomes[at]) == f"worker 1 noticed: {noticed}"
        with pytest.raises(EpochChanged, match="worker 1 noticed"):
            made[3].post(OTHER, 0, Part(2, data(1)))
        check_works(made, pairs)


def test_a_worker_that_comes_later_is_told_too(tmp_path: Path) -> None:
    with transports(3, tmp_path) as made:
        pairs = [(0, 1), (1, 2)]
        link_all(made, pairs)
        made[0].post(CHANNEL, 77, Part(1, data(8)))
        with pytest.raises(ProtocolError):
            made[1].exchange(CHANNEL, 2, [], [Part(0, room(8))])
        for at in (0, 2):
            with pytest.raises(ProtocolError, match="worker 1 noticed"):
                made[at].exchange(CHANNEL, 3, [], [Part(1, room(8))])
        check_works(made, pairs)


@pytest.mark.parametrize("size", [100, 40 * MIB])
def test_a_peer_that_receives_from_the_objector_gets_no_wrong_bytes(tmp_path: Path, size: int) -> None:
    """Worker 0 is in the middle of a large part for worker 1 when it notices worker 2's mistake."""
    with transports(3, tmp_path) as made:
        pairs = [(0, 1), (0, 2)]
        link_all(made, pairs)
        got = room(40 * MIB)
        sending = in_thread(lambda: made[0].exchange(CHANNEL, 2, [Part(1, data(40 * MIB))], [Part(2, room(8))]))
        [key] = [key for key in made[0]._links if key == (1, CHANNEL)]
        wait_until(lambda: made[0]._links[key].queued > 0)
        made[2].post(CHANNEL, 3, Part(0, data(8)))
        with pytest.raises(ProtocolError, match="expected tag 0x2"):
            sending()
        with pytest.raises(ProtocolError, match="worker 0 noticed: worker 2"):
            made[1].exchange(CHANNEL, 2, [], [Part(0, got)])
        arrived = bytes(got).rstrip(b"\0")
        assert arrived == bytes(data(40 * MIB)[: len(arrived)])
        check_works(made, pairs)


def test_a_worker_that_is_blocked_while_sending_hears_the_objection(tmp_path: Path) -> None:
    with transports(3, tmp_path) as made:
        pairs = [(0, 1), (0, 2)]
        link_all(made, pairs)
        sending = in_thread(lambda: made[1].exchange(CHANNEL, 2, [Part(0, data(40 * MIB))], []))
        wait_until(lambda: made[1]._links[0, CHANNEL].queued > 0)
        made[2].post(CHANNEL, 3, Part(0, data(8)))
        with pytest.raises(ProtocolError, match="expected tag 0x2"):
            made[0].exchange(CHANNEL, 2, [], [Part(2, room(8))])
        with pytest.raises(ProtocolError, match="worker 0 noticed: worker 2"):
            sending()
        check_works(made, pairs)


def test_a_worker_that_is_blocked_while_sending_notices_a_newer_epoch(tmp_path: Path) -> None:
    with transports(2, tmp_path) as made:
        link_all(made, [(0, 1)])
        sending = in_thread(lambda: made[0].exchange(CHANNEL, 2, [Part(1, data(40 * MIB))], []))
        wait_until(lambda: made[0]._links[1, CHANNEL].queued > 0)
        made[1].cancel()
        made[1].adopt(4, lost=())
        made[1].post(CHANNEL, 3, Part(0, data(8)))
        with pytest.raises(EpochChanged, match="worker 1 is in epoch 4 already, this worker in 0"):
            sending()
        made[0].adopt(4, lost=())
        got = room(8)
        made[0].exchange(CHANNEL, 3, [], [Part(1, got)])
        assert got == data(8)
        check_works(made, [(0, 1)], 5)


def test_an_objection_behind_frames_of_another_operation_is_heard(tmp_path: Path) -> None:
    """Worker 0 sends a large part and expects nothing; worker 1 sends, and expects, another operation's."""
    with transports(2, tmp_path) as made:
        link_all(made, [(0, 1)])
        outcomes = all_at_once(
            [
                lambda: made[0].exchange(CHANNEL, 2, [Part(1, data(40 * MIB))], []),
                lambda: made[1].exchange(CHANNEL, 3, [Part(0, data(20 * MIB))], [Part(0, room(20 * MIB))]),
            ]
        )
        assert all(isinstance(outcome, ProtocolError) for outcome in outcomes)
        assert str(outcomes[0]) == f"worker 1 noticed: {outcomes[1]}"
        check_works(made, [(0, 1)])


@pytest.mark.parametrize("tag", [2, 3])
def test_an_objection_that_was_read_together_with_what_came_before_it_is_heard(tmp_path: Path, tag: int) -> None:
    """The last part, or with tag 3 also a frame of another operation, and the objection are there at once."""
    with transports(2, tmp_path) as made:
        link_all(made, [(0, 1)])
        for each in range(2, tag + 1):
            made[1].post(CHANNEL, each, Part(0, data(8)))
        made[1]._break_off(CHANNEL, [], ProtocolError("by the test"))
        time.sleep(0.2)  # all of it has arrived
        with pytest.raises(ProtocolError, match="worker 1 noticed: by the test"):
            made[0].exchange(CHANNEL, 2, [Part(1, data(40 * MIB))], [Part(1, room(8))], limit_s=5)
        check_works(made, [(0, 1)])


@pytest.mark.parametrize("size", [8, MIB])
def test_an_objection_behind_a_frame_of_the_next_round_is_heard(tmp_path: Path, size: int) -> None:
    """The frame has the tag of the program that is under way, in which worker 0 still sends."""
    there, back = Region(0, 0, 40 * MIB), Region(1, 0, size)
    program = Program((Round((Transfer(1, there),), ()), Round((), (Transfer(1, back),))))
    with transports(2, tmp_path) as made:
        link_all(made, [(0, 1)])
        made[1].post(CHANNEL, 2, Part(0, data(size)))
        running = in_thread(
            lambda: made[0].run(CHANNEL, 2, program, [memoryview(bytearray(40 * MIB)), room(size)], limit_s=5)
        )
        wait_until(lambda: made[0]._links[1, CHANNEL].queued > 0)
        made[1]._break_off(CHANNEL, [], ProtocolError("by the test"))
        with pytest.raises(ProtocolError, match="worker 1 noticed: by the test"):
            running()
        check_works(made, [(0, 1)])


def test_a_newer_epoch_that_was_heard_of_once_is_heard_of_again(tmp_path: Path) -> None:
    """Its frame is the current one of the link, so the socket is empty."""
    with transports(2, tmp_path) as made:
        link_all(made, [(0, 1)])
        made[1].cancel()
        made[1].adopt(4, lost=())
        made[1].post(CHANNEL, 3, Part(0, data(0)))
        for epoch in (1, 2):
            with pytest.raises(EpochChanged, match="worker 1 is in epoch 4 already"):
                made[0].exchange(CHANNEL, 2, [Part(1, data(40 * MIB))], [], limit_s=5)
            made[0].adopt(epoch, lost=())
        made[0].cancel()
        made[0].adopt(4, lost=())
        made[0].exchange(CHANNEL, 3, [], [Part(1, room(0))])
        check_works(made, [(0, 1)], 5)


def test_two_that_only_send_to_each_other_notice(tmp_path: Path) -> None:
    """As in a broadcast with two roots."""
    with transports(2, tmp_path) as made:
        link_all(made, [(0, 1)])
        outcomes = all_at_once(
            [lambda at=at: made[at].exchange(CHANNEL, 2, [Part(1 - at, data(40 * MIB))], []) for at in range(2)]
        )
        assert all(isinstance(outcome, ProtocolError) for outcome in outcomes)
        assert any("expected tag 0x2 with 0 bytes" in str(outcome) for outcome in outcomes)
        check_works(made, [(0, 1)])


def test_posts_of_later_operations_do_not_disturb_who_is_sending(tmp_path: Path) -> None:
    with transports(2, tmp_path) as made:
        link_all(made, [(0, 1)])
        for tag in range(10, 20):
            made[1].post(CHANNEL, tag, Part(0, data(MIB, tag)))
        sending = in_thread(lambda: made[0].exchange(CHANNEL, 2, [Part(1, data(40 * MIB))], []))
        wait_until(lambda: made[0]._links[1, CHANNEL].queued > 0)
        got = room(40 * MIB)
        made[1].exchange(CHANNEL, 2, [], [Part(0, got)])
        sending()
        assert got == data(40 * MIB)
        for tag in range(10, 20):
            got = room(MIB)
            made[0].exchange(CHANNEL, tag, [], [Part(1, got)])
            assert got == data(MIB, tag)
        check_works(made, [(0, 1)])


def test_other_channels_are_not_told(tmp_path: Path) -> None:
    with transports(2, tmp_path) as made:
        made[1].post(OTHER, 1, Part(0, data(8)))
        made[1].post(CHANNEL, 1, Part(0, data(8)))
        with pytest.raises(ProtocolError):
            made[0].exchange(CHANNEL, 2, [], [Part(1, room(8))])
        made[1].post(OTHER, 1, Part(0, data(8)))
        with pytest.raises(ProtocolError, match="worker 0 noticed"):
            made[1].exchange(CHANNEL, 2, [], [Part(0, room(8))])


def test_an_objection_that_is_too_long_is_no_frame(tmp_path: Path) -> None:
    with transports(2, tmp_path) as made:
        link_all(made, [(0, 1)])
        made[1]._links[0, CHANNEL].sock.send(HEADER.pack(MAGIC, 0, OBJECTION, OBJECTION_BYTES + 1))
        with pytest.raises(PeerLost, match="no frame"):
            made[0].exchange(CHANNEL, 2, [], [Part(1, room(8))])


# ---------------------------------------------------------------- limits


def blocked(made: list[SocketTransport], kind: str) -> tuple[list[Part], list[Part]]:
    if kind == "receive":
        return [], [Part(1, room(8)), Part(2, room(8))]
    return [Part(1, data(40 * MIB)), Part(2, data(8))], []


@pytest.mark.parametrize(("kind", "peers"), [("receive", "1, 2"), ("send", "1")])
def test_a_limit_names_the_peers_that_were_not_done(tmp_path: Path, kind: str, peers: str) -> None:
    with transports(3, tmp_path) as made:
        link_all(made, [(0, 1), (0, 2)])
        sends, receives = blocked(made, kind)
        started = time.monotonic()
        with pytest.raises(TimeoutError, match=f"not done within 0.05 s; still waiting for workers {peers}$"):
            made[0].exchange(CHANNEL, 2, sends, receives, limit_s=0.05)
        assert 0.04 < time.monotonic() - started < 5
        with pytest.raises(EpochChanged, match=r"not done within 0\.05 s"):
            made[0].post(CHANNEL, 2, Part(1, data(1)))
        check_works(made, [(0, 1), (0, 2)])


def test_a_limit_that_is_kept_changes_nothing(tmp_path: Path) -> None:
    with transports(2, tmp_path) as made:
        rooms = [room(MIB), room(MIB)]
        calls: list[Callable[[], object]] = [
            lambda at=at: made[at].exchange(  # type: ignore[misc]
                CHANNEL, 1, [Part(1 - at, data(MIB, at))], [Part(1 - at, rooms[at])], limit_s=20
            )
            for at in range(2)
        ]
        assert all_at_once(calls) == [None, None]
        assert rooms == [data(MIB, 1), data(MIB, 0)]
