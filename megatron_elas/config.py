"""Settings, one frozen dataclass per owner, checked where they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from megatron_elas.spec.errors import BadUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlTimeouts:
    """Time limits of the control plane. All in seconds.

    They form a chain: ``2 * heartbeat_interval_s <= heartbeat_timeout_s <= settle_timeout_s``, and the
    last is at most ``resume_timeout_s`` and ``join_timeout_s``. ``hang_timeout_s`` is at most ``heartbeat_timeout_s``,
    and that at most ``interpreter_timeout_s``; ``heartbeat_interval_s`` is at most ``progress_timeout_s``. With another
    order a limit would fire before the one that names the cause.
    """

    heartbeat_interval_s: float = 0.5
    """A worker says this often that it lives."""
    heartbeat_timeout_s: float = 10.0
    """A joined worker that is silent for so long is lost, and killed; so are all workers of a node whose agent is."""
    hang_timeout_s: float = 0.25
    """A worker whose process is stopped (SIGSTOP, a debugger) for so long is lost, and killed."""
    interpreter_timeout_s: float = 600.0
    """A worker that has a pulse but sends no heartbeat, as in a long call that holds the interpreter lock, is lost,
    and killed, after this instead of ``heartbeat_timeout_s``."""
    progress_timeout_s: float = 300.0
    """A worker whose main thread makes no progress within a step for so long, and for ten times the longest step, while
    it waits for nobody, is lost, and killed. Ten times as long where no step has been measured, and between steps."""
    settle_timeout_s: float = 60.0
    """A survivor that has not unwound to the step boundary by then is lost, and killed."""
    resume_timeout_s: float = 600.0
    """From the order to recover to the end of the first step; a survivor that takes longer is lost, and killed."""
    join_timeout_s: float = 600.0
    """From the first worker that joined to the last."""
    grace_s: float = 10.0
    """From a polite request to end (SIGTERM) to SIGKILL."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise BadUsage(f"{flag_of(field.name)} must be a positive number of seconds, got {value:g}")
        if 2 * self.heartbeat_interval_s > self.heartbeat_timeout_s:
            raise BadUsage(
                f"{flag_of('heartbeat_timeout_s')}={self.heartbeat_timeout_s:g} is less than twice "
                f"{flag_of('heartbeat_interval_s')}={self.heartbeat_interval_s:g}, so one late heartbeat would "
                f"end a healthy worker: raise the first or lower the second"
            )
        self._check_order("hang_timeout_s", "heartbeat_timeout_s")
        self._check_order("heartbeat_interval_s", "progress_timeout_s")
        self._check_order("heartbeat_timeout_s", "interpreter_timeout_s")
        self._check_order("heartbeat_timeout_s", "settle_timeout_s")
        self._check_order("settle_timeout_s", "resume_timeout_s")
        self._check_order("settle_timeout_s", "join_timeout_s")

    def _check_order(self, earlier: str, later: str) -> None:
        first, second = getattr(self, earlier), getattr(self, later)
        if first > second:
            raise BadUsage(
                f"{flag_of(earlier)}={first:g} is more than {flag_of(later)}={second:g}, so the second would always "
                f"fire first: lower the first or raise the second"
            )


def flag_of(field_name: str) -> str:
    """The ``elasrun`` flag of a timeout field: ``grace_s`` gives ``--grace-s``."""
    return "--" + field_name.replace("_", "-")
