"""Sends each step's shard to its backup, and takes in the wards', while the next forward runs."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field

from megatron_elas.runtime.channels import SNAPSHOTS
from megatron_elas.runtime.communicator.buffers import as_bytes
from megatron_elas.runtime.store import ShardStore
from megatron_elas.runtime.transport.base import Part, Transport


@dataclass(slots=True)
class _Round:
    store: ShardStore
    version: int
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
        self._latest = _Round(store, version)
        self._rounds.put(self._latest)

    def wait(self) -> None:
        """Block until the last exchange is over. Raises what it raised (EpochChanged, PeerLost)."""
        if self._latest is not None:
            self._latest.done.wait()
            if self._latest.error is not None:
                raise self._latest.error

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
            try:
                self._exchange(current.store, current.version)
            except Exception as error:  # handed to the main thread, which raises it in wait()
                current.error = error
            current.done.set()

    def _exchange(self, store: ShardStore, version: int) -> None:
        sends = []
        if store.backup is not None:
            sends.append(Part(store.backup, as_bytes(store.own.get(version))))
        # A copy that is sent again after a recovery is the same, bit by bit: it stays complete while it comes in.
        receives = [
            Part(ward, as_bytes(copies.get(version) if version in copies.held else copies.begin(version)))
            for ward, copies in store.wards.items()
        ]
        self._transport.exchange(SNAPSHOTS, version & 0xFFFF, sends, receives)
        for copies in store.wards.values():
            copies.complete(version)
