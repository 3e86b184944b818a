"""What can happen to a worker, as the controller sees it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class LossReason(enum.StrEnum):
    """How the loss of a worker was noticed."""

    EXITED = "exited"
    SILENT = "silent"
    """No heartbeat within the limit; it is fenced (killed) before the others go on."""
    UNREACHABLE = "unreachable"
    """A peer's link to it broke while in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """A worker that takes no further part."""

    worker: int
    reason: LossReason
    detail: str
    """For people: ``killed by SIGKILL``, ``no heartbeat for 2.1 s``."""
    at_s: float
    """``time.time()`` when the controller knew."""
    fault_s: float | None = None
    """``time.time()`` when the fault struck, where a fault script told."""
