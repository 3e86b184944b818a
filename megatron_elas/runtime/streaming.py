"""State of moving layers on its way to new owners while steps run under the old plan.

Every portion (see ``spec.streams``) goes as a whole copy in one step, beside forward and backward passes, and is there
before the norm. From that step on its gradients follow: they are noted when they are reduced and go beside the update
and the next step's passes, and the new owner makes the same update on its copy. One thread does all of this, one thing
after the other.

# P elements of one slot of a stream's layout; a flat copy has 3 P + 1 elements, fp32, on the CPU.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from megatron_elas.runtime.channels import MIGRATION
from megatron_elas.runtime.communicator.buffers import as_bytes
from megatron_elas.runtime.ports import Host, Mirror
from megatron_elas.runtime.transport.base import Part, Transport
from megatron_elas.spec.errors import EpochChanged
from megatron_elas.spec.moves import Move
from megatron_elas.spec.shards import SLOTS
from megatron_elas.spec.streams import Stream
from megatron_elas.spec.transaction import Update

SEEDS = 1 << 16
"""Added to the tag of a step's copies; steps take the 16 lowest bits. Moves at a recovery or a switch have tag 0."""
GRADIENTS = 1 << 17


class _Outgoing:
    """What this worker sends of its own shard to one new owner."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.gradients = torch.empty(stream.layout.numel, dtype=torch.float32)

    def cut(self, gradients: torch.Tensor) -> torch.Tensor:
        """The stream's own of the shard's gradients."""
        pieces = zip(self.stream.layout.pieces, self.stream.offsets, strict=True)
        return torch.cat([gradients[offset : offset + piece.numel] for piece, offset in pieces], out=self.gradients)


class _Copy:
    """What this worker gets, and brings from version to version."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.flat = torch.empty(stream.layout.flat_numel, dtype=torch.float32)
        self.gradients = torch.empty(stream.layout.numel, dtype=torch.float32)
        self.version: int | None = None
        """None while it is not complete."""
        self.mirror: Mirror | None = None


class Streaming:
    """One worker's part in one migration, up to its end or to the end of the membership."""

    def __init__(
        self,
        worker: int,
        streams: Sequence[Stream],
        first_step: int,
        transport: Transport,
        host: Host,
        thread: ThreadPoolExecutor,
    ) -> None:
        """Nothing is sent yet.

        Args:
            worker: Own id.
            streams: Of all workers.
            first_step: In which the first portions are sent; the same on all workers.
            transport: Links to the others.
            host: Holds the shard in use.
            thread: One, which does nothing else meanwhile.
        """
        self._worker = worker
        self._first_step = first_step
        self._transport = transport
        self._host = host
        self._outgoing = [_Outgoing(stream) for stream in streams if stream.owner == worker]
        self._copies = [_Copy(stream) for stream in streams if stream.target == worker]
        own = [stream.portion for stream in streams if worker in (stream.owner, stream.target)]
        self._portions = 1 + max(own, default=-1)
        self._arrived = 0
        """Portions that are through."""
        self._thread = thread
        self._jobs: list[Future[None]] = []
        self._failed = False
        """What has failed is not followed by anything: its epoch ends."""
        self.steps = 0
        """In which something was sent."""
        self.sent_bytes = 0
        self.gradient_bytes = 0
        self.hand_over_s = 0.0
        """See ``MigrationReport``."""

    def begin_step(self, step: int) -> None:
        """Begin to send the step's portions, of the version in use, which stays as it is until ``hand_over``."""
        portion = step - self._first_step
        sends = [
            (out.stream, self._host.piece_reader(out.stream.layout))
            for out in self._outgoing
            if out.stream.portion == portion
        ]
        copies = [copy for copy in self._copies if copy.stream.portion == portion]
        self.steps += 1
        if portion < self._portions:
            self._submit(self._seed, step, sends, copies)

    def _seed(
        self, step: int, sends: Sequence[tuple[Stream, Callable[[torch.Tensor], None]]], copies: Sequence[_Copy]
    ) -> None:
        flats = [torch.empty(stream.layout.flat_numel, dtype=torch.float32) for stream, _ in sends]
        for (_, read), flat in zip(sends, flats, strict=True):
            read(flat)
        parts = [Part(stream.target, as_bytes(flat)) for (stream, _), flat in zip(sends, flats, strict=True)]
        receives = [Part(copy.stream.owner, as_bytes(copy.flat)) for copy in copies]
        self._transport.exchange(MIGRATION, SEEDS | step & 0xFFFF, parts, receives)
        self.sent_bytes += sum(part.buffer.nbytes for part in parts)
        for copy in copies:
            copy.version = step
        self._arrived += 1

    @property
    def complete(self) -> bool:
        """Whether all copies that this worker sends or gets are through; the step's gradients follow."""
        return self._arrived >= self._portions

    def hand_over(self, step: int, gradients: torch.Tensor) -> None:
        """Wait for the step's portions, and begin to exchange the gradients of all that have come so far.

        Args:
            step: Under way; all its gradients are reduced.
            gradients: (P,) fp32, of the own shard.

        Raises:
            EpochChanged, PeerLost: Cut short, now or since the step before.
        """
        began_s = time.monotonic()
        self._wait()
        sends = [
            Part(out.stream.target, as_bytes(out.cut(gradients)))
            for out in self._outgoing
            if out.stream.portion <= step - self._first_step
        ]
        receives = [
            Part(copy.stream.owner, as_bytes(copy.gradients)) for copy in self._copies if copy.version is not None
        ]
        self._submit(self._transport.exchange, MIGRATION, GRADIENTS | step & 0xFFFF, sends, receives)
        self.gradient_bytes += sum(part.buffer.nbytes for part in sends)
        self.hand_over_s += time.monotonic() - began_s

    def follow(self, update: Update) -> None:
        """The step is sure to be finished: begin to bring the copies to the next version."""
        if self._copies:
            self._submit(self._advance, update, self._host.update_settings())

    def _advance(self, update: Update, settings: object) -> None:
        for copy in self._copies:
            if copy.version is None:
                continue
            assert copy.version == update.step, f"a copy of version {copy.version} cannot follow step {update.step}"
            if update.applies:
                if copy.mirror is None:
                    copy.mirror = self._host.make_mirror(copy.stream.layout, copy.flat)
                copy.version = None
                copy.mirror.apply(copy.gradients, update, settings)
            copy.version = update.step + 1

    def finish(self, version: int) -> Arrivals:
        """Wait until all copies have followed. Gives what is there of the version."""
        self._wait()
        missing = [copy.stream for copy in self._copies if copy.version != version]
        assert not missing, f"worker {self._worker} lacks version {version} of {missing}"
        return Arrivals(self._copies)

    def _submit(self, work: Callable[..., None], *args: object) -> None:
        self._jobs.append(self._thread.submit(self._run, work, args))

    def _run(self, work: Callable[..., None], args: Sequence[object]) -> None:
        """On the thread. What comes after a failure could reach into the next epoch, so it is left out."""
        if self._failed:
            return
        try:
            work(*args)
        except BaseException:
            self._failed = True
            raise

    def _wait(self) -> None:
        """Until the thread has nothing to do. Raises what it raised first."""
        for error in self._end_jobs():
            raise error

    def drain(self) -> None:
        """Wait until nothing is in flight, however it ends. Quick after a cancel."""
        for error in self._end_jobs():
            if not isinstance(error, EpochChanged):
                raise error

    def _end_jobs(self) -> list[BaseException]:
        jobs, self._jobs = self._jobs, []
        return [error for job in jobs if (error := job.exception()) is not None]


class Arrivals:
    """Copies that have been streamed to this worker, all of one version."""

    def __init__(self, copies: Sequence[_Copy]) -> None:
        places = defaultdict(list)
        for copy in copies:
            layout = copy.stream.layout
            for piece, offset, here in zip(layout.pieces, copy.stream.offsets, layout.offsets(), strict=True):
                places[copy.stream.owner].append((offset, offset + piece.numel, here, copy.flat))
        self._places = {owner: sorted(found, key=lambda place: place[0]) for owner, found in places.items()}
        """By owner: start and stop inside a slot of its old shard, the start inside a slot of the copy, the copy."""

    def write(self, move: Move, target: torch.Tensor, *, with_step: bool) -> None:
        """Copy what a move brings into the new shard, and the count of updates if asked for.

        Args:
            move: To this worker, from an owner that has sent its pieces.
            target: (3 P + 1,) the new shard.
            with_step: Whether to write its last element.
        """
        places = self._places[move.owner]
        new = target[:-1].view(len(SLOTS), -1)
        position, end = move.old_offset, move.old_offset + move.numel
        at = bisect_right(places, position, key=lambda place: place[0]) - 1
        while position < end:
            start, stop, here, flat = places[at]
            assert start <= position < stop, f"element {position} of worker {move.owner}'s shard has not come"
            count = min(stop, end) - position
            old = flat[:-1].view(len(SLOTS), -1)[:, here + position - start :][:, :count]
            new[:, move.new_offset + position - move.old_offset :][:, :count].copy_(old)
            position += count
            at += 1
        if with_step:
            target[-1] = places[at - 1][3][-1]
