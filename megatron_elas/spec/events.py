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
class ActivityFailed:
    """A worker lives, but could not do its part of something that all do together and that can be left out."""

    worker: int
    detail: str
    """For people: ``could not save the checkpoint of iteration 8: OSError: No space left on device``."""
    at_s: float
    """``time.time()`` when the controller knew."""


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
