"""Exchanges and programs by the C core: the interpreter is needed to begin them, and for reductions it cannot do."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from megatron_elas.runtime.transport.base import ProtocolError
from megatron_elas.runtime.transport.engine import Bound, Call, Control, Objection
from megatron_elas.runtime.transport.link import Link
from megatron_elas.runtime.transport.native_link import (
    CANCELLED,
    FINISHED,
    LOOK,
    LOST,
    MIXED_UP,
    NEWER,
    OBJECTED,
    REDUCE,
    TIMED_OUT,
    Failure,
    NativeLink,
    address_of,
    library,
)
from megatron_elas.runtime.transport.program import Copy, Program, Reduce, Region, item_bytes

_COPY, _REDUCE_HERE, _REDUCE_IN_PYTHON = 0, 1, 2  # enum step_kind

_KEPT_PROGRAMS = 512

_ARGUMENTS = struct.Struct("@PqqQqqPPqPPPP")
"""``struct arguments`` of ``_core.c``."""
_MADE_AT = _ARGUMENTS.size - struct.calcsize("P")


class _Bound:
    """Links as the core wants them."""

    __slots__ = ("handles", "links", "where")

    def __init__(self, links: list[Link]) -> None:
        self.links = links
        self.handles = array("q", [link.handle for link in links])  # type: ignore[attr-defined]
        self.where: int = self.handles.buffer_info()[0]


class _Compiled:
    """A program as the core reads it, see the head of ``_core.c``."""

    __slots__ = ("bound", "buffers", "code", "in_python", "needs", "peers", "program", "where", "written")

    def __init__(self, program: Program) -> None:
        """Flatten it.

        Raises:
            ValueError: A region is outside of any buffer, or the regions of a step do not fit together.
        """
        self.program = program
        """Kept, so that its identity stays its own."""
        self.peers: list[int] = []
        self.needs: list[int] = []
        """Bytes that each buffer must have; scratch memory is the last."""
        self.written: set[int] = set()
        self.in_python: list[Reduce] = []
        positions: dict[int, int] = {}
        regions = [region for sends, receives, then in program.rounds for region in _regions(sends, receives, then)]
        self.buffers = max((region.buffer for region in regions), default=-1) + 1
        self.needs = [0] * (self.buffers + 1)
        for region in regions:
            if region.start < 0 or region.size < 0 or region.buffer < -1:
                raise ValueError(f"{region} is no part of a buffer")
            self.needs[region.buffer] = max(self.needs[region.buffer], region.start + region.size)
        if self.needs[-1] > program.scratch_bytes:
            raise ValueError(
                f"the program uses {self.needs[-1]} bytes of scratch memory, it asks for {program.scratch_bytes}"
            )
        rounds = program.rounds
        numbers = [
            len(rounds),
            max((len(each.sends) for each in rounds), default=0),
            max((len(each.receives) for each in rounds), default=0),
            max((len(each.then) for each in rounds), default=0),
        ]
        for sends, receives, then in rounds:
            numbers += (len(sends), len(receives), len(then))
            for transfer in (*sends, *receives):
                link = positions.setdefault(transfer.peer, len(positions))
                numbers += (link, *self._place(transfer.region))
            self.written.update(transfer.region.buffer for transfer in receives)
            for step in then:
                numbers += self._step(step, program)
                self.written.add(step.target.buffer)
        self.written.discard(-1)
        self.peers = list(positions)
        self.code = array("q", numbers)
        self.where: int = self.code.buffer_info()[0]
        self.bound: dict[int, _Bound] = {}
        """By channel."""

    def bind(self, channel: int, link_to: Callable[[int], Link]) -> _Bound:
        """The links of a channel, in the order of ``peers``."""
        links = [link_to(peer) for peer in self.peers]
        bound = self.bound.get(channel)
        if bound is None or bound.links != links:
            bound = self.bound[channel] = _Bound(links)
        return bound

    def _place(self, region: Region) -> tuple[int, int, int]:
        return (self.buffers if region.buffer < 0 else region.buffer, region.start, region.size)

    def _step(self, step: Reduce | Copy, program: Program) -> list[int]:
        sources = (step.source,) if isinstance(step, Copy) else step.sources
        if any(source.size != step.target.size for source in sources):
            raise ValueError(f"regions of different sizes: {step}")
        kind, operation, dtype = _COPY, 0, 0
        if isinstance(step, Reduce):
            if program.reducer is None:
                raise ValueError("a program that reduces needs a reducer")
            codes = program.reducer.native
            if codes is not None:
                kind, (operation, dtype) = _REDUCE_HERE, codes
                if step.target.size % item_bytes(dtype):
                    raise ValueError(f"{step.target.size} bytes are no whole number of elements: {step}")
            else:
                kind, operation = _REDUCE_IN_PYTHON, len(self.in_python)
                self.in_python.append(step)
        numbers = [kind, operation, dtype, len(sources)]
        for region in (step.target, *sources):
            numbers += self._place(region)
        return numbers


def _regions(sends: Any, receives: Any, then: Any) -> list[Region]:
    found = [transfer.region for transfer in (*sends, *receives)]
    for step in then:
        found += [step.target, step.source] if isinstance(step, Copy) else [step.target, *step.sources]
    return found


class _Frame:
    """What an operation tells the core, and the core an operation."""

    __slots__ = ("arguments", "arguments_at", "failure", "failure_at", "pending")

    def __init__(self) -> None:
        self.failure = Failure()
        self.failure_at = ctypes.addressof(self.failure)
        self.pending = ctypes.create_string_buffer(256)
        self.arguments = bytearray(_ARGUMENTS.size)
        self.arguments_at = address_of(memoryview(self.arguments))


class _ThreadMemory(threading.local):
    """What a thread's operations use one after another."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        """Not in use; a signal handler may begin an operation within another one."""
        self.scratch = memoryview(bytearray(1 << 16))
        """Kept: fresh memory costs a page fault per 4 KiB."""
        self.scratch_at = address_of(self.scratch)


class NativeEngine:
    """Implements ``engine.Engine``."""

    name = "links in C"

    def __init__(self, control: Control) -> None:
        core = library()
        assert core is not None
        self._core: ctypes.CDLL = core
        self._control = control
        self._cancelled = ctypes.addressof(control.cancelled)
        self._ended = ctypes.addressof(control.ended)
        self._compiled: dict[int, _Compiled] = {}
        self._memory = _ThreadMemory()

    def link(self, peer: int, channel: int, sock: socket.socket, epoch: int) -> Link:
        """See ``engine.Engine``."""
        return NativeLink(self._core, self._control, peer, channel, sock, epoch)

    def forget(self) -> None:
        """See ``engine.Engine``."""
        self._compiled.clear()

    def exchange(self, call: Call, sends: Sequence[Bound], receives: Sequence[Bound]) -> None:
        """See ``engine.Engine``."""
        positions: dict[Link, int] = {}
        numbers = [1, len(sends), len(receives), 0, len(sends), len(receives), 0]
        addresses = []
        for link, view in sends:
            numbers += (positions.setdefault(link, len(positions)), len(addresses), 0, view.nbytes)
            addresses.append(address_of(view))
        for link, view in receives:
            numbers += (positions.setdefault(link, len(positions)), len(addresses), 0, view.nbytes)
            addresses.append(address_of(view))
        code = array("q", numbers)
        self._work(call, code.buffer_info()[0], _Bound(list(positions)), addresses, None, [])

    def run(self, call: Call, program: Program, link_to: Callable[[int], Link], buffers: Sequence[memoryview]) -> None:
        """See ``engine.Engine``."""
        compiled = self._compiled.get(id(program))
        if compiled is None:
            compiled = _Compiled(program)
            if len(self._compiled) >= _KEPT_PROGRAMS:
                self._compiled.clear()
            self._compiled[id(program)] = compiled
        memory = self._memory
        if len(memory.scratch) < program.scratch_bytes:
            memory.scratch = memoryview(bytearray(program.scratch_bytes))
            memory.scratch_at = address_of(memory.scratch)
        addresses = []
        for at in range(compiled.buffers):
            view = buffers[at]
            if view.nbytes < compiled.needs[at]:
                raise ValueError(f"buffer {at} has {view.nbytes} bytes, the program uses {compiled.needs[at]}")
            if view.readonly and at in compiled.written:
                raise TypeError(f"buffer {at} must be writable")
            addresses.append(address_of(view))
        addresses.append(memory.scratch_at)
        bound = compiled.bind(call.channel, link_to)
        self._work(call, compiled.where, bound, addresses, compiled, [*buffers[: compiled.buffers], memory.scratch])

    def _work(
        self,
        call: Call,
        code: int,
        bound: _Bound,
        addresses: list[int],
        compiled: _Compiled | None,
        places: list[memoryview],
    ) -> None:
        """Run code to its end. The caller keeps alive what it points to."""
        frames, core = self._memory.frames, self._core
        frame = frames.pop() if frames else _Frame()
        buffers = array("q", addresses)
        failure, arguments, arguments_at = frame.failure, frame.arguments, frame.arguments_at
        count = len(bound.links)
        if count > len(frame.pending):
            frame.pending = ctypes.create_string_buffer(count)
        pending = frame.pending
        control = self._control
        ended, wake = (self._cancelled, control.wake) if call.listens else (self._ended, control.ended_wake)
        _ARGUMENTS.pack_into(
            arguments, 0, ended, wake, call.epoch, call.tag,
            0 if call.deadline is None else max(1, int(call.deadline * 1e9)), call.listens,
            code, bound.where, count, buffers.buffer_info()[0],
            frame.failure_at, ctypes.addressof(pending), 0,
        )  # fmt: skip
        try:
            status: int = core.elas_run(arguments_at)
            while status > 0:
                if status == REDUCE:
                    assert compiled is not None and compiled.program.reducer is not None
                    step = compiled.in_python[failure.want]
                    sources = [_view(places, source) for source in step.sources]
                    compiled.program.reducer.reduce(sources, _view(places, step.target))
                else:
                    assert status == LOOK  # pending signals are handled here, between two calls
                status = core.elas_go_on(arguments_at)
        finally:
            if any(arguments[_MADE_AT:]):  # broken off, wherever that was
                core.elas_abandon(arguments_at)
        if status != FINISHED:
            raise self._error(status, failure, bound.links, call, pending.raw)
        frames.append(frame)

    def _error(self, status: int, failure: Failure, links: list[Link], call: Call, pending: bytes) -> Exception:
        if status == CANCELLED:
            return self._control.refusal()
        if status == OBJECTED:
            return Objection(failure.text.decode(errors="replace"))
        if status == TIMED_OUT:
            return call.too_slow([link for link, is_pending in zip(links, pending, strict=False) if is_pending])
        if failure.link < 0:
            return MemoryError("no memory for an operation of the transport")
        link = links[failure.link]
        assert isinstance(link, NativeLink)
        if status == LOST:
            return link.broken()
        if status == NEWER:
            return link.ahead(failure.epoch, call.epoch)
        if status == MIXED_UP:
            return ProtocolError(link.mixed_up(call.epoch, call.tag, failure.want, failure.tag, failure.left))
        return MemoryError(
            f"no memory for an operation on the link to worker {link.peer}: {os.strerror(failure.error)}"
        )


def _view(places: Sequence[memoryview], region: Region) -> memoryview:
    return places[region.buffer][region.start : region.start + region.size]
