"""The ways a job can end, and the errors that cross folders."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """Exit status of ``elasrun`` and of the workers. Listed in docs/exit-codes.md."""

    FINISHED = 0
    """Training reached its end."""
    CRASHED = 1
    """An error of the training script itself (an exception that is not ours)."""
    BAD_USAGE = 2
    """A flag, file or value is wrong; nothing was started or lost."""
    GAVE_UP = 3
    """No feasible plan for the survivors, when fewer are left than a cell takes."""
    STATE_INVALID = 4
    """The state could not be proven whole after a change; training did not go on."""
    NOT_STARTED = 5
    """A worker was lost, or did not join in time, before the first step."""
    WRONG_VERSION = 6
    """Python, torch or Megatron is outside the supported range, or a symbol moved."""
    NOT_SAVED = 7
    """Training reached its end, but its last checkpoint could not be saved."""
    CUT_OFF = 8
    """This node lost node 0; its workers were ended, and the job goes on without them if it can."""


class ElasticError(RuntimeError):
    """Base of this project's own errors. ``exit_code`` is what the process ends with."""

    exit_code: ExitCode = ExitCode.CRASHED


class BadUsage(ElasticError, ValueError):
    """A flag, file or value that cannot work. The text names the value and the remedy."""

    exit_code = ExitCode.BAD_USAGE


class NotStarted(ElasticError):
    """A worker was lost before the first step; there is nothing to recover yet."""

    exit_code = ExitCode.NOT_STARTED


class NoFeasiblePlan(ElasticError):
    """The survivors cannot carry the job on."""

    exit_code = ExitCode.GAVE_UP


class StateInvalid(ElasticError):
    """A check before resuming failed, or no complete copy of a shard is left."""

    exit_code = ExitCode.STATE_INVALID


class VerificationFailed(StateInvalid):
    """A check before resuming failed. Raised on all workers alike; they go on from another source, if there is one.

    ``check`` is its name and ``step`` the step that was to be run next. ``mirrors`` are pairs (owner, backup) of copies
    that are bad while all else is well, and ``another_source`` says that lost workers have other backups than those
    whose copies were used. Both were dropped, so that with what is left it is worth another try.
    """

    def __init__(
        self,
        sentence: str,
        *,
        check: str,
        step: int,
        mirrors: tuple[tuple[int, int], ...] = (),
        another_source: bool = False,
    ) -> None:
        super().__init__(sentence)
        self.check = check
        self.step = step
        self.mirrors = mirrors
        self.another_source = another_source

    @property
    def renewable(self) -> bool:
        """Whether the survivors may hold what is needed."""
        return bool(self.mirrors) or self.another_source


class WrongVersion(ElasticError):
    """An installed package is outside its range, or a symbol we attach to has changed."""

    exit_code = ExitCode.WRONG_VERSION


class EpochChanged(ElasticError):
    """The membership this operation belonged to has ended; unwind to the step boundary.

    Raised by every communication call, in flight or new, from the moment the new epoch is
    announced until the worker has adopted it.
    """


class PeerLost(EpochChanged):
    """A link broke while in use. ``peer`` is the worker id at its other end."""

    def __init__(self, peer: int, detail: str) -> None:
        super().__init__(f"link to worker {peer} broke: {detail}")
        self.peer = peer
        self.detail = detail


def comes_of(error: BaseException | None, kind: type[BaseException]) -> bool:
    """Whether an error of this kind is the error, or behind it."""
    while error is not None:
        if isinstance(error, kind):
            return True
        error = error.__cause__ or error.__context__
    return False
