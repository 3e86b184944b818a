"""Finds out that the main thread of this worker makes no progress, though the process lives and beats.

In a synchronous job one worker that hangs lets all others wait. The culprit is the one that does *not* wait for
another: its main thread is in the script, in a lock, in a read of a file, and not in an operation of ours. So each
worker judges itself, on the thread that sends heartbeats, and needs to ask nobody.

Progress is a mark that the training code leaves at every forward and backward pass, and at the ends of steps; waiting
for another worker, or for the controller, counts as progress, too. Within a step the limit is ``max(timeout_s, FACTOR *
the longest step so far)``. It is ``PATIENCE`` times that where no step has shown how long it may take: in the first
step, in the first one after a recovery (both may compile), and between steps (evaluation, saving, what the script does
there). Before the first step (building the model, loading) there is none.

This is for collectives on CPUs, in which the caller waits. With those of an accelerator's library a main thread that
waits for others may be found in any call that waits for the device.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

FACTOR = 10
"""A step may take so many times the longest one."""
PATIENCE = 10
"""Where there is no measure, the limit is so many times as long."""

_WAITING = ("megatron_elas.runtime.", "megatron_elas.control.")
_NOT_WAITING = (
    "megatron_elas.runtime.session",
    "megatron_elas.runtime.executor",
    "megatron_elas.runtime.snapshots",
    "megatron_elas.runtime.verification",
)
"""They call the script's own code, or wait for this worker's own threads."""


class ProgressWatch:
    """Of one worker. No clock of its own: every call that needs the time is told it."""

    def __init__(self, timeout_s: float, longest_look_s: float) -> None:
        """Nothing is watched until the first step.

        Args:
            timeout_s: The least limit.
            longest_look_s: The most that passes between two looks. More is time in which the machine held this process
                up, and does not count.
        """
        self._timeout_s = timeout_s
        self._longest_look_s = longest_look_s
        self._marks = 0
        self._seen = 0
        self._looked_s: float | None = None
        self._stalled_s = 0.0
        self._told = False
        self._step: int | None = None
        self._began_s: float | None = None
        """Of the step that the main thread is in; None outside."""
        self._measured = False
        """That step shows how long a step may take."""
        self._unusual = True
        """The next one will not."""
        self._longest_s = 0.0

    # ------------------------------------------------------------ the main thread

    def mark(self) -> None:
        """The training code has come to another place."""
        self._marks += 1

    def enter_step(self, step: int, now: float) -> None:
        """Step ``step`` begins; the one before has ended, if it was not left."""
        if self._began_s is not None:
            self.leave_step(now)
        self._step, self._began_s = step, now
        self._measured, self._unusual = not self._unusual, False
        self.mark()

    def leave_step(self, now: float) -> None:
        """The step has ended; what comes until the next one is not part of any."""
        if self._began_s is not None and self._measured:
            self._longest_s = max(self._longest_s, now - self._began_s)
        self._measured, self._began_s = False, None
        self.mark()

    # ------------------------------------------------------------ other threads

    def disturb(self) -> None:
        """The membership changes: this step and the next one are no measure."""
        self._measured, self._unusual = False, True
        self.mark()

    @property
    def limit_s(self) -> float:
        """What ``look`` goes by now."""
        limit_s = max(self._timeout_s, FACTOR * self._longest_s)
        return limit_s if self._began_s is not None and self._measured else PATIENCE * limit_s

    def look(self, now: float, waiting: bool) -> float | None:
        """Called regularly. Gives for how long there has been no progress, once, when that is too long.

        Args:
            now: Seconds on a clock that does not jump.
            waiting: The main thread waits for others.
        """
        passed_s = 0.0 if self._looked_s is None else min(now - self._looked_s, self._longest_look_s)
        self._looked_s = now
        if waiting or self._marks != self._seen or self._step is None:
            self._seen, self._stalled_s, self._told = self._marks, 0.0, False
            return None
        self._stalled_s += passed_s
        if self._stalled_s < self.limit_s or self._told:
            return None
        self._told = True
        return self._stalled_s

    def tell_again(self) -> None:
        """Who was told may not have heard it: the next look tells, if it is still so."""
        self._told = False

    def describe(self, stalled_s: float, place: str) -> str:
        """For people."""
        where = f"in step {self._step}" if self._began_s is not None else f"after step {self._step}"
        return (
            f"its main thread made no progress for {stalled_s:.1f} s {where}, at {place} "
            f"(limit {self.limit_s:.1f} s, see --progress-timeout-s)"
        )


def look_at_main_thread() -> tuple[bool, str]:
    """Whether it waits for others, and where it is.

    No frame is kept: one that another thread holds keeps those of its callers, and all that is in them, alive beyond
    their end.
    """
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    return is_waiting(frame), describe_place(frame)


def is_waiting(frame: FrameType | None) -> bool:
    """Whether the innermost code of ours is there to wait for another worker, or for the controller."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if isinstance(module, str) and module.startswith("megatron_elas."):
            return module.startswith(_WAITING) and not module.startswith(_NOT_WAITING)
        frame = frame.f_back
    return False


def describe_place(frame: FrameType | None) -> str:
    """The line that is being run, as ``read_batch (data.py:12)``."""
    if frame is None:
        return "an unknown place"
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
