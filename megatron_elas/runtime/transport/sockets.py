"""The transport in pure Python over non-blocking stream sockets; ``frame`` has the wire format.

How links come about: see ``connections``.

Ending: ``cancel`` makes ``_wake`` readable, on which every wait polls. The first operation that fails in an epoch
poisons the transport: no later one may send frames, or peers would read them as answers to another operation.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from megatron_elas.runtime.transport.base import Part, ProtocolError
from megatron_elas.runtime.transport.connections import Connections
from megatron_elas.runtime.transport.link import BLOCKED, DONE, Link
from megatron_elas.runtime.transport.posts import PostSender
from megatron_elas.runtime.transport.program import Copy, Program, Region
from megatron_elas.spec.errors import EpochChanged, PeerLost


class _Failure(NamedTuple):
    """What ended the epoch here. Not the exception itself: its traceback would keep the caller's tensors alive."""

    peer: int | None
    why: str


class _Waiting:
    """What an exchange still has to do on one link."""

    __slots__ = ("events", "link", "parts", "ticket")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.ticket = 0
        self.parts: deque[memoryview] = deque()
        self.events = 0


class SocketTransport:
    """Implements ``base.Transport``. Make it after forking: it has threads.

    Different threads may use it at the same time for different (peer, channel) pairs.
    """

    def __init__(self, worker: int, listen: str, token: str) -> None:
        """Listen and start accepting.

        Args:
            worker: Own worker id.
            listen: ``unix:/path`` (the file must not exist) or ``tcp:host:port``; port 0 picks a free one, and the
                host must be one that peers can dial.
            token: Secret of the job; peers with another one are refused.

        Raises:
            ValueError: The address cannot work.
            OSError: It is taken.
        """
        self._worker = worker
        self._epoch = 0
        self._cancelled = False
        self._closed = False
        self._failure: _Failure | None = None
        self._scratches = threading.local()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._posts = PostSender(f"elastic-posts-{worker}", self._poison)
        try:
            self._connections = Connections(self, listen, token)
        except BaseException:
            self._posts.close()
            os.close(self._wake)
            raise
        self._links = self._connections.links
        self._changed = self._connections.changed

    # ------------------------------------------------------------------ state

    @property
    def worker(self) -> int:
        """Own worker id."""
        return self._worker

    @property
    def address(self) -> str:
        """Where peers dial this worker."""
        return self._connections.address

    @property
    def epoch(self) -> int:
        """Epoch that frames carry now."""
        return self._epoch

    @property
    def cancelled(self) -> bool:
        """True between ``cancel`` and ``adopt``."""
        return self._cancelled

    def set_addresses(self, addresses: Mapping[int, str]) -> None:
        """Say where peers are. A lost worker counts as living again when its address is a new one."""
        self._connections.set_addresses(addresses)

    @property
    def wake_fd(self) -> int:
        """Readable while cancelled."""
        return self._wake

    # ------------------------------------------------------------------ operations

    def exchange(
        self,
        channel: int,
        tag: int,
        sends: Sequence[Part],
        receives: Sequence[Part],
        limit_s: float | None = None,
    ) -> None:
        """See ``base.Transport``."""
        if self._cancelled or self._failure is not None:
            raise self.refusal()
        epoch = self._epoch
        links = self._links
        waiting: dict[int, _Waiting] = {}
        finished = False
        try:
            for peer, buffer in sends:
                link = links.get((peer, channel)) or self._connections.open(peer, channel)
                ticket = link.send(epoch, tag, buffer)
                if ticket:
                    waits = waiting.get(link.fd)
                    if waits is None:
                        waits = waiting[link.fd] = _Waiting(link)
                    waits.ticket = ticket
            for peer, buffer in receives:
                link = links.get((peer, channel)) or self._connections.open(peer, channel)
                waits = waiting.get(link.fd)
                if waits is None:
                    waits = waiting[link.fd] = _Waiting(link)
                waits.parts.append(buffer)
            if waiting:
                self._wait(waiting, epoch, tag)
            finished = True
        except (EpochChanged, ProtocolError) as error:
            self._poison(error)
            raise
        finally:
            if not finished:
                self._give_up(channel, sends)

    def run(
        self,
        channel: int,
        tag: int,
        program: Program,
        buffers: Sequence[memoryview],
        limit_s: float | None = None,
    ) -> None:
        """See ``base.Transport``."""
        places = [*buffers, self._scratch(program.scratch_bytes)]  # SCRATCH is the last

        def at(region: Region) -> memoryview:
            return places[region.buffer][region.start : region.start + region.size]

        for sends, receives, then in program.rounds:
            self.exchange(
                channel,
                tag,
                [Part(peer, at(region)) for peer, region in sends],
                [Part(peer, at(region)) for peer, region in receives],
            )
            for step in then:
                if isinstance(step, Copy):
                    if step.source != step.target:
                        at(step.target)[:] = at(step.source)
                else:
                    assert program.reducer is not None, "a program that reduces needs a reducer"
                    program.reducer.reduce([at(source) for source in step.sources], at(step.target))

    def _scratch(self, size: int) -> memoryview:
        """Memory of the calling thread, kept: fresh memory costs a page fault per 4 KiB."""
        have: bytearray | None = getattr(self._scratches, "bytes", None)
        if have is None or len(have) < size:
            have = self._scratches.bytes = bytearray(max(size, 1 << 16))
        return memoryview(have)

    def post(self, channel: int, tag: int, part: Part) -> None:
        """See ``base.Transport``. What peers do not receive stays in this worker's memory."""
        if self._cancelled or self._failure is not None:
            raise self.refusal()
        peer, buffer = part
        try:
            link = self._links.get((peer, channel)) or self._connections.open(peer, channel)
            if not link.post(self._epoch, tag, buffer):
                self._posts.watch(link)
        except EpochChanged as error:
            self._poison(error)
            raise

    def _wait(self, waiting: dict[int, _Waiting], epoch: int, tag: int) -> None:
        """Receive, and send what is queued, until nothing waits."""
        poller: select.poll | None = None
        ready = list(waiting)
        while True:
            for fd in ready:
                waits = waiting.get(fd)
                if waits is None:
                    continue
                self._advance(waits, epoch, tag)
                events = (select.POLLIN if waits.parts else 0) | (select.POLLOUT if waits.ticket else 0)
                if not events:
                    del waiting[fd]
                    if poller is not None:
                        poller.unregister(fd)
                elif poller is not None and events != waits.events:
                    poller.modify(fd, events)
                waits.events = events
            if not waiting:
                return
            if self._cancelled:
                raise self.refusal()
            if poller is None:
                poller = select.poll()
                poller.register(self._wake, select.POLLIN)
                for fd, waits in waiting.items():
                    poller.register(fd, waits.events)
            ready = [fd for fd, _ in poller.poll()]

    def _advance(self, waits: _Waiting, epoch: int, tag: int) -> None:
        link, parts = waits.link, waits.parts
        if waits.ticket and (link.pump() or link.flushed(waits.ticket)):
            waits.ticket = 0
        while parts:
            state = link.receive(epoch, tag, parts[0])
            if state == DONE:
                parts.popleft()
            elif state == BLOCKED:
                return
            elif self._cancelled:
                raise self.refusal()

    # ------------------------------------------------------------------ failing

    def cancel(self) -> None:
        """End every operation now; thread-safe, returns at once, may be called again."""
        self._cancelled = True
        with self._changed:
            if not self._closed:
                os.eventfd_write(self._wake, 1)
            self._changed.notify_all()

    def _poison(self, error: BaseException) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = _Failure(error.peer if isinstance(error, PeerLost) else None, str(error))

    def refusal(self) -> EpochChanged:
        """The error of an operation that may not run: of the kind that ended the epoch."""
        failure = self._failure
        if failure is None:
            return EpochChanged(f"epoch {self._epoch} was cancelled on worker {self._worker}")
        why = f"epoch {self._epoch} ended on worker {self._worker}: {failure.why}"
        return EpochChanged(why) if failure.peer is None else PeerLost(failure.peer, why)

    def _give_up(self, channel: int, sends: Sequence[Part]) -> None:
        """Let go of the buffers of a failed exchange."""
        for peer, _ in sends:
            link = self._links.get((peer, channel))
            if link is not None:
                link.cut()
        self._poison(EpochChanged("an operation was broken off"))  # by another error, for example KeyboardInterrupt

    def adopt(self, epoch: int, *, lost: Collection[int]) -> None:
        """Enter a new epoch.

        All living peers must have cancelled or failed in the old epoch before: the zeros that complete a cut frame
        would be data to a peer that still takes part in it. The session's protocol (everybody settles, then the plan
        is sent) sees to that.

        Raises:
            ValueError: The epoch is not a newer one.
        """
        if epoch <= self._epoch:
            raise ValueError(f"epoch {epoch} cannot be adopted after {self._epoch}: epochs only grow")
        with self._changed:
            self._connections.adopt(epoch, lost)
            self._epoch = epoch
            self._failure = None
            self._cancelled = False
            with contextlib.suppress(BlockingIOError):  # it failed without a cancel
                os.eventfd_read(self._wake)

    def keep_links(self, is_used: Callable[[int, int], bool]) -> None:
        """See ``base.Transport``."""
        self._connections.keep(is_used)

    def close(self) -> None:
        """Close links and listener, remove the socket file, end threads. Posts not yet sent are dropped."""
        with self._changed:
            if self._closed:
                return
        self.cancel()
        with self._changed:
            self._closed = True
        self._connections.close()
        self._posts.close()
        os.close(self._wake)
