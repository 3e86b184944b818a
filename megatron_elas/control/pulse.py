"""A worker's pulse: a thread in C that writes the time into the memory that the worker shares with its agent.

Unlike heartbeats it needs no interpreter, so a long call that holds the interpreter lock does not look like a hang.
Without the C library there is no pulse, and heartbeats are all there is.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from pathlib import Path

from megatron_elas import native

logger = logging.getLogger(__name__)

PERIOD_S = 0.05
"""Between two beats."""


def _load() -> ctypes.CDLL | None:
    library = native.load(Path(__file__).parent, "_pulse")
    if library is not None:
        library.elas_pulse_start.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64]
        library.elas_pulse_start.restype = ctypes.c_int
        library.elas_pulse_stop.argtypes = []
        library.elas_pulse_stop.restype = None
    return library


_library = _load()


def start(fd: int, size: int, offset: int) -> bool:
    """Beat at ``offset`` of the shared file ``fd`` of ``size`` bytes until ``stop``. Gives whether there is a pulse.

    One that this process has already goes on as it is.
    """
    if _library is None:
        return False
    error = _library.elas_pulse_start(fd, size, offset, round(PERIOD_S * 1e9))
    if error not in (0, errno.EALREADY):
        logger.warning("no pulse beside the heartbeats: %s", os.strerror(error))
        return False
    return True


def stop() -> None:
    """End the thread; the agent sees that there is no pulse any more. May be called again."""
    if _library is not None:
        _library.elas_pulse_stop()
