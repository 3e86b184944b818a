"""What a transport gives: epoch-framed, cancellable links from this worker to its peers.

One link per (peer, channel), dialled on first use from the address list, kept until the peer is
lost or ``keep_links`` closes it. Every frame carries the epoch and a tag. Frames of an older epoch are dropped by the
receiver; a frame of a newer epoch ends the waiting operation with ``EpochChanged``.
After ``cancel`` every operation, in flight or new, on any thread, raises ``EpochChanged`` until
``adopt``. Links to living peers stay usable across any number of cancels, also when one was cut
in the middle of a frame.

No buffer is read or written after the call that was given it has returned or raised.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from megatron_elas.runtime.transport.program import Program


class Part(NamedTuple):
    """One directed transfer: ``buffer`` (C-contiguous bytes) to or from ``peer``. May be empty."""

    peer: int
    buffer: memoryview


class Transport(Protocol):
    """The whole surface that the communicator, the snapshots and the migration use."""

    @property
    def worker(self) -> int:
        """Own worker id."""

    @property
    def address(self) -> str:
        """Where peers dial this worker."""

    @property
    def epoch(self) -> int:
        """Epoch that frames carry now."""

    def set_addresses(self, addresses: Mapping[int, str]) -> None:
        """Say where peers are. Called before first use and with every new epoch."""

    def exchange(
        self,
        channel: int,
        tag: int,
        sends: Sequence[Part],
        receives: Sequence[Part],
        limit_s: float | None = None,
    ) -> None:
        """Run all transfers at once, full duplex, and return when every one is done.

        Several parts for one peer are sent and filled in the order given. Blocks the calling
        thread without holding the GIL while it waits. Of what a failed call should have received nothing is to be used.

        Raises:
            EpochChanged: Cancelled, or a frame of a newer epoch arrived.
            PeerLost: A link broke or could not be dialled.
            ProtocolError: A frame of this epoch had another tag or length than expected, here or at another worker of
                the channel: who notices it objects to all its peers there and on related channels, and they to theirs.
            TimeoutError: ``limit_s`` seconds have passed; names the peers that were not done. The epoch has ended
                for this worker, as after the other errors.
            TypeError, ValueError: A buffer cannot be written to, or a peer not be dialled. Nothing has moved, and the
                epoch goes on.
        """

    def run(
        self,
        channel: int,
        tag: int,
        program: Program,
        buffers: Sequence[memoryview],
        limit_s: float | None = None,
    ) -> None:
        """Run a collective's program; each round's transfers are an ``exchange`` with this tag.

        Args:
            channel: Of all its transfers.
            tag: Of all its transfers.
            program: See ``program``.
            buffers: C-contiguous bytes; what the program calls buffer 0, 1, ... Those it writes to are writable.
            limit_s: For the whole program.

        Raises:
            EpochChanged, PeerLost, ProtocolError, TimeoutError: As ``exchange``.
            TypeError, ValueError: The program does not fit. The epoch has ended.
        """

    def send(self, channel: int, tag: int, part: Part) -> None:
        """Send, and return when the link has taken everything; nothing is copied.

        Unlike ``exchange`` it does not listen to the link meanwhile, so another thread may receive on it; it ends when
        another operation of this transport fails. It comes behind earlier posts of the link, and later ones behind it.
        Raises as ``exchange``.
        """

    def post(self, channel: int, tag: int, part: Part) -> None:
        """Send eagerly: never waits for the peer to receive.

        The bytes are taken before the call returns: what the socket does not take at once is
        copied and sent by a thread of the transport, in order with later posts of the link.
        Raises as ``exchange``.
        """

    def cancel(self) -> None:
        """End every operation now; thread-safe, returns at once, may be called again."""

    @property
    def cancelled(self) -> bool:
        """True between ``cancel`` and ``adopt``."""

    def adopt(self, epoch: int, *, lost: Collection[int]) -> None:
        """Enter a new epoch: close the links to ``lost``, forget unsent posts, accept operations.

        Called when no operation is in flight any more.
        """

    def open_links(self, wanted: Collection[tuple[int, int]], limit_s: float | None = None) -> None:
        """Make the missing ones of these links (peer, channel) now, all at once, instead of at their first use.

        Ends with ``cancel``, as an operation does. Both ends of a link may call it, or one.

        Raises:
            EpochChanged: Cancelled.
            PeerLost: A peer left, refused or did not answer: within ``limit_s`` for all together, or within the
                transport's own limits for each.
            ValueError: A peer is this worker, or has no address that can be dialled.
        """

    def name_channels(self, name_of: Callable[[int], str]) -> None:
        """Say how error texts call a channel, for example by its group; must not fail for any number."""

    def relate_channels(self, related_to: Callable[[int], Collection[int]]) -> None:
        """Say to which other channels an objection goes too; must not fail for any number.

        Those whose users may wait for somebody whose epoch has ended on this one.
        """

    def keep_links(self, is_used: Callable[[int, int], bool]) -> None:
        """Close the links for which ``is_used(peer, channel)`` is false.

        Called in a quiet epoch, and on both ends of a link before its channel is used again.
        """

    def close(self) -> None:
        """Close links and listener, remove the socket file, end threads."""


class ProtocolError(RuntimeError):
    """Peers disagree about what is being sent: operations were mixed up, here or elsewhere. A bug of the caller."""
