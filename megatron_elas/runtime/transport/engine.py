"""What moves the bytes: one call, what ends it, and what an engine does."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from megatron_elas.runtime.transport.base import ProtocolError
from megatron_elas.runtime.transport.link import Link
from megatron_elas.runtime.transport.program import Program

Bound = tuple[Link, memoryview]
"""A part whose link is open."""


class Objection(ProtocolError):
    """Another worker has noticed that operations were mixed up."""


class Control:
    """What ends operations before their time; one per transport."""

    __slots__ = ("cancelled", "ended", "ended_wake", "refusal", "wake")

    def __init__(self, refusal: Callable[[], Exception]) -> None:
        """``refusal`` gives the error of an operation that was cancelled or may not run."""
        self.cancelled = ctypes.c_int32(0)
        """Set to end all operations; together with ``wake``."""
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable while ``cancelled`` is set."""
        self.ended = ctypes.c_int32(0)
        """Also set when an operation has failed: ends those that do not listen, and so are not told otherwise."""
        self.ended_wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable while ``ended`` is set."""
        self.refusal = refusal

    def end(self) -> None:
        """Set ``ended``."""
        self.ended.value = 1
        os.eventfd_write(self.ended_wake, 1)

    def cancel(self) -> None:
        """Set both."""
        self.cancelled.value = 1
        os.eventfd_write(self.wake, 1)
        self.end()

    def reset(self) -> None:
        """Set neither."""
        self.cancelled.value = self.ended.value = 0
        for wake in (self.wake, self.ended_wake):
            with contextlib.suppress(BlockingIOError):  # it was not set
                os.eventfd_read(wake)

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.wake)
        os.close(self.ended_wake)


class Call(NamedTuple):
    """One operation."""

    channel: int
    epoch: int
    tag: int
    limit_s: float | None
    deadline: float | None
    """By ``time.monotonic``."""
    listens: bool = True
    """To links that it only sends on, for what ends it. Not where another thread may receive on them."""

    @classmethod
    def begin(cls, channel: int, epoch: int, tag: int, limit_s: float | None, *, listens: bool = True) -> Call:
        """An operation that begins now."""
        return cls(channel, epoch, tag, limit_s, None if limit_s is None else time.monotonic() + limit_s, listens)

    def too_slow(self, links: Sequence[Link]) -> TimeoutError:
        """The error that says that these were not done in time."""
        peers = ", ".join(str(peer) for peer in sorted({link.peer for link in links}))
        return TimeoutError(
            f"channel {self.channel}, epoch {self.epoch}, tag {self.tag:#x}: not done within {self.limit_s:g} s; "
            f"still waiting for workers {peers}"
        )


class Engine(Protocol):
    """Moves bytes over links of its own kind.

    ``exchange`` and ``run`` return when everything is done, or raise what ``base.Transport.exchange`` raises, and have
    let go of all buffers then. When they raise ``ProtocolError``, or do not listen and ``Control.ended`` ended them, a
    frame that was half sent is still on its way, with its true bytes; after other errors its link is cut.
    """

    name: str

    def link(self, peer: int, channel: int, sock: socket.socket, epoch: int) -> Link:
        """Wrap a connected, non-blocking socket."""

    def exchange(self, call: Call, sends: Sequence[Bound], receives: Sequence[Bound]) -> None:
        """Run all transfers at once."""

    def run(self, call: Call, program: Program, link_to: Callable[[int], Link], buffers: Sequence[memoryview]) -> None:
        """Run a program. ``link_to`` opens the link to a peer, or finds it open."""

    def forget(self) -> None:
        """Links have gone: drop what was kept for programs."""
