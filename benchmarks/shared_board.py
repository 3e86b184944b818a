"""Memory that forked ranks share: barriers that wake everybody at once, and a few numbers."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
from collections.abc import Mapping

_BARRIER_BYTES = 64
"""Room for a ``pthread_barrier_t``, which is 32 bytes long with glibc on 64-bit machines."""
_PROCESS_SHARED = 1
_LAST_ARRIVED = -1
"""PTHREAD_BARRIER_SERIAL_THREAD: what one of the waiters gets."""


class SharedBoard:
    """Made before forking; every fork then has the same one.

    A rank that dies leaves the others waiting in a barrier for ever: run them with a time limit that kills.
    """

    def __init__(self, barriers: Mapping[str, int], numbers: int) -> None:
        """Make it.

        Args:
            barriers: Names, each with how many ranks it waits for.
            numbers: How many 64-bit numbers to keep; all 0.
        """
        self._memory = mmap.mmap(-1, _BARRIER_BYTES * len(barriers) + 8 * numbers)
        self._libc = ctypes.CDLL(None)
        self._barriers: dict[str, ctypes.Array[ctypes.c_char]] = {}
        attributes = (ctypes.c_char * 64)()
        _check(self._libc.pthread_barrierattr_init(attributes))
        _check(self._libc.pthread_barrierattr_setpshared(attributes, _PROCESS_SHARED))
        for at, (name, parties) in enumerate(barriers.items()):
            barrier = (ctypes.c_char * _BARRIER_BYTES).from_buffer(self._memory, at * _BARRIER_BYTES)
            _check(self._libc.pthread_barrier_init(barrier, attributes, parties))
            self._barriers[name] = barrier
        self.numbers = (ctypes.c_int64 * numbers).from_buffer(self._memory, _BARRIER_BYTES * len(barriers))

    def wait(self, name: str) -> None:
        """Until all ranks of the barrier are there."""
        status = self._libc.pthread_barrier_wait(self._barriers[name])
        if status != _LAST_ARRIVED:
            _check(status)


def wait_for_death(pid: int) -> None:
    """Until a process has ended, by whatever, whether or not its parent has taken note."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poller = select.poll()
    poller.register(watch, select.POLLIN)
    poller.poll()
    os.close(watch)


def _check(status: int) -> None:
    if status:
        raise OSError(status, os.strerror(status))
