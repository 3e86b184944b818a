"""The copies of every optimizer shard at other workers, kept in one of two ways.

* **replay**: a backup gets a whole copy once, then the ward's reduced gradients of every step (4 bytes per parameter
  instead of 12), and applies the same update as the owner to its copy, on a thread of its own, while the main thread
  goes on. An owner keeps no copy of its own shard: nobody changes anything before the step is sure to be finished.
* **copy**: a whole copy in every step, two versions of each, at the owner too. For optimizers whose update depends on
  more than an element's own state and gradient. A step that was cut is undone instead of finished.

# P elements of one slot of a shard.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from megatron_elas.runtime.channels import SNAPSHOTS
from megatron_elas.runtime.communicator.buffers import as_bytes
from megatron_elas.runtime.comparison import BadCopy, compare_copies
from megatron_elas.runtime.ports import Host, Mirror
from megatron_elas.runtime.replicator import Replicator
from megatron_elas.runtime.store import ShardStore
from megatron_elas.runtime.transport.base import Part, Transport
from megatron_elas.spec.shards import VERSIONS
from megatron_elas.spec.transaction import Update

logger = logging.getLogger(__name__)

GRADIENTS = 1 << 17
"""Added to the tag of a step's gradients; steps take the 16 lowest bits."""


class SnapshotMode(enum.StrEnum):
    """How backups follow their wards."""

    REPLAY = "replay"
    COPY = "copy"

    @property
    def versions(self) -> int:
        """Versions of a shard that are kept."""
        return 1 if self is SnapshotMode.REPLAY else VERSIONS


class SnapshotPool:
    """Fills and follows the copies in a ShardStore. One per worker; called on its main thread."""

    def __init__(
        self,
        transport: Transport,
        host: Host,
        mode: SnapshotMode,
        verify_interval: int = 0,
        report: Callable[[BadCopy], None] = lambda copy: None,
    ) -> None:
        """Make a pool.

        Args:
            transport: Links to the others.
            host: Holds the shard in use.
            mode: How copies are kept.
            verify_interval: Copies are compared with their owners before every so many steps; 0: never.
            report: Called with every copy kept here that differed, when it has been replaced.
        """
        self._verify_interval = verify_interval
        self._report = report
        self._transport = transport
        self._host = host
        self.mode = mode
        self._replicator = Replicator(transport)
        self._follower = ThreadPoolExecutor(1, thread_name_prefix="elas-follower")
        self._following: Future[None] | None = None
        self._arriving: ShardStore | None = None
        """The store that ``arrive`` fills."""
        self._mirrors: dict[int, tuple[ShardStore, dict[int, Mirror]]] = {}
        """By identity of the store that they follow; of one or two stores."""

    def begin_step(self, store: ShardStore, step: int) -> None:
        """Begin to send whole copies of version ``step`` where they are needed."""
        store.ready = None
        if store is self._arriving:  # and goes to the backups then
            return
        copied = step in store.own.held
        if self.mode is SnapshotMode.COPY:
            needed = not copied
        else:
            needed = store.update is None and not copied and bool(store.backups or store.wards)
            # A store that a recovery made has been seeded by it.
        if needed:
            self.keep_own(store, step)
            self._replicator.start(store, step)

    def keep_own(self, store: ShardStore, version: int) -> None:
        """Copy the shard in use, which is ``version``, to host memory."""
        self._host.read_shard(store.own.begin(version))
        store.own.complete(version)

    def renew(self, store: ShardStore, version: int) -> None:
        """Begin to send copies of ``version`` to backups that lack it; the own copy is complete."""
        self._replicator.renew(store, version)

    def arrive(self, store: ShardStore, version: int, move: Callable[[], None]) -> None:
        """Begin to fill a store beside the step that goes on; ``wait`` says when all is there.

        Args:
            store: Of the plan in force.
            version: Of the state.
            move: Makes the own copy complete; called on another thread. ``renew`` follows.
        """
        self._arriving = store
        self._replicator.renew(store, version, move)

    def wait(self) -> float:
        """Until whole copies on their way have arrived. Gives the seconds it took to bring them; raises what that
        raised (EpochChanged, PeerLost).
        """
        took_s = self._replicator.wait()
        self._arriving = None
        return took_s

    def exchange(self, store: ShardStore, step: int) -> torch.Tensor | None:
        """Fulfil this worker's duty of the step, whose gradients are reduced: its shard's are at the backups after, and
        those of its wards here.

        Returns:
            (P,) the gradients of the own shard, as long as the step is under way; None where backups do not need them.

        Raises:
            EpochChanged, PeerLost: Cut short.
        """
        self._replicator.wait()
        self._end_following()
        if self._verify_interval and step % self._verify_interval == 0:
            self._compare(store, step)
        if self.mode is SnapshotMode.COPY:
            return None
        store.ready = None
        own = store.gradients()
        self._host.read_gradients(own)
        self._transport.exchange(
            SNAPSHOTS,
            GRADIENTS | step & 0xFFFF,
            [Part(backup, as_bytes(own)) for backup in store.backups],
            [Part(ward, as_bytes(store.gradients(ward))) for ward in store.wards],
        )
        store.ready = step
        return own

    def _compare(self, store: ShardStore, step: int) -> None:
        """Compare the copies of the state before the step with their owners'."""
        if not (store.backups or store.wards):
            return
        kept = step in store.own.held
        if not kept:
            self.keep_own(store, step)
        for copy in compare_copies(store, step, self._transport):
            logger.warning(
                "the copy of worker %d's shard kept here differed in %s before step %d and was sent anew",
                copy.owner, copy.slot, copy.step,
            )  # fmt: skip
            self._report(copy)
        if not kept:
            store.own.release()

    def follow(self, store: ShardStore, update: Update) -> None:
        """The step is sure to be finished: begin to bring the wards' copies to the next version."""
        store.update = update
        if store.ready == update.step and store.wards:
            settings = self._host.update_settings()
            self._following = self._follower.submit(self._advance, store, update, settings)

    def finish_open_step(self, store: ShardStore, update: Update) -> None:
        """Bring the wards' copies that have not followed yet to the version after ``update.step``."""
        if store.ready == update.step:
            store.update = update
            self._advance(store, update, self._host.update_settings())

    def _advance(self, store: ShardStore, update: Update, settings: object) -> None:
        step = update.step
        for ward, copies in store.wards.items():
            if copies.held == (step,):
                flat = copies.get(step)
                if update.applies:
                    mirror = self._mirror(store, ward)
                    copies.begin(step)  # neither version while it is changed
                    mirror.apply(store.gradients(ward), update, settings)
                copies.complete(step + 1)
                assert copies.get(step + 1) is flat

    def _mirror(self, store: ShardStore, ward: int) -> Mirror:
        _, mirrors = self._mirrors.setdefault(id(store), (store, {}))
        if ward not in mirrors:
            flat = store.wards[ward].get(store.wards[ward].held[0])
            mirrors[ward] = self._host.make_mirror(store.ward_layouts[ward], flat)
        return mirrors[ward]

    def beside[R](self, work: Callable[[Callable[[], float]], R]) -> Future[R]:
        """Begin something that reads the state, on the thread that follows: the wards' copies follow after it.

        Args:
            work: Is given what waits until whole copies that are on their way now have arrived, and raises as ``wait``.
        """
        return self._follower.submit(work, self._replicator.waiter())

    def settle_in(self, store: ShardStore) -> None:
        """A step has been finished under the store's layout: let go of what only a way back would need."""
        self._mirrors = {key: kept for key, kept in self._mirrors.items() if kept[0] is store}
        if self.mode is SnapshotMode.REPLAY:
            store.own.release()

    def forget_copies(self) -> None:
        """This worker has no seat any more: follow nobody."""
        self._mirrors.clear()

    def _end_following(self) -> None:
        """Until the wards' copies have followed. Raises what applying an update raised."""
        if self._following is not None:
            following, self._following = self._following, None
            following.result()

    def drain(self) -> None:
        """Block until nothing is in flight: exchanges however they end, updates of copies to their end."""
        self._replicator.drain()
        self._arriving = None
        self._end_following()

    def close(self) -> None:
        """End the threads."""
        self._end_following()
        self._follower.shutdown()
        self._replicator.close()
