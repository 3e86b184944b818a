"""One stream socket to a peer for one channel: what is common to the links of both engines."""

from __future__ import annotations

import contextlib
import select
import socket
from abc import ABC, abstractmethod

from megatron_elas.spec.errors import EpochChanged, PeerLost

CLOSED = "closed by the peer"
NO_FRAME = "bytes arrived that are no frame"


class Link(ABC):
    """Its socket is non-blocking and belongs to it.

    Sending may be done by several threads; receiving by one at a time, the one in an operation; that is the caller's
    duty.
    """

    def __init__(self, peer: int, channel: int, sock: socket.socket, epoch: int) -> None:
        self.peer = peer
        self.channel = channel
        self.epoch = epoch
        """Of the worker, for error texts."""
        self.sock = sock
        self.fd = sock.fileno()
        self.lost: str | None = None
        """Why it can be used no more."""

    # ------------------------------------------------------------------ sending

    @abstractmethod
    def post(self, epoch: int, tag: int, buffer: memoryview) -> bool:
        """Send what the socket takes at once and queue a copy of the rest; the buffer is free afterwards.

        Returns:
            True when all went; else ``pump`` must be called when the socket is writable.

        Raises:
            PeerLost: The socket broke.
        """

    @abstractmethod
    def pump(self) -> bool:
        """Send queued frames. True when there is nothing more to send for now; else when the socket is writable.

        Raises:
            PeerLost: The socket broke.
        """

    @abstractmethod
    def object(self, epoch: int, text: str) -> bool:
        """Send an objection as soon as the frame under way is sent. Returns as ``pump``; raises nothing."""

    @abstractmethod
    def cut(self) -> None:
        """Forget queued frames; no buffer is read any more.

        What is missing of a half-sent frame will be sent as zeros, but not before ``resume``: then the peer has left
        the epoch too and drops the frame, so zeros are never taken for data.
        """

    @abstractmethod
    def resume(self, epoch: int) -> None:
        """Make the link usable in a new epoch, after ``cut``."""

    @abstractmethod
    def idle(self) -> bool:
        """True when nothing is queued that may be sent now."""

    @property
    @abstractmethod
    def queued(self) -> int:
        """Bytes that wait to be sent, headers included."""

    # ------------------------------------------------------------------ ending

    def error(self, detail: str) -> PeerLost:
        """Mark the link as lost, let the peer know by an end-of-file, and give the error that says so."""
        if self.lost is None:
            self.lost = detail
            self._shut_down()
        return PeerLost(self.peer, f"{detail} (channel {self.channel}, epoch {self.epoch})")

    def ahead(self, epoch: int, own: int) -> EpochChanged:
        """The error that says that a frame of a newer epoch arrived."""
        return EpochChanged(f"worker {self.peer} is in epoch {epoch} already, this worker in {own}")

    def mixed_up(self, epoch: int, tag: int, size: int, got_tag: int, got_size: int) -> str:
        """What a frame says that belongs to another operation."""
        return (
            f"worker {self.peer}, channel {self.channel}, epoch {epoch}: expected tag {tag:#x} with {size} bytes, got "
            f"tag {got_tag:#x} with {got_size} bytes; the two workers called different operations"
        )

    def hung_up(self) -> bool:
        """True when this end is lost or the peer has closed its own, whatever is still unread."""
        poller = select.poll()
        if self.lost is None:
            poller.register(self.sock, select.POLLRDHUP)
        return self.lost is not None or bool(poller.poll(0))

    @abstractmethod
    def close(self, why: str) -> None:
        """Close the socket; later calls raise ``PeerLost``."""

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):  # not connected any more
            self.sock.shutdown(socket.SHUT_RDWR)
