"""Sends and receives of one group, matched by tag.

A message is two parts on the group's point-to-point channel: an envelope with the caller's tag and the length, then
the bytes. So a receiver knows what is coming before it has to say where to: messages of one tag are received in the
order they were sent, and those of different tags in any order. What nobody has asked for yet is kept until somebody
does; what the sender's socket does not take at once is kept by the sender. So a send of less than ``LEND_BYTES`` never
waits for the receiver. A larger one is not copied: a thread sends it, and waiting for it is waiting until the receiver
has taken it.

Who reads: of the threads that wait for a message of one rank, one reads the link and hands out what arrives, also to
the others. A thread of its own does so for receives that nobody waits for yet, as soon as anybody asks whether they are
done, for large ones, and for those that take a message from any source.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor

from megatron_elas.runtime.communicator.buffers import as_bytes, flatten, write_back
from megatron_elas.runtime.communicator.signatures import explain
from megatron_elas.runtime.communicator.work import CompletedWork, ElasticWork, seconds
from megatron_elas.runtime.transport.base import Part, ProtocolError, Transport
from megatron_elas.spec.errors import EpochChanged

_ENVELOPE = struct.Struct("<qQ")
ENVELOPE_TAG, PAYLOAD_TAG = 1, 2
"""Of the transport; kind "point-to-point" in ``signatures``."""

AT_ONCE_BYTES = 1 << 20
"""Receives from this size on are read by a thread as soon as they are asked for: handing them over costs less than the
time that they take."""

LEND_BYTES = 2 << 20
"""Sends from this size on are not copied: fresh memory for the copy costs more than a thread."""

LISTEN_AFTER_S = 0.2
"""Who waits so long for a send has a thread read what its receiver says, which may have ended the epoch."""


class Send(ElasticWork):
    """A send that a thread does; its tensor may not be changed before it has ended."""

    def __init__(self, box: Mailbox, tensor: Tensor, rank: int) -> None:
        super().__init__([tensor])
        self.rank = rank
        self._box = box

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the tensor may be changed.

        Raises:
            TimeoutError: It takes longer than a positive ``timeout``; the send goes on.
        """
        self._box.wait_for_send(self, seconds(timeout))
        return self._raise()


class _Outbox:
    """What is to be sent to one rank by its thread."""

    __slots__ = ("queue", "thread")

    def __init__(self) -> None:
        self.queue: deque[tuple[memoryview, Tensor, Send]] = deque()
        """Envelope, flat tensor, work; the first is being sent."""
        self.thread: threading.Thread | None = None


class Receive(ElasticWork):
    """A receive: waits for its message, and reads the link if nobody else does."""

    def __init__(self, box: Mailbox, tensor: Tensor, source: int | None, tag: int, number: int) -> None:
        """``source`` is a group rank, None for any; ``number`` is the place in the order of asking."""
        super().__init__([tensor])
        self.tensor = tensor
        self.source = source
        self.tag = tag
        self.number = number
        self._box = box

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until received.

        Raises:
            TimeoutError: It takes longer than a positive ``timeout``; the receive goes on.
        """
        if not self._done:
            self._box.wait_for(self, seconds(timeout))
        return self._raise()

    def is_completed(self) -> bool:
        """True when it was received. Asking starts a thread that receives."""
        if not self._done:
            self._box.receive_in_background(self)
        return self._done

    def _start(self) -> None:
        self._box.receive_in_background(self)

    def source_rank(self) -> int:
        """Group rank of the sender; -1 while it is not known."""
        return -1 if self.source is None else self.source

    _source_rank = source_rank


class _Inbox:
    """Messages of one rank."""

    __slots__ = ("listeners", "reading", "thread", "unclaimed", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Receive] = deque()
        """Asked for and not arrived, in the order of asking."""
        self.unclaimed: deque[tuple[int, Tensor]] = deque()
        """Tag and bytes of what has arrived and was not asked for, in the order of arrival."""
        self.listeners = 0
        """Who waits for sends to this rank."""
        self.reading = False
        """Some thread reads the link."""
        self.thread: threading.Thread | None = None
        """The one that reads without anybody waiting."""


class _Locked:
    """Holds a mailbox's lock, and after it tells futures what has ended: their callbacks may call anything."""

    __slots__ = ("_box",)

    def __init__(self, box: Mailbox) -> None:
        self._box = box

    def __enter__(self) -> None:
        self._box.changed.acquire()

    def __exit__(self, *_: object) -> None:
        ended, self._box.ended = self._box.ended, []
        self._box.changed.release()
        for work in ended:
            work.settle()


class Mailbox:
    """All messages of one group of one worker. Thread-safe, except ``reset``."""

    def __init__(self, transport: Transport, describe: Callable[[], str]) -> None:
        """``describe`` names the group in messages."""
        self._transport = transport
        self._describe = describe
        self.changed = threading.Condition(threading.Lock())
        self.ended: list[ElasticWork] = []
        """Operations that have ended since the lock was taken."""
        self._locked = _Locked(self)
        self._epoch = transport.epoch
        self.inboxes: defaultdict[int, _Inbox] = defaultdict(_Inbox)
        self.from_any: deque[Receive] = deque()
        """Receives from any source that are asked for."""
        self._asked = 0
        self._sending: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self.outboxes: defaultdict[int, _Outbox] = defaultdict(_Outbox)
        self._members: tuple[int, ...] = ()
        self._me = 0
        self._channel = 0

    def reset(self, members: Sequence[int], me: int, channel: int) -> None:
        """Start anew with other members. No operation is in flight."""
        self.drop()
        self.inboxes.clear()  # they go by rank
        self.outboxes.clear()
        self._sending.clear()
        self._members, self._me, self._channel = tuple(members), me, channel

    def drop(self) -> None:
        """Forget what was asked for and what nobody asked for, and wait for the threads that read.

        To be called when the epoch has ended, so that these end.
        """
        with self._locked:
            self._fail(lambda _: True, EpochChanged(f"{self._describe()}: a receive was dropped when its epoch ended"))
            threads = [inbox.thread for inbox in self.inboxes.values() if inbox.thread is not None]
            threads += [outbox.thread for outbox in self.outboxes.values() if outbox.thread is not None]
            for inbox in self.inboxes.values():
                inbox.unclaimed.clear()
                inbox.reading = False  # an interrupt may have come just before the reading
            self.changed.notify_all()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    # ------------------------------------------------------------------ sending

    def send(self, tensor: Tensor, rank: int, tag: int) -> ElasticWork:
        """Send; see the head of this module for when the tensor may be changed."""
        flat = flatten(tensor)
        if rank == self._me:
            with self._locked:
                self._enter_epoch()
                self._deliver_own(tag, flat)
            return CompletedWork([tensor])
        peer, payload = self._members[rank], as_bytes(flat)
        envelope = memoryview(_ENVELOPE.pack(tag, len(payload)))
        with self._sending[rank]:
            outbox = self.outboxes[rank]
            if len(payload) >= LEND_BYTES or outbox.queue:
                return self._lend(rank, outbox, envelope, flat, tensor)
            self._transport.post(self._channel, ENVELOPE_TAG, Part(peer, envelope))
            self._transport.post(self._channel, PAYLOAD_TAG, Part(peer, payload))
        return CompletedWork([tensor])

    def _lend(self, rank: int, outbox: _Outbox, envelope: memoryview, flat: Tensor, tensor: Tensor) -> Send:
        work = Send(self, tensor, rank)
        if self._transport.cancelled:
            raise EpochChanged(f"epoch {self._transport.epoch} ended on worker {self._transport.worker}")
        with self._locked:
            outbox.queue.append((envelope, flat, work))
            if outbox.thread is None:
                name = f"elastic-send-{self._channel:x}-{rank}"
                outbox.thread = threading.Thread(target=self._send_queued, args=(rank, outbox), name=name, daemon=True)
                outbox.thread.start()
        return work

    def _send_queued(self, rank: int, outbox: _Outbox) -> None:
        peer = self._members[rank]
        error: BaseException | None = None
        while True:
            with self._locked:
                if not outbox.queue:
                    outbox.thread = None
                    return
                envelope, flat, work = outbox.queue[0]
            if error is None:
                try:
                    self._transport.send(self._channel, ENVELOPE_TAG, Part(peer, envelope))
                    self._transport.send(self._channel, PAYLOAD_TAG, Part(peer, as_bytes(flat)))
                except BaseException as raised:  # surfaces in wait(), on the callers' threads
                    raised.add_note(f"in send to rank {rank} of {self._describe()}")
                    error = raised.with_traceback(None)
            with self._locked:
                outbox.queue.popleft()
                self._end(work, error)
                self.changed.notify_all()

    def wait_for_send(self, work: Send, limit_s: float | None) -> None:
        """Return when ``work`` is done."""
        quietly_s = LISTEN_AFTER_S if limit_s is None else min(limit_s, LISTEN_AFTER_S)
        with self._locked:
            done = self.changed.wait_for(work.is_completed, quietly_s)
            if not done and limit_s != quietly_s:
                inbox = self.inboxes[work.rank]
                inbox.listeners += 1
                try:
                    self._start_reader(work.rank)
                    done = self.changed.wait_for(work.is_completed, None if limit_s is None else limit_s - quietly_s)
                finally:
                    inbox.listeners -= 1
            if not done:
                raise TimeoutError(f"{self._describe()}: a send was not taken by its receiver within {limit_s:g} s")

    def _deliver_own(self, tag: int, flat: Tensor) -> None:
        receive = self._claim(self._me, tag)
        data = flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
        if receive is None:
            self.inboxes[self._me].unclaimed.append((tag, data.clone()))
        else:
            self._finish_with(receive, data)

    # ------------------------------------------------------------------ receiving

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Receive:
        """Ask for a message of a group rank, or of any (None)."""
        with self._locked:
            self._enter_epoch()
            self._asked += 1
            work = Receive(self, tensor, source, tag, self._asked)
            sources = range(len(self._members)) if source is None else (source,)
            for rank in sources:
                data = self._take_unclaimed(rank, tag)
                if data is not None:
                    work.source = rank
                    self._finish_with(work, data)
                    return work
            if source is None:
                self.from_any.append(work)
            else:
                self.inboxes[source].waiting.append(work)
        if source is None or tensor.nbytes >= AT_ONCE_BYTES:
            self.receive_in_background(work)
        return work

    def wait_for(self, work: Receive, limit_s: float | None) -> None:
        """Return when ``work`` is done; reads the link if nobody does and there is no limit."""
        if work.source is None or limit_s is not None:
            self.receive_in_background(work)
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while True:
            with self._locked:
                self._enter_epoch()
                while not work._done and (
                    work.source is None
                    or work.source == self._me
                    or deadline is not None
                    or self.inboxes[work.source].reading
                ):
                    left_s = None if deadline is None else deadline - time.monotonic()
                    if left_s is not None and left_s <= 0:
                        raise TimeoutError(
                            f"{self._describe()}: nothing with tag {work.tag} came from "
                            f"{'any rank' if work.source is None else f'rank {work.source}'} within {limit_s:g} s"
                        )
                    self.changed.wait(left_s)
                if work._done:
                    return
                assert work.source is not None
                source = work.source
                self.inboxes[source].reading = True
            self._read_one(source)

    def receive_in_background(self, work: Receive) -> None:
        """See to it that some thread reads what ``work`` waits for."""
        with self._locked:
            if work._done:
                return
            for rank in range(len(self._members)) if work.source is None else (work.source,):
                if rank != self._me:
                    self._start_reader(rank)

    def _start_reader(self, rank: int) -> None:
        """Unless there is one. The caller holds the lock."""
        inbox = self.inboxes[rank]
        if inbox.thread is None:
            name = f"elastic-receive-{self._channel:x}-{rank}"
            inbox.thread = threading.Thread(target=self._read_while_asked, args=(rank,), name=name, daemon=True)
            inbox.thread.start()

    def _read_while_asked(self, rank: int) -> None:
        inbox = self.inboxes[rank]
        failed = False
        while True:
            with self._locked:
                while inbox.reading:
                    self.changed.wait()
                if not inbox.waiting and not self.from_any and (failed or not inbox.listeners):
                    inbox.thread = None
                    return
                inbox.reading = True
            failed = not self._read_one(rank)

    def _read_one(self, rank: int) -> bool:
        """Read a message and give it to whom it is for. Errors go to all who wait for this rank; then it is False."""
        error: BaseException | None = None
        try:
            self._read(rank)
        except EpochChanged as raised:
            raised.add_note(f"in recv from rank {rank} of {self._describe()}")
            error = raised.with_traceback(None)
        except ProtocolError as raised:
            error = ProtocolError(
                f"recv from rank {rank} in {self._describe()}, epoch {self._epoch}: {explain(str(raised))}"
            )
        except BaseException as raised:
            error = EpochChanged(f"a receive was broken off by {type(raised).__name__}")
            raise
        finally:
            with self._locked:
                self.inboxes[rank].reading = False
                if error is not None:
                    self._fail(lambda work: work.source in (rank, None), error)
                self.changed.notify_all()
        return error is None

    def _read(self, rank: int) -> None:
        peer = self._members[rank]
        envelope = bytearray(_ENVELOPE.size)
        self._transport.exchange(self._channel, ENVELOPE_TAG, (), (Part(peer, memoryview(envelope)),))
        tag, size = _ENVELOPE.unpack(envelope)
        with self._locked:
            work = self._claim(rank, tag)
        if work is not None and work.tensor.nbytes == size and work.tensor.is_contiguous():
            self._fill(work, peer, as_bytes(work.tensor))
            with self._locked:
                self._end(work, None)
            return
        data = torch.empty(size, dtype=torch.uint8)
        if work is not None:
            self._fill(work, peer, as_bytes(data))
            with self._locked:
                self._finish_with(work, data)
            return
        self._transport.exchange(self._channel, PAYLOAD_TAG, (), (Part(peer, as_bytes(data)),))
        with self._locked:
            work = self._claim(rank, tag)  # asked for meanwhile
            if work is None:
                self.inboxes[rank].unclaimed.append((tag, data))
            else:
                self._finish_with(work, data)

    def _fill(self, work: Receive, peer: int, buffer: memoryview) -> None:
        try:
            self._transport.exchange(self._channel, PAYLOAD_TAG, (), (Part(peer, buffer),))
        except BaseException as error:
            with self._locked:
                self._end(work, error.with_traceback(None))  # it is in no list any more
            raise

    # ------------------------------------------------------------------ matching; the caller holds the lock

    def _claim(self, rank: int, tag: int) -> Receive | None:
        """Take the receive that a message is for out of its list: the one asked for first."""
        inbox = self.inboxes[rank]
        named = next((work for work in inbox.waiting if work.tag == tag), None)
        open_one = next((work for work in self.from_any if work.tag == tag), None)
        if named is not None and (open_one is None or named.number < open_one.number):
            inbox.waiting.remove(named)
            return named
        if open_one is not None:
            self.from_any.remove(open_one)
            open_one.source = rank
        return open_one

    def _take_unclaimed(self, rank: int, tag: int) -> Tensor | None:
        messages = self.inboxes[rank].unclaimed if rank in self.inboxes else ()
        for at, (theirs, data) in enumerate(messages):
            if theirs == tag:
                del self.inboxes[rank].unclaimed[at]
                return data
        return None

    def _finish_with(self, work: Receive, data: Tensor) -> None:
        tensor = work.tensor
        if data.numel() != tensor.nbytes:
            error = ProtocolError(
                f"recv in {self._describe()}, epoch {self._epoch}: rank {work.source} sent {data.numel()} bytes with "
                f"tag {work.tag}, rank {self._me} expected {tensor.nbytes} ({tensor.numel()} x {tensor.dtype})"
            )
            self._end(work, error)
        else:
            if data.numel():
                flat = flatten(tensor)
                flat.view(torch.uint8).copy_(data)
                write_back(flat, tensor)
            self._end(work, None)
        self.changed.notify_all()

    def _end(self, work: ElasticWork, error: BaseException | None) -> None:
        work.complete(error)
        self.ended.append(work)

    def _enter_epoch(self) -> None:
        """Forget what belongs to an epoch that has ended."""
        if self._epoch != self._transport.epoch:
            self._fail(
                lambda _: True, EpochChanged(f"{self._describe()}: a receive of epoch {self._epoch} was dropped")
            )
            for inbox in self.inboxes.values():
                inbox.unclaimed.clear()
            self._epoch = self._transport.epoch

    def _fail(self, concerns: Callable[[Receive], bool], error: BaseException) -> None:
        for receives in (*(inbox.waiting for inbox in self.inboxes.values()), self.from_any):
            for work in [work for work in receives if concerns(work)]:
                receives.remove(work)
                self._end(work, error)
        self.changed.notify_all()
