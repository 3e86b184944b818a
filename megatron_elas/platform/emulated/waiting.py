"""Sleeping until a time, as exactly as the system allows without using the processor."""

from __future__ import annotations

import ctypes
import threading
import time

_PR_SET_TIMERSLACK = 29
_thread = threading.local()


def sleep_until(at_s: float) -> None:
    """Return at ``time.monotonic() == at_s`` or a little later; at once when it is past."""
    _sharpen_timer()
    while (left := at_s - time.monotonic()) > 0:
        time.sleep(left)


def _sharpen_timer() -> None:
    """Let the kernel wake this thread on time: by default it may be 50 microseconds late, to wake several at once."""
    if not getattr(_thread, "sharp", False):
        _thread.sharp = True
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
