"""A link whose state is in the C core (``core_link.h``), and the core's functions."""

from __future__ import annotations

import ctypes
import functools
import os
import socket
from ctypes import POINTER, c_char_p, c_int, c_int32, c_uint32, c_uint64, c_void_p
from pathlib import Path

import numpy as np

from megatron_elas import native
from megatron_elas.runtime.transport.engine import Control
from megatron_elas.runtime.transport.frame import OBJECTION_BYTES
from megatron_elas.runtime.transport.link import CLOSED, NO_FRAME, Link

FINISHED, LOOK, REDUCE = 0, 1, 2
CANCELLED, LOST, NEWER, MIXED_UP, OBJECTED, TIMED_OUT, NO_MEMORY = -1, -2, -3, -4, -5, -6, -7
"""``enum status`` of ``_core.c``."""

_LOST_CLOSED, _LOST_ERRNO, _LOST_GARBAGE = 1, 2, 3


class Failure(ctypes.Structure):
    """``struct failure`` of ``_core.c``: what ended an operation."""

    _fields_ = (
        ("link", c_int32),
        ("lost", c_int32),
        ("error", c_int32),
        ("epoch", c_uint32),
        ("want", c_uint64),
        ("tag", c_uint64),
        ("left", c_uint64),
        ("text", ctypes.c_char * (OBJECTION_BYTES + 1)),
    )


_SIGNATURES = {
    "elas_link_new": (c_void_p, [c_int]),
    "elas_link_free": (None, [c_void_p]),
    "elas_link_lost": (c_int, [c_void_p]),
    "elas_link_lose": (None, [c_void_p]),
    "elas_link_close": (None, [c_void_p]),
    "elas_link_cut": (None, [c_void_p]),
    "elas_link_resume": (None, [c_void_p]),
    "elas_link_queued": (c_uint64, [c_void_p]),
    "elas_link_idle": (c_int, [c_void_p]),
    "elas_link_pump": (c_int, [c_void_p]),
    "elas_link_object": (c_int, [c_void_p, c_uint32, c_char_p, c_uint64]),
    "elas_link_post": (c_int, [c_void_p, c_void_p, c_uint32, c_uint64, c_void_p, c_uint64]),
    "elas_run": (c_int, [c_void_p]),
    "elas_go_on": (c_int, [c_void_p]),
    "elas_abandon": (None, [c_void_p]),
    "elas_reduce": (None, [c_int, c_int, POINTER(c_void_p), c_uint64, c_void_p, c_uint64]),
}


@functools.cache
def _load() -> ctypes.CDLL | None:
    core = native.load(Path(__file__).parent, "_core")
    if core is not None:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(core, name)
            function.restype, function.argtypes = result, arguments
    return core


def library() -> ctypes.CDLL | None:
    """The core's functions; None without the library, or when it is switched off."""
    return None if os.environ.get(native.SWITCH) == "0" else _load()


def address_of(view: memoryview) -> int:
    """Where the bytes are. Valid while the view's owner lives; 0 for no bytes."""
    if not view.nbytes:
        return 0
    if view.readonly:
        return int(np.frombuffer(view, np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class NativeLink(Link):
    """A link of the ``NativeEngine``."""

    def __init__(
        self, core: ctypes.CDLL, control: Control, peer: int, channel: int, sock: socket.socket, epoch: int
    ) -> None:
        super().__init__(peer, channel, sock, epoch)
        self._core = core
        self._control = control
        self._cancelled = ctypes.addressof(control.cancelled)
        self.handle: int = core.elas_link_new(self.fd)
        """``struct link``, freed with this object."""
        if not self.handle:
            raise MemoryError(f"no memory for a link to worker {peer}")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._core.elas_link_free(self.handle)

    def post(self, epoch: int, tag: int, buffer: memoryview) -> bool:
        """See ``Link``."""
        result: int = self._core.elas_link_post(
            self.handle, self._cancelled, epoch, tag, address_of(buffer), buffer.nbytes
        )
        if result < 0:
            if result == LOST:
                raise self.broken()
            if result == CANCELLED:
                raise self._control.refusal()
            raise MemoryError(f"no memory to queue {buffer.nbytes} bytes for worker {self.peer}")
        return result == 1

    def pump(self) -> bool:
        """See ``Link``."""
        result: int = self._core.elas_link_pump(self.handle)
        if result < 0:
            raise self.broken()
        return result == 1

    def object(self, epoch: int, text: str) -> bool:
        """See ``Link``."""
        payload = text.encode()[:OBJECTION_BYTES]
        return bool(self._core.elas_link_object(self.handle, epoch, payload, len(payload)))

    def cut(self) -> None:
        """See ``Link``."""
        self._core.elas_link_cut(self.handle)

    def resume(self, epoch: int) -> None:
        """See ``Link``."""
        self._core.elas_link_resume(self.handle)
        self.epoch = epoch

    def idle(self) -> bool:
        """See ``Link``."""
        return bool(self._core.elas_link_idle(self.handle))

    @property
    def queued(self) -> int:
        """See ``Link``."""
        return int(self._core.elas_link_queued(self.handle))

    def broken(self) -> Exception:
        """The error that says why the core can use it no more."""
        if self.lost is not None:
            return self.error(self.lost)
        code: int = self._core.elas_link_lost(self.handle)
        known = {_LOST_CLOSED: CLOSED, _LOST_GARBAGE: NO_FRAME, _LOST_ERRNO: os.strerror(code >> 8)}
        return self.error(known.get(code & 0xFF, "closed by this worker"))

    def close(self, why: str) -> None:
        """See ``Link``."""
        if self.lost is None:
            self.lost = why
        self._core.elas_link_close(self.handle)  # returns when no operation uses the descriptor any more
        self.sock.close()

    def _shut_down(self) -> None:
        self._core.elas_link_lose(self.handle)
