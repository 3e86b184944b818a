"""Strikes the faults of a script from inside the worker they are meant for."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable

from megatron_elas.spec.faults import Fault, FaultKind, FaultPhase


class InjectedFault(RuntimeError):
    """What a fault of kind ``exception`` raises."""


class FaultInjector:
    """Keeps one worker's faults and strikes each once.

    ``at`` is called by the training code at every place a fault can name; with no faults left it
    costs one comparison.
    """

    def __init__(self, faults: Iterable[Fault], worker: int, announce: Callable[[Fault, float], None]) -> None:
        """Take the worker's own faults out of the script.

        Args:
            faults: Of the whole job; those of other workers are ignored.
            worker: Own worker id.
            announce: Called with the fault and ``time.time()`` just before it strikes. When it
                returns the news must be out of this process, for the next thing may be SIGKILL.
        """
        self._worker = worker
        self._announce = announce
        self._lock = threading.Lock()
        self._pending = tuple(fault for fault in faults if fault.worker == worker)

    @property
    def pending(self) -> tuple[Fault, ...]:
        """Faults that have not struck yet."""
        return self._pending

    def add(self, fault: Fault) -> None:
        """Add a fault while training runs; from any thread. Ignored when it is another worker's."""
        if fault.worker == self._worker:
            with self._lock:
                self._pending = (*self._pending, fault)

    def at(self, step: int, phase: FaultPhase, microbatch: int | None = None) -> None:
        """Strike if a pending fault names this place.

        Raises:
            InjectedFault: The fault is of kind ``exception``.
        """
        if self._pending and (fault := self._take(step, phase, microbatch)) is not None:
            at_s = time.time()
            self._announce(fault, at_s)
            print(f"fault strikes: {fault}", file=sys.stderr, flush=True)
            _strike(fault)

    def _take(self, step: int, phase: FaultPhase, microbatch: int | None) -> Fault | None:
        with self._lock:
            for fault in self._pending:
                if fault.strikes_at(step, phase, microbatch):
                    self._pending = tuple(other for other in self._pending if other is not fault)
                    return fault
        return None


def _strike(fault: Fault) -> None:
    match fault.kind:
        case FaultKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case FaultKind.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case FaultKind.HANG:
            threading.Event().wait()
        case FaultKind.EXIT:
            os._exit(1)
        case FaultKind.EXCEPTION:
            raise InjectedFault(f"injected fault {fault}")
