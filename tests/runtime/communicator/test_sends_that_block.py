"""A send that nobody takes ends when operations of the same group were mixed up elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megatron_elas.runtime.communicator.channels import INTRODUCTION, POINT_TO_POINT, related_to
from megatron_elas.runtime.communicator.point_to_point import LEND_BYTES, Mailbox
from megatron_elas.runtime.transport.base import Part, ProtocolError
from megatron_elas.runtime.transport.sockets import SocketTransport
from tests.runtime.transport.conftest import engine  # noqa: F401
from tests.runtime.transport.together import data, in_thread, next_epoch, room, transports
from tests.runtime.workers import wait_until

GROUP = 3
CHANNEL = GROUP + POINT_TO_POINT

pytestmark = pytest.mark.usefixtures("engine")


@contextlib.contextmanager
def mailboxes(folder: Path) -> Iterator[tuple[list[SocketTransport], list[Mailbox]]]:
    with transports(3, folder) as made:
        boxes = [Mailbox(transport, "the group".__str__) for transport in made]
        for me, (transport, box) in enumerate(zip(made, boxes, strict=True)):
            transport.relate_channels(related_to)
            box.reset(range(3), me, CHANNEL)
        yield made, boxes
        for transport, box in zip(made, boxes, strict=True):
            transport.cancel()
            box.drop()


def mix_up(made: list[SocketTransport], channel: int) -> None:
    """Worker 2 calls another operation than worker 1."""
    made[2].post(channel, 77, Part(1, data(8)))
    with pytest.raises(ProtocolError, match="expected tag 0x1"):
        made[1].exchange(channel, 1, [], [Part(2, room(8))])


def large() -> torch.Tensor:
    return torch.ones(10 * LEND_BYTES, dtype=torch.uint8)


def send_that_blocks(made: list[SocketTransport], boxes: list[Mailbox]) -> Callable[[], object]:
    """Worker 0 waits for a send to worker 1."""
    join = in_thread(lambda: boxes[0].send(large(), 1, 0).wait())
    wait_until(lambda: (1, CHANNEL) in made[0]._links and made[0]._links[1, CHANNEL].queued > 0)
    wait_until(lambda: (0, CHANNEL) in made[1]._links)
    return join


@pytest.mark.parametrize("channel", [GROUP, CHANNEL])
def test_who_waits_for_a_large_send_hears_that_operations_were_mixed_up(tmp_path: Path, channel: int) -> None:
    with mailboxes(tmp_path) as (made, boxes):
        join = send_that_blocks(made, boxes)
        mix_up(made, channel)
        with pytest.raises(ProtocolError, match="worker 1 noticed: worker 2"):
            join()
        for transport in made:
            transport.cancel()
        for box in boxes:
            box.drop()
        next_epoch(made)
        tensor, got = large(), torch.zeros_like(large())
        join = in_thread(lambda: boxes[0].send(tensor, 1, 0).wait())
        assert boxes[1].receive(got, 0, 0).wait()
        join()
        assert torch.equal(tensor, got)


def test_a_send_ends_when_another_operation_of_its_worker_hears_it_and_who_receives_it_is_told(tmp_path: Path) -> None:
    """Worker 1 has read half of the send of worker 0, which hears an objection in a collective."""
    with mailboxes(tmp_path) as (made, _):
        made[0].post(GROUP, 0, Part(2, data(1)))
        made[2].exchange(GROUP, 0, [], [Part(0, room(1))])
        sending = in_thread(lambda: made[0].send(CHANNEL, 2, Part(1, data(20 * LEND_BYTES))))
        wait_until(lambda: (1, CHANNEL) in made[0]._links and made[0]._links[1, CHANNEL].queued > 0)
        collective = in_thread(lambda: made[0].exchange(GROUP, 1, [], [Part(2, room(8))]))
        made[2]._break_off(GROUP, [], ProtocolError("by the test"))
        for join in (collective, sending):
            with pytest.raises(ProtocolError, match="worker 2 noticed: by the test"):
                join()
        got = room(20 * LEND_BYTES)
        with pytest.raises(ProtocolError, match="worker 2 noticed: by the test"):
            made[1].exchange(CHANNEL, 2, [], [Part(0, got)], limit_s=5)
        arrived = bytes(got).rstrip(b"\0")
        assert arrived == bytes(data(20 * LEND_BYTES)[: len(arrived)])


def test_a_slow_receiver_is_waited_for_and_what_comes_meanwhile_is_kept(tmp_path: Path) -> None:
    with mailboxes(tmp_path) as (made, boxes):
        join = send_that_blocks(made, boxes)
        wait_until(lambda: boxes[0].inboxes[1].reading)
        message = torch.arange(8)
        boxes[1].send(message, 0, 5)
        wait_until(lambda: bool(boxes[0].inboxes[1].unclaimed))
        with pytest.raises(TimeoutError, match=r"a send was not taken by its receiver within 0\.3 s"):
            boxes[0].send(large(), 1, 1).wait(timedelta(seconds=0.3))
        for tag in range(2):
            got = torch.zeros_like(large())
            assert boxes[1].receive(got, 0, tag).wait()
            assert torch.equal(got, large())
        join()
        got = torch.zeros_like(message)
        assert boxes[0].receive(got, 1, 5).wait()
        assert torch.equal(got, message)


def test_an_interrupt_right_before_the_reading_blocks_no_later_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mailboxes(tmp_path) as (made, boxes):

        def interrupt(rank: int) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(boxes[0], "_read_one", interrupt)
            with pytest.raises(KeyboardInterrupt):
                boxes[0].receive(torch.zeros(8), 1, 0).wait()
        assert boxes[0].inboxes[1].reading
        next_epoch(made)
        for box in boxes:
            box.drop()
        message, got = torch.arange(8), torch.zeros(8, dtype=torch.int64)
        boxes[1].send(message, 0, 0)
        assert in_thread(lambda: boxes[0].receive(got, 1, 0).wait())()
        assert torch.equal(message, got)


def test_collectives_and_point_to_point_of_a_group_are_related() -> None:
    for group in (0, GROUP, POINT_TO_POINT - 1):
        assert related_to(group) == (group + POINT_TO_POINT,)
        assert related_to(group + POINT_TO_POINT) == (group,)
    assert related_to(INTRODUCTION) == related_to(1 << 40) == ()
