"""What is repeated on a new connection."""

from __future__ import annotations

from megatron_elas.control.messages import FaultFired, Finished, Heartbeat
from megatron_elas.control.outbox import Outbox

FIRED = [FaultFired(worker=0, fault="x", at_s=float(number)) for number in range(3)]


def filled() -> Outbox:
    outbox = Outbox()
    for message in FIRED:
        outbox.keep(Heartbeat(worker=0, epoch=0, step=0))
        outbox.keep(message)
    return outbox


def test_what_was_not_noted_is_repeated_in_order_and_heartbeats_are_not() -> None:
    outbox = filled()
    outbox.note(1)
    assert outbox.repeat() == tuple(FIRED[1:])


def test_counting_begins_anew_with_each_connection() -> None:
    outbox = filled()
    outbox.note(2)
    assert outbox.repeat() == (FIRED[2],)
    outbox.keep(Finished(worker=0))
    outbox.note(1)
    assert outbox.repeat() == (Finished(worker=0),)
    outbox.note(1)
    assert outbox.empty


def test_counts_may_be_said_twice_or_skipped() -> None:
    outbox = filled()
    outbox.note(2)
    outbox.note(1)
    outbox.note(2)
    assert not outbox.empty
    outbox.note(3)
    assert outbox.empty
