"""Exchanges and programs in Python; what each function does is what its twin in ``_core.c`` does."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from megatron_elas.runtime.transport.base import ProtocolError
from megatron_elas.runtime.transport.engine import Bound, Call, Control
from megatron_elas.runtime.transport.link import Link
from megatron_elas.runtime.transport.program import Copy, Program, Region
from megatron_elas.runtime.transport.python_link import BLOCKED, DONE, PythonLink

_SEARCH_MS = 50
"""Without any movement, after which an objection is searched for."""


class _Waiting:
    """What an exchange still has to do on one link."""

    __slots__ = ("deaf", "events", "link", "parts", "search", "ticket")

    def __init__(self, link: PythonLink, listens: bool) -> None:
        self.link = link
        self.ticket = 0
        self.parts: deque[memoryview] = deque()
        self.events = 0
        self.deaf = not listens
        """A frame of this epoch waits on it though nothing is expected yet, so it is not listened to."""
        self.search = False
        """An objection may be behind that frame."""


class PythonEngine:
    """Implements ``engine.Engine``."""

    name = "links in Python"

    def __init__(self, control: Control) -> None:
        self._control = control
        self._scratches = threading.local()

    def link(self, peer: int, channel: int, sock: socket.socket, epoch: int) -> Link:
        """See ``engine.Engine``."""
        return PythonLink(peer, channel, sock, epoch)

    def forget(self) -> None:
        """See ``engine.Engine``."""

    def exchange(self, call: Call, sends: Sequence[Bound], receives: Sequence[Bound], *, last: bool = True) -> None:
        """See ``engine.Engine``. ``last``: no more is to come of this operation."""
        waiting: dict[int, _Waiting] = {}
        try:
            for link, buffer in sends:
                assert isinstance(link, PythonLink)
                ticket = link.send(call.epoch, call.tag, buffer)
                if ticket:
                    waits = waiting.get(link.fd)
                    if waits is None:
                        waits = waiting[link.fd] = _Waiting(link, call.listens)
                    waits.ticket = ticket
            for link, buffer in receives:
                assert isinstance(link, PythonLink)
                waits = waiting.get(link.fd)
                if waits is None:
                    waits = waiting[link.fd] = _Waiting(link, call.listens)
                waits.parts.append(buffer)
            if waiting:
                self._wait(waiting, call, last)
        except BaseException as error:
            true_bytes = isinstance(error, ProtocolError) or (not call.listens and self._control.ended.value)
            for link, _ in sends:
                assert isinstance(link, PythonLink)
                if true_bytes:
                    link.keep_half_frame()
                else:
                    link.cut()
            raise

    def run(self, call: Call, program: Program, link_to: Callable[[int], Link], buffers: Sequence[memoryview]) -> None:
        """See ``engine.Engine``."""
        places = [*buffers, self._scratch(program.scratch_bytes)]  # SCRATCH is the last

        def at(region: Region) -> memoryview:
            return places[region.buffer][region.start : region.start + region.size]

        for number, (sends, receives, then) in enumerate(program.rounds, start=1):
            if self._control.cancelled.value:
                raise self._control.refusal()
            self.exchange(
                call,
                [(link_to(peer), at(region)) for peer, region in sends],
                [(link_to(peer), at(region)) for peer, region in receives],
                last=number == len(program.rounds),
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

    def _wait(self, waiting: dict[int, _Waiting], call: Call, last: bool) -> None:
        """Receive, and send what is queued, until nothing waits."""
        poller: select.poll | None = None
        ready = list(waiting)
        control = self._control
        ended, wake = (control.cancelled, control.wake) if call.listens else (control.ended, control.ended_wake)
        while True:
            for fd in ready:
                waits = waiting.get(fd)
                if waits is None:
                    continue
                self._advance(waits, call, last)
                if not waits.parts and not waits.ticket:
                    del waiting[fd]
                    if poller is not None:
                        poller.unregister(fd)
                    continue
                events = (0 if waits.deaf else select.POLLIN) | (select.POLLOUT if waits.ticket else 0)
                if poller is not None and events != waits.events:
                    poller.modify(fd, events)
                waits.events = events
            if not waiting:
                return
            if ended.value:
                raise control.refusal()
            if poller is None:
                poller = select.poll()
                poller.register(wake, select.POLLIN)
                for fd, waits in waiting.items():
                    poller.register(fd, waits.events)
            left_ms = None if call.deadline is None else (call.deadline - time.monotonic()) * 1e3
            if left_ms is not None and left_ms <= 0:
                raise call.too_slow([waits.link for waits in waiting.values()])
            searched = [waits for waits in waiting.values() if waits.search]
            if searched:
                left_ms = _SEARCH_MS if left_ms is None else min(left_ms, _SEARCH_MS)
            ready = [fd for fd, _ in poller.poll(left_ms)]
            if not ready:
                for waits in searched:
                    waits.search = waits.link.search(call.epoch)

    def _advance(self, waits: _Waiting, call: Call, last: bool) -> None:
        link, parts = waits.link, waits.parts
        if waits.ticket and (link.pump() or link.flushed(waits.ticket)):
            waits.ticket = 0
        while parts:
            state = link.receive(call.epoch, call.tag, parts[0])
            if state == DONE:
                parts.popleft()
            elif state == BLOCKED:
                return
            elif self._control.cancelled.value:
                raise self._control.refusal()
            else:
                waits.deaf = False
        if waits.ticket and not waits.deaf:  # poll does not tell of what was read ahead
            waits.deaf = not link.hear(call.epoch, call.tag, last)
            waits.search = waits.deaf
