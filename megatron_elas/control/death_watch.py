"""Notices that a worker dies before the kernel has freed its memory.

A killed process gives its memory back first; only then does its parent, or a peer at one of its sockets, hear of its
end: 20 ms later for 300 MB on an idle core, and far later for more or on a busy one. Robust mutexes are given up before
that. So the main thread of each worker holds one, in memory shared with the agent, and a thread there waits for it.
``exec`` gives mutexes up as well, so a worker that is a new Python takes its one after that. Without a watch the end is
noticed as ever.

The same memory has the worker's pulse (``pulse.py``).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_elas.control import pulse

SLOTS = 1024
"""Workers of one node that can be watched; later ones are not."""
_SLOT_BYTES = 128
_SEMAPHORE, _PULSE, _PID = 64, 104, 112
"""Offsets in a slot, behind the mutex: posted when the mutex is held; the last beat; who holds it."""
_PATIENCE_S = 1.0
"""For a thread to end; one whose worker the kernel cannot end stays behind, being a daemon."""
_ROBUST, _SHARED = 1, 1
"""PTHREAD_MUTEX_ROBUST and PTHREAD_PROCESS_SHARED of <pthread.h>, in glibc and musl."""

OnDeath = Callable[[int, int, float], None]
"""Called with the slot, the exit code (or minus the signal number) and ``time.time()``, on a thread of its own."""

_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """This process's slot."""

    memory: _Memory
    fd: int
    slot: int


_held: list[_Held] = []


class DeathWatch:
    """The agent's side. ``fd`` is for the processes that hold slots."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("elas-death-watch", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, SLOTS * _SLOT_BYTES)
        self._memory = _Memory(self.fd)
        self._threads: list[threading.Thread] = []
        self._closing = False

    def watch(self, on_death: OnDeath) -> int | None:
        """Wait for the death of whoever will hold the slot that is given; None when there are no more."""
        slot = len(self._threads)
        if slot == SLOTS:
            return None
        self._memory.make(slot)
        thread = threading.Thread(target=self._wait, args=(slot, on_death), name=f"elas-watch-{slot}", daemon=True)
        self._threads.append(thread)
        thread.start()
        return slot

    def holder(self, slot: int) -> int:
        """The process that holds the slot; 0 before it does."""
        return self._memory.number(slot, _PID)

    def pulse_ns(self, slot: int) -> int:
        """The last beat, on the monotonic clock; 0 when the holder has no pulse."""
        return self._memory.number(slot, _PULSE)

    def close(self) -> None:
        """End the threads. Nobody may hold a slot any more."""
        self._closing = True
        for slot, thread in enumerate(self._threads):
            self._memory.post(slot)
            thread.join(_PATIENCE_S)
        os.close(self.fd)

    def _wait(self, slot: int, on_death: OnDeath) -> None:
        self._memory.wait(slot)
        if not self._closing and self._memory.lock(slot) == errno.EOWNERDEAD:
            at_s = time.time()
            status = status_of_dying(self.holder(slot))
            if status and not self._closing:
                on_death(slot, status, at_s)


def hold(fd: int, slot: int) -> None:
    """Hold the slot until this thread ends, or ``release``. Called once, by the worker's main thread."""
    memory = _Memory(fd)
    _held.append(_Held(memory=memory, fd=fd, slot=slot))
    memory.lock(slot)
    memory.set_number(slot, _PID, os.getpid())
    memory.post(slot)


def start_pulse() -> bool:
    """Beat in the slot that is held. Gives whether there is a pulse: not without a slot, or the C library."""
    if not _held:
        return False
    held = _held[0]
    return pulse.start(held.fd, SLOTS * _SLOT_BYTES, held.slot * _SLOT_BYTES + _PULSE)


def stop_pulse() -> None:
    """Beat no longer."""
    pulse.stop()


def release() -> None:
    """Let go: the process ends by itself now, and has said what it had to say."""
    if _held:
        held = _held.pop()
        held.memory.unlock(held.slot)


class _Memory:
    """The slots, as mapped by one process."""

    def __init__(self, fd: int) -> None:
        self._pages = mmap.mmap(fd, SLOTS * _SLOT_BYTES)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))

    def make(self, slot: int) -> None:
        attributes = ctypes.create_string_buffer(64)
        _libc.pthread_mutexattr_init(attributes)
        _libc.pthread_mutexattr_setpshared(attributes, _SHARED)
        _libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
        _libc.pthread_mutex_init(self._at(slot), attributes)
        _libc.sem_init(self._at(slot, _SEMAPHORE), 1, 0)

    def lock(self, slot: int) -> int:
        """Blocks; gives 0 or EOWNERDEAD."""
        result: int = _libc.pthread_mutex_lock(self._at(slot))
        return result

    def unlock(self, slot: int) -> None:
        _libc.pthread_mutex_unlock(self._at(slot))

    def post(self, slot: int) -> None:
        _libc.sem_post(self._at(slot, _SEMAPHORE))

    def wait(self, slot: int) -> None:
        while _libc.sem_wait(self._at(slot, _SEMAPHORE)) != 0:  # interrupted by a signal
            pass

    def number(self, slot: int, offset: int) -> int:
        return ctypes.c_int64.from_address(self._start + slot * _SLOT_BYTES + offset).value

    def set_number(self, slot: int, offset: int, value: int) -> None:
        ctypes.c_int64.from_address(self._start + slot * _SLOT_BYTES + offset).value = value

    def _at(self, slot: int, offset: int = 0) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._start + slot * _SLOT_BYTES + offset)


def status_of_dying(pid: int) -> int | None:
    """Exit code of a process that is ending, or minus the signal number; None for one that lives, or says nothing.

    One that ends with 0 cannot be told from one that lives, before it is a zombie.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return os.waitstatus_to_exitcode(int(fields[-1])) or None
    except (OSError, ValueError, IndexError):
        return None
