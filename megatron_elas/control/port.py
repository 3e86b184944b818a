"""The control link as the runtime sees it (``runtime.ports.Control``, by structure)."""

from __future__ import annotations

import math

from megatron_elas.control.link import ControlLink
from megatron_elas.control.messages import (
    CopyDiffered,
    Crashed,
    Declined,
    Drained,
    Failed,
    Finished,
    LeaveOut,
    Migrate,
    Migrated,
    PeerUnreachable,
    Quiesce,
    Recover,
    Recovered,
    Settled,
    Unverified,
)
from megatron_elas.spec.errors import VerificationFailed
from megatron_elas.spec.migration import MigrationReport
from megatron_elas.spec.report import RecoveryReport, SettleReport


class LinkPort:
    """Turns calls into messages. ``patience_s`` bounds every wait for an answer."""

    def __init__(self, worker: int, link: ControlLink, patience_s: float) -> None:
        self._worker = worker
        self._link = link
        self._patience_s = patience_s

    @property
    def latest_epoch(self) -> int:
        """Newest epoch announced so far."""
        return self._link.latest_epoch

    def progress(self, epoch: int, step: int) -> None:
        """What heartbeats say from now on."""
        self._link.progress(epoch, step)

    def peer_unreachable(self, epoch: int, peer: int, detail: str) -> None:
        """A link broke while in use."""
        self._link.send(PeerUnreachable(worker=self._worker, epoch=epoch, peer=peer, detail=detail))

    def leave_out(self, epoch: int, culprit: int, detail: str) -> None:
        """Ask for a new epoch without the activity under way, in which the worker ``culprit`` failed."""
        self._link.send(LeaveOut(worker=self._worker, epoch=epoch, culprit=culprit, detail=detail))

    def copy_differed(self, epoch: int, owner: int, step: int, slot: str) -> None:
        """A copy kept here was not what its owner used before ``step``, and was replaced."""
        self._link.send(CopyDiffered(worker=self._worker, epoch=epoch, owner=owner, step=step, slot=slot))

    def unverified(self, epoch: int, error: VerificationFailed) -> None:
        """A check before resuming failed: ask for a new epoch with state from elsewhere."""
        self._link.send(
            Unverified(
                worker=self._worker, epoch=epoch, check=error.check, step=error.step, sentence=str(error),
                renewable=error.renewable,
            )
        )  # fmt: skip

    def wait_quiesce(self, newer_than: int, *, idle: bool = False) -> Quiesce:
        """The latest announcement newer than ``newer_than``; an idle worker waits for as long as it takes."""
        return self._link.wait_quiesce(newer_than, math.inf if idle else self._patience_s)

    def settled(self, report: SettleReport) -> None:
        """Report the position at the step boundary."""
        self._link.send(Settled(report=report))

    def wait_recover(self, epoch: int) -> Recover:
        """The order for ``epoch``. Raises EpochChanged when a newer epoch is announced."""
        return self._link.wait_recover(epoch, self._patience_s)

    def recovered(self, report: RecoveryReport) -> None:
        """Report the first step finished after a recovery."""
        self._link.send(Recovered(report=report))

    @property
    def migration(self) -> Migrate | None:
        """The newest order to go over to another plan, unless a newer epoch was announced since."""
        return self._link.migration

    def migrated(self, report: MigrationReport) -> None:
        """Report the first step under the plan of a migration."""
        self._link.send(Migrated(report=report))

    def drained(self) -> None:
        """This worker has no seat in the plan of a migration and has done its part; it waits, as a spare does, until it
        is told to stop or the next epoch is announced.
        """
        self._link.send(Drained(worker=self._worker))

    def declined(self, epoch: int, sentence: str) -> None:
        """This worker cannot go over to the plan of that epoch. It must not have said that it is ready for it."""
        self._link.send(Declined(worker=self._worker, epoch=epoch, sentence=sentence))

    def finished(self, steps: int) -> None:
        """Training has reached its end, with so many steps done."""
        self._link.send(Finished(worker=self._worker, steps=steps))

    def failed(self, exit_code: int, sentence: str) -> None:
        """This worker ends because of an error that no other worker can mend."""
        self._link.send(Failed(worker=self._worker, exit_code=exit_code, sentence=sentence))

    def crashed(self, step: int, error: str) -> None:
        """This worker ends because of an exception that is not ours; ``error`` is its type and text."""
        self._link.send(Crashed(worker=self._worker, step=step, error=error))
