"""One stream socket to a peer for one channel, with what is half sent and half received on it.

Sending is guarded by ``lock``, because the thread of the posts may send too. Receiving is done by one thread at a
time, the one in ``exchange``; that is the caller's duty.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque

from megatron_elas.runtime.transport.base import ProtocolError
from megatron_elas.runtime.transport.frame import HEADER, HEADER_BYTES, MAGIC, MAX_PAYLOAD
from megatron_elas.spec.errors import EpochChanged, PeerLost

Buffer = memoryview | bytes

DONE, MORE, BLOCKED = 0, 1, 2
"""Results of ``receive``: the part is complete; a frame was, look at the cancel flag and go on; nothing is there."""

_ZEROS = memoryview(bytes(MAX_PAYLOAD))
_SINK = memoryview(bytearray(1 << 18))  # shared by all links: nobody reads it


class Link:
    """State of one link. Its socket is non-blocking and belongs to it."""

    def __init__(self, peer: int, channel: int, sock: socket.socket, epoch: int) -> None:
        self.peer = peer
        self.channel = channel
        self.epoch = epoch
        """Of the worker, for error texts."""
        self.sock = sock
        self.fd = sock.fileno()
        self.lost: str | None = None
        """Why it can be used no more."""
        self.lock = threading.Lock()
        # sending
        self._frames: deque[tuple[bytes, Buffer]] = deque()
        self._offset = 0
        """Bytes of the first frame, header included, that the socket has taken."""
        self._queued = 0
        self._sent = 0
        self._held = False
        # receiving
        self._header = bytearray(HEADER_BYTES)
        self._have = 0
        self._epoch = 0
        self._tag = 0
        self._left = 0
        self._size = 0
        """Payload bytes of the current frame, and how many of them are still to come."""
        self._missing = 0
        self._filled = 0
        """Bytes of the current part that whole frames have brought."""

    # ------------------------------------------------------------------ sending

    def send(self, epoch: int, tag: int, buffer: memoryview) -> int:
        """Send what the socket takes at once and queue views of the rest.

        Returns:
            0 when all went, else a ticket for ``flushed``. The buffer is in use until ``flushed`` or ``cut``.
        """
        with self.lock:
            size = len(buffer)
            if not self._frames and size <= MAX_PAYLOAD and self.lost is None:
                header = HEADER.pack(MAGIC, epoch, tag, size)
                sent = self._send_some(header, buffer)
                if sent == HEADER_BYTES + size:
                    return 0
                self._frames.append((header, buffer))
                self._offset = sent
                self._queued += 1
                return self._queued
            self._append(epoch, tag, buffer)
            return 0 if self._pump() else self._queued

    def post(self, epoch: int, tag: int, buffer: memoryview) -> bool:
        """Send what the socket takes at once and queue a copy of the rest; the buffer is free afterwards.

        Returns:
            True when all went; else ``pump`` must be called when the socket is writable.
        """
        with self.lock:
            if self._frames and not self._pump():
                self._append(epoch, tag, memoryview(bytes(buffer)))
                return False
            self._append(epoch, tag, buffer)
            if self._pump():
                return True
            # only frames of this part are left: copy what was not sent
            self._frames = deque((header, bytes(payload)) for header, payload in self._frames)
            return False

    def pump(self) -> bool:
        """Send queued frames. True when there is nothing more to send for now.

        Raises:
            PeerLost: The socket broke.
        """
        with self.lock:
            return self._held or self.lost is not None or self._pump()

    def flushed(self, ticket: int) -> bool:
        """True when everything up to the ticket is sent."""
        return self._sent >= ticket

    def cut(self) -> None:
        """Forget queued frames; no buffer is read any more.

        What is missing of a half-sent frame will be sent as zeros, but not before ``resume``: then the peer has left
        the epoch too and drops the frame, so zeros are never taken for data.
        """
        with self.lock:
            first = self._frames[0] if self._frames and self._offset else None
            self._frames.clear()
            if first is not None:
                self._frames.append((first[0], _ZEROS[: len(first[1])]))
            self._queued = self._sent + len(self._frames)
            self._held = True

    def resume(self, epoch: int) -> None:
        """Make the link usable in a new epoch, after ``cut``."""
        with self.lock:
            self._held = False
            self.epoch = epoch
        self._filled = 0

    def idle(self) -> bool:
        """True when nothing is queued that may be sent now."""
        with self.lock:
            return self._held or self.lost is not None or not self._frames

    def _append(self, epoch: int, tag: int, buffer: memoryview) -> None:
        left = len(buffer)
        start = 0
        while True:
            size = min(left, MAX_PAYLOAD)
            self._frames.append((HEADER.pack(MAGIC, epoch, tag, left), buffer[start : start + size]))
            self._queued += 1
            left -= size
            start += size
            if not left:
                return

    def _pump(self) -> bool:
        frames = self._frames
        while frames:
            header, payload = frames[0]
            offset = self._offset
            if offset < HEADER_BYTES:
                sent = self._send_some(header[offset:], payload)
            else:
                sent = self._send_some(payload[offset - HEADER_BYTES :])
            self._offset = offset = offset + sent
            if offset < HEADER_BYTES + len(payload):
                return False
            frames.popleft()
            self._offset = 0
            self._sent += 1
        return True

    def _send_some(self, *buffers: Buffer) -> int:
        if self.lost is not None:
            raise self.error(self.lost)
        try:
            return self.sock.sendmsg(buffers)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self.error(error.strerror or str(error)) from None

    # ------------------------------------------------------------------ receiving

    def receive(self, epoch: int, tag: int, buffer: memoryview) -> int:
        """Move what has arrived into ``buffer``; call again with the same arguments until ``DONE``.

        Frames of older epochs are dropped. The header of a newer one is kept for the operations of that epoch.

        Raises:
            EpochChanged: A frame of a newer epoch arrived.
            PeerLost: The link broke.
            ProtocolError: A frame of this epoch has another tag or length.
        """
        if self.lost is not None:
            raise self.error(self.lost)
        recv_into = self.sock.recv_into
        try:
            while True:
                if self._have < HEADER_BYTES:
                    count = recv_into(memoryview(self._header)[self._have :])
                    if not count:
                        raise self.error("closed by the peer")
                    self._have += count
                    if self._have < HEADER_BYTES:
                        return BLOCKED
                    magic, self._epoch, self._tag, self._left = HEADER.unpack(self._header)
                    if magic != MAGIC:
                        raise self.error("bytes arrived that are no frame")
                    self._size = self._missing = min(self._left, MAX_PAYLOAD)
                current = self._epoch == epoch
                if current:
                    if self._tag != tag or self._left != len(buffer) - self._filled:
                        raise ProtocolError(
                            f"worker {self.peer}, channel {self.channel}, epoch {epoch}: expected tag {tag:#x} with "
                            f"{len(buffer) - self._filled} bytes, got tag {self._tag:#x} with {self._left} bytes; "
                            "the two workers called different operations"
                        )
                elif self._epoch > epoch:
                    raise EpochChanged(f"worker {self.peer} is in epoch {self._epoch} already, this worker in {epoch}")
                missing = self._missing
                if missing:
                    if current:
                        start = self._filled + self._size - missing
                        count = recv_into(buffer[start : start + missing])
                    else:
                        missing = min(missing, len(_SINK))
                        count = recv_into(_SINK[:missing])
                    if not count:
                        raise self.error("closed by the peer")
                    self._missing -= count
                    if count < missing:
                        return BLOCKED
                    if self._missing:
                        continue
                self._have = 0
                if current:
                    if self._left == self._size:
                        self._filled = 0
                        return DONE
                    self._filled += self._size
                return MORE
        except BlockingIOError:
            return BLOCKED
        except OSError as error:
            raise self.error(error.strerror or str(error)) from None

    # ------------------------------------------------------------------ ending

    def error(self, detail: str) -> PeerLost:
        """Mark the link as lost, let the peer know by an end-of-file, and give the error that says so."""
        if self.lost is None:
            self.lost = detail
            self._shut_down()
        return PeerLost(self.peer, f"{detail} (channel {self.channel}, epoch {self.epoch})")

    def hung_up(self) -> bool:
        """True when this end is lost or the peer has closed its own, whatever is still unread."""
        poller = select.poll()
        if self.lost is None:
            poller.register(self.sock, select.POLLRDHUP)
        return self.lost is not None or bool(poller.poll(0))

    def close(self, why: str) -> None:
        """Close the socket; later calls raise ``PeerLost``."""
        with self.lock:
            if self.lost is None:
                self.lost = why
            self._frames.clear()
            self._shut_down()  # a thread that polls this socket would keep it open until its poll ends
            self.sock.close()

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):  # not connected any more
            self.sock.shutdown(socket.SHUT_RDWR)
