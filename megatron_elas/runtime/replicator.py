"""Sends whole shards to their backups, and takes in the wards', while the main thread computes.

After a loss only the copies that a backup lacks are sent: owners and backups first say what they have.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_elas.runtime.channels import SNAPSHOTS
from megatron_elas.runtime.communicator.buffers import as_bytes
from megatron_elas.runtime.store import ShardStore
from megatron_elas.runtime.transport.base import Part, Transport

ASKING = 1 << 16
"""Added to the tag of what backups say about a version; versions take the bits below."""
_HERE, _MISSING = b"\0", b"\1"


@dataclass(slots=True)
class _Round:
    store: ShardStore
    version: int
    renew: bool
    before: Callable[[], None] | None = None
    """Makes the own copy complete."""
    took_s: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Replicator:
    """One background thread that exchanges one version at a time."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._rounds: queue.SimpleQueue[_Round | None] = queue.SimpleQueue()
        self._latest: _Round | None = None
        self._thread = threading.Thread(target=self._run, name="elas-replicator", daemon=True)
        self._thread.start()

    def start(self, store: ShardStore, version: int) -> None:
        """Begin to exchange ``version``, whose own copy is complete. The copy must stay as it is until ``wait``."""
        self._begin(_Round(store, version, renew=False))

    def renew(self, store: ShardStore, version: int, before: Callable[[], None] | None = None) -> None:
        """As ``start``, but backups that hold the version already get nothing. Called by all owners and backups.

        Args:
            store: Whose copies are exchanged.
            version: Which.
            before: Called first, on the thread; the own copy is complete after it.
        """
        self._begin(_Round(store, version, renew=True, before=before))

    def _begin(self, latest: _Round) -> None:
        self._latest = latest
        self._rounds.put(latest)

    def wait(self) -> float:
        """Block until the last exchange is over. Gives the seconds it took; raises what it raised (EpochChanged,
        PeerLost).
        """
        return _wait_for(self._latest)

    def waiter(self) -> Callable[[], float]:
        """``wait`` for what is the last exchange now: on any thread, whatever begins or is drained meanwhile."""
        return functools.partial(_wait_for, self._latest)

    def drain(self) -> None:
        """Block until no exchange is in flight, however it ended. Quick after a cancel."""
        if self._latest is not None:
            self._latest.done.wait()
            self._latest = None

    def close(self) -> None:
        """End the thread."""
        self._rounds.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (current := self._rounds.get()) is not None:
            began_s = time.monotonic()
            try:
                if current.before is not None:
                    current.before()
                self._exchange(current.store, current.version, current.renew)
            except Exception as error:  # handed to the main thread, which raises it in wait()
                current.error = error
            current.took_s = time.monotonic() - began_s
            current.before = None  # it holds the optimizer that was in use before
            current.done.set()

    def _exchange(self, store: ShardStore, version: int, renew: bool) -> None:
        wards = [ward for ward, copies in store.wards.items() if not renew or version not in copies.held]
        backups = self._ask(store, version, wards) if renew else store.backups
        sends = [Part(backup, as_bytes(store.own.get(version))) for backup in backups]
        receives = [Part(ward, as_bytes(store.wards[ward].begin(version))) for ward in wards]
        self._transport.exchange(SNAPSHOTS, version & 0xFFFF, sends, receives)
        for ward in wards:
            store.wards[ward].complete(version)

    def _ask(self, store: ShardStore, version: int, missing: list[int]) -> list[int]:
        """Tell the wards whose copies are missing here; gives the backups at which the own one is missing."""
        tag = ASKING | version & 0xFFFF
        tells = [Part(ward, memoryview(_MISSING if ward in missing else _HERE)) for ward in store.wards]
        answers = {backup: bytearray(_HERE) for backup in store.backups}
        told = [Part(backup, memoryview(answer)) for backup, answer in answers.items()]
        self._transport.exchange(SNAPSHOTS, tag, tells, told)
        return [backup for backup, answer in answers.items() if answer == _MISSING]


def _wait_for(latest: _Round | None) -> float:
    if latest is None:
        return 0.0
    latest.done.wait()
    if latest.error is not None:
        raise latest.error
    return latest.took_s
