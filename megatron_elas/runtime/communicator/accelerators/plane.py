"""One inner group: who is in it, whether it can still be used, and what is on its way.

States: without an inner group (made on first use in an epoch); connected; orphaned (members left since it was
connected, so it can be shrunk but not used); broken until the next epoch.

At its first use in an epoch, the members agree over the transport on what becomes of what they have. Every one brings
what its inner group was made for, or nothing if it had to be aborted because an operation was in flight there; the
first member decides for all: keep it, shrink it, or make a new one. Without that, a worker whose operation had just
finished would keep a group that its peer has aborted.

All members therefore must come to a plane's first use in an epoch, as with any communicator that is made lazily.
"""

from __future__ import annotations

import enum
import logging
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import Work

from megatron_elas.runtime.communicator.accelerators.driver import Driver, Inner
from megatron_elas.runtime.communicator.accelerators.failures import DeviceFault, Failure
from megatron_elas.runtime.communicator.accelerators.rendezvous import Meeting, MeetingStore
from megatron_elas.runtime.communicator.accelerators.work import DeviceWork
from megatron_elas.runtime.transport.base import Transport
from megatron_elas.spec.errors import ElasticError, EpochChanged, PeerLost

logger = logging.getLogger(__name__)

_ROW = struct.Struct("<qI?")


class Verdict(enum.IntEnum):
    """What becomes of the members' inner groups."""

    KEEP = 1
    SHRINK = 2
    NEW = 3


class _Connected(NamedTuple):
    """An inner group and what it was made for."""

    inner: Inner
    store: MeetingStore | None
    """Kept alive here; None for a shrunk one, whose store is its parent's."""
    members: tuple[int, ...]
    epoch: int


class Costs(NamedTuple):
    """What the last preparation did and took, for reports."""

    verdict: Verdict
    seconds: float


class DevicePlane:
    """An inner group on one device type. Made by ``Accelerator.open_plane``."""

    def __init__(
        self, driver: Driver, transport: Transport, device: torch.device, *, name: str, members: Sequence[int]
    ) -> None:
        """Make a plane without inner group.

        Args:
            driver: Of the device's vendor.
            transport: Of this process.
            device: Of this process, with its index.
            name: For errors and logs.
            members: Worker ids in group order; the own one is among them.
        """
        self._driver = driver
        self._transport = transport
        self._device = device
        self._name = name
        self._members = tuple(members)
        self._channel = 0
        self._preparing = threading.Lock()
        self._state = threading.Lock()
        self._now: _Connected | None = None
        self._coming: Inner | None = None
        self._leaving: list[tuple[Inner, Any]] = []
        self._agreed_epoch = -1
        self._broken_epoch = -1
        self._in_flight: deque[DeviceWork] = deque()
        self.last_costs: Costs | None = None
        """Of the last preparation."""

    def __repr__(self) -> str:
        return f"{self._name} on {self._device}"

    @property
    def members(self) -> tuple[int, ...]:
        """Worker ids in group order."""
        return self._members

    @property
    def inner(self) -> Inner | None:
        """The inner group of exactly these members, if there is one."""
        now = self._now
        return now.inner if now is not None and now.members == self._members else None

    # ------------------------------------------------------------------ operations

    def run(
        self,
        kind: str,
        call: Callable[[Inner], Work | None],
        channel: int,
        tolerate: Callable[[EpochChanged], bool],
        *,
        part: bool = False,
    ) -> DeviceWork | None:
        """Start an operation.

        Args:
            kind: For errors.
            call: Starts it on the inner group, and gives the inner work if there is any.
            channel: Of the transport, for the members to meet; no other plane uses it.
            tolerate: Asked when the operation was cut short: whether that is no error.
            part: It starts with others, later; it cannot be waited for.

        Raises:
            EpochChanged: The epoch has ended, or the inner group broke; PeerLost where only one peer can be meant.
            DeviceFault: The device's memory is damaged.
        """
        epoch = self._transport.epoch
        inner = self.prepare(kind, channel)
        try:
            work = call(inner)
        except RuntimeError as error:
            self._raise_explained(kind, epoch, inner, error)
            raise
        if work is None:
            return None

        def ended(error: BaseException | None) -> None:
            explained = self._cut_short(kind, epoch) if error is None else self._explain(kind, epoch, inner, error)
            if isinstance(explained, EpochChanged) and tolerate(explained):
                return
            if explained is None:
                assert error is not None
                raise error
            raise explained from error

        handle = DeviceWork(work, ended)
        if part:
            return handle
        with self._state:
            while self._in_flight and not self._in_flight[0].unfinished():
                self._in_flight.popleft()
            self._in_flight.append(handle)
        if self._transport.cancelled:  # after the interrupt had looked for operations in flight
            self.interrupt()
            raise self._cut_short(kind, epoch)
        return handle

    def prepare(self, kind: str, channel: int) -> Inner:
        """The inner group, agreed on by all members in this epoch."""
        epoch = self._transport.epoch
        self._check(kind, epoch)
        if self._agreed_epoch == epoch and self._now is not None:
            return self._now.inner
        with self._preparing:
            if self._agreed_epoch != epoch or self._now is None:
                began_s = time.monotonic()
                self._channel = channel
                verdict = self._agree(kind, epoch)
                self.last_costs = Costs(verdict, time.monotonic() - began_s)
                logger.info("epoch %d: %s: %s in %.3f s", epoch, self, verdict.name, self.last_costs.seconds)
            now = self._now
        if now is None:
            raise self._cut_short(kind, epoch)
        return now.inner

    @property
    def busy(self) -> bool:
        """Whether an operation is in flight, or the members are connecting."""
        with self._state:
            return self._coming is not None or any(work.unfinished() for work in self._in_flight)

    # ------------------------------------------------------------------ membership

    def edit(self, members: Sequence[int]) -> None:
        """Change who takes part; no operation is in flight. Costs no time: the rest is done at the first use."""
        new = tuple(members)
        with self._state:
            self._in_flight.clear()
        if new == self._members:
            return
        self._members = new
        self._agreed_epoch = -1
        now = self._now
        if now is not None and not (_is_part(new, now.members) and self._driver.can_shrink(now.inner)):
            self.drop()

    def interrupt(self, *, abort: bool = True) -> bool:
        """Cut short what is in flight; an idle inner group stays. Any thread, after ``Transport.cancel``.

        Args:
            abort: Whether to end the inner group; not where the whole device was stopped.

        Returns:
            Whether something was in flight.
        """
        with self._state:
            late = [work for work in self._in_flight if work.unfinished()]
            for work in late:
                work.void = True
            coming = self._coming
            self._in_flight.clear()
        if abort and coming is not None:
            # On a thread of its own: the one that connects may hold a lock of the library as long as it waits.
            threading.Thread(target=self._driver.abort, args=(coming,), name=f"abort-{self._name}", daemon=True).start()
        if abort and late:
            self.drop()
        return bool(late) or coming is not None

    def drop(self) -> None:
        """End the inner group, without the others. Its memory goes with ``clear``."""
        with self._state:
            now, self._now = self._now, None
            if now is not None:
                self._leaving.append((now.inner, now.store))
        if now is not None:
            self._driver.abort(now.inner)

    def clear(self) -> None:
        """Let go of ended inner groups; not on a thread that must not wait, because their threads are joined."""
        with self._state:
            leaving, self._leaving = self._leaving, []
        leaving.clear()

    # ------------------------------------------------------------------ agreement

    def _agree(self, kind: str, epoch: int) -> Verdict:
        meeting = Meeting(self._transport, self._channel, self._members)
        done = Verdict.KEEP
        while True:
            verdict = self._decide(meeting)
            if verdict is Verdict.KEEP:
                break
            done = verdict
            if verdict is Verdict.SHRINK:
                self._shrink(epoch)
            else:
                self._make(meeting, kind, epoch)
                break
        self._agreed_epoch = epoch
        return done

    def _decide(self, meeting: Meeting) -> Verdict:
        rows = meeting.collect(self._row())
        if rows is None:
            return Verdict(meeting.hear())
        verdict = self._judge(rows)
        meeting.spread(verdict)
        return verdict

    def _row(self) -> bytes:
        """What the inner group was made for: epoch (-1: there is none), who its members were, are they the same now."""
        now = self._now
        if now is None:
            return _ROW.pack(-1, 0, False)
        return _ROW.pack(now.epoch, zlib.crc32(repr(now.members).encode()), now.members == self._members)

    def _judge(self, rows: Sequence[bytes]) -> Verdict:
        """The first member's own inner group decides, if everybody has the same one."""
        now = self._now
        if now is None or any(row != rows[0] for row in rows):
            return Verdict.NEW
        if now.members == self._members:
            return Verdict.KEEP
        return Verdict.SHRINK if _is_part(self._members, now.members) else Verdict.NEW

    def _shrink(self, epoch: int) -> None:
        now = self._now
        assert now is not None
        excluded = [at for at, worker in enumerate(now.members) if worker not in self._members]
        try:
            inner = self._driver.shrink(now.inner, excluded, self._device)
        except RuntimeError as error:
            logger.warning("%s could not be shrunk, so a new inner group is made: %s", self, error)
            self.drop()
            return
        with self._state:
            self._leaving.append((now.inner, None))
            self._now = _Connected(inner, now.store, self._members, epoch)

    def _make(self, meeting: Meeting, kind: str, epoch: int) -> None:
        self.drop()
        store = MeetingStore(meeting)
        # Equal on all members, where the group's name may not be: fused groups were several.
        name = f"elastic-{self._channel:x}-epoch-{epoch}"
        inner = self._driver.make(dist.PrefixStore(name, store), meeting.me, self._members, name, self._device)
        with self._state:
            self._coming = inner
        try:
            self._driver.connect(inner, self._device, lambda: self._check(kind, epoch))
        except RuntimeError as error:
            self._driver.abort(inner)
            with self._state:
                self._leaving.append((inner, store))
            if store.error is not None:
                raise store.error from error
            if not isinstance(error, ElasticError):
                self._raise_explained(kind, epoch, inner, error)
            raise
        finally:
            store.close()
            with self._state:
                self._coming = None
        with self._state:
            self._now = _Connected(inner, store, self._members, epoch)

    # ------------------------------------------------------------------ errors

    def _check(self, kind: str, epoch: int) -> None:
        transport = self._transport
        if transport.cancelled or transport.epoch != epoch:
            raise self._cut_short(kind, epoch)
        if self._broken_epoch == epoch:
            raise EpochChanged(f"{kind} of {self}, epoch {epoch}: its inner group broke, and waits for the next epoch")

    def _cut_short(self, kind: str, epoch: int) -> EpochChanged:
        return EpochChanged(f"{kind} of {self}, epoch {epoch}: the epoch ended on worker {self._transport.worker}")

    def _raise_explained(self, kind: str, epoch: int, inner: Inner, error: BaseException) -> None:
        explained = self._explain(kind, epoch, inner, error)
        if explained is not None:
            raise explained from error

    def _explain(self, kind: str, epoch: int, inner: Inner, error: BaseException) -> ElasticError | None:
        """What an inner group's error means; None if the caller is to blame."""
        where = f"{kind} of {self}, epoch {epoch}"
        failure = self._driver.classify(inner, error)
        if failure is Failure.DEVICE:
            return DeviceFault(f"{where}: the device's memory is damaged on worker {self._transport.worker}: {error}")
        if self._transport.cancelled or self._transport.epoch != epoch:
            return self._cut_short(kind, epoch)
        if failure is None or len(self._members) == 1:
            return None
        self._broken_epoch = epoch
        self.drop()
        if failure is Failure.PEER and len(self._members) == 2:
            # The controller ignores it if the epoch has ended there, so a peer that only was faster to abort is safe.
            peer = next(worker for worker in self._members if worker != self._transport.worker)
            return PeerLost(peer, f"{where}: {error}")
        return EpochChanged(f"{where}: {failure.value}: {error}")


def _is_part(new: Sequence[int], old: Sequence[int]) -> bool:
    """Whether ``new`` is ``old`` without some, in the same order."""
    return 0 < len(new) < len(old) and tuple(worker for worker in old if worker in set(new)) == tuple(new)
