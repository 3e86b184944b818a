"""A link in Python, with what is half sent and half received on it. Its twin is ``core_link.h``.

Sending is guarded by ``lock``, because the thread of the posts may send too.
"""

from __future__ import annotations

import socket
import threading
from collections import deque

from megatron_elas.runtime.transport.base import ProtocolError
from megatron_elas.runtime.transport.engine import Objection
from megatron_elas.runtime.transport.frame import HEADER, HEADER_BYTES, MAGIC, MAX_PAYLOAD, OBJECTION, OBJECTION_BYTES
from megatron_elas.runtime.transport.link import CLOSED, NO_FRAME, Link
from megatron_elas.spec.errors import PeerLost

Buffer = memoryview | bytes

DONE, MORE, BLOCKED = 0, 1, 2
"""Results of ``receive``: the part is complete; a frame was, look at the cancel flag and go on; nothing is there."""

_STASH_BYTES = 4 << 20
"""More than a worker that fails can still send: half a frame and a full socket."""

_ZEROS = memoryview(bytes(MAX_PAYLOAD))
_SINK = memoryview(bytearray(1 << 18))  # shared by all links: nobody reads it


class PythonLink(Link):
    """A link of the ``PythonEngine``."""

    def __init__(self, peer: int, channel: int, sock: socket.socket, epoch: int) -> None:
        super().__init__(peer, channel, sock, epoch)
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
        self._stash = bytearray()
        """What was read ahead in search of an objection."""
        self._objection = memoryview(bytearray(OBJECTION_BYTES))

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
        """See ``Link``."""
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
        """See ``Link``."""
        with self.lock:
            return self._held or self.lost is not None or self._pump()

    def flushed(self, ticket: int) -> bool:
        """True when everything up to the ticket is sent."""
        return self._sent >= ticket

    def cut(self) -> None:
        """See ``Link``."""
        with self.lock:
            first = self._frames[0] if self._frames and self._offset else None
            self._frames.clear()
            if first is not None:
                self._frames.append((first[0], _ZEROS[: len(first[1])]))
            self._queued = self._sent + len(self._frames)
            self._held = True

    def resume(self, epoch: int) -> None:
        """See ``Link``."""
        with self.lock:
            self._held = False
            self.epoch = epoch
        self._filled = 0

    def idle(self) -> bool:
        """See ``Link``."""
        with self.lock:
            return self._held or self.lost is not None or not self._frames

    @property
    def queued(self) -> int:
        """See ``Link``."""
        with self.lock:
            return sum(len(header) + len(payload) for header, payload in self._frames) - self._offset

    def object(self, epoch: int, text: str) -> bool:
        """See ``Link``."""
        payload = text.encode()[:OBJECTION_BYTES]
        with self.lock:
            if self._held or self.lost is not None:
                return True
            self._frames.insert(1 if self._offset else 0, (HEADER.pack(MAGIC, epoch, OBJECTION, len(payload)), payload))
            self._queued += 1
            try:
                return self._pump()
            except PeerLost:
                return True

    def keep_half_frame(self) -> None:
        """Forget queued frames but a half-sent one, which will be finished from a copy. No buffer is read any more."""
        with self.lock:
            half = self._frames[0] if self._frames and self._offset else None
            self._frames.clear()
            if half is not None:
                self._frames.append((half[0], bytes(half[1])))
            self._queued = self._sent + len(self._frames)

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
            ProtocolError: A frame of this epoch has another tag or length, or is an objection.
        """
        try:
            while self._next_frame():
                if self._epoch > epoch:
                    raise self.ahead(self._epoch, epoch)
                if self._epoch < epoch or self._tag == OBJECTION:
                    if not self._set_aside(self._epoch == epoch):
                        return BLOCKED
                    return MORE
                if self._tag != tag or self._left != len(buffer) - self._filled:
                    want = len(buffer) - self._filled
                    raise ProtocolError(self.mixed_up(epoch, tag, want, self._tag, self._left))
                start = self._filled + self._size - self._missing
                if not self._fill(buffer[start : start + self._missing]):
                    return BLOCKED
                self._have = 0
                if self._left == self._size:
                    self._filled = 0
                    return DONE
                self._filled += self._size
                return MORE
            return BLOCKED
        except BlockingIOError:
            return BLOCKED
        except OSError as error:
            raise self.error(error.strerror or str(error)) from None

    def hear(self, epoch: int, tag: int, last: bool) -> bool:
        """Look at a link from which nothing is expected, or with ``last`` nothing more in this operation.

        Returns:
            False: A frame of this epoch waits.

        Raises:
            EpochChanged, PeerLost, ProtocolError: As ``receive``.
        """
        try:
            while self._next_frame():
                if self._epoch > epoch:
                    raise self.ahead(self._epoch, epoch)
                if self._epoch == epoch and self._tag != OBJECTION:
                    if self._tag == tag and last:
                        raise ProtocolError(self.mixed_up(epoch, tag, 0, self._tag, self._left))
                    return False
                if not self._set_aside(self._epoch == epoch):
                    return True
            return True
        except BlockingIOError:
            return True
        except OSError as error:
            raise self.error(error.strerror or str(error)) from None

    def search(self, epoch: int) -> bool:
        """Read on behind a frame that nobody expects yet, into memory, in search of an objection.

        Whoever objects reads no more, so a worker that is blocked while sending to it would not be told otherwise.
        Done only when nothing else has moved for a while: reading at once would let a worker send more that has not yet
        looked at what it got.

        Returns:
            False: That was all.

        Raises:
            PeerLost, ProtocolError: As ``receive``.
        """
        try:
            while self._search_some(epoch):
                pass
            return False
        except BlockingIOError:
            return True
        except OSError as error:
            raise self.error(error.strerror or str(error)) from None

    def _search_some(self, epoch: int) -> bool:
        stash = self._stash
        at = self._missing
        while at + HEADER_BYTES <= len(stash):
            magic, of, tag, left = HEADER.unpack_from(stash, at)
            at += HEADER_BYTES
            if magic != MAGIC:
                break  # it is noticed when it is received
            if of == epoch and tag == OBJECTION and left <= OBJECTION_BYTES:
                if at + left > len(stash):
                    break
                raise Objection(stash[at : at + left].decode(errors="replace"))
            at += min(left, MAX_PAYLOAD)
        if len(stash) >= _STASH_BYTES:
            return False
        data = self.sock.recv(min(1 << 18, _STASH_BYTES - len(stash)))
        if not data:
            raise self.error(CLOSED)
        stash += data
        return True

    def _receive_into(self, space: memoryview) -> int:
        if not self._stash:
            return self.sock.recv_into(space)
        count = min(len(space), len(self._stash))
        space[:count] = self._stash[:count]
        del self._stash[:count]
        return count

    def _next_frame(self) -> bool:
        """Read what is missing of a header; False when it is not complete yet."""
        if self.lost is not None:
            raise self.error(self.lost)
        if self._have < HEADER_BYTES:
            count = self._receive_into(memoryview(self._header)[self._have :])
            if not count:
                raise self.error(CLOSED)
            self._have += count
            if self._have < HEADER_BYTES:
                return False
            magic, self._epoch, self._tag, self._left = HEADER.unpack(self._header)
            if magic != MAGIC or (self._tag == OBJECTION and self._left > OBJECTION_BYTES):
                raise self.error(NO_FRAME)
            self._size = self._missing = min(self._left, MAX_PAYLOAD)
        return True

    def _fill(self, space: memoryview) -> bool:
        """Read payload of the current frame; False when it is not complete yet."""
        if self._missing:
            count = self._receive_into(space)
            if not count:
                raise self.error(CLOSED)
            self._missing -= count
        return not self._missing

    def _set_aside(self, is_objection: bool) -> bool:
        """Read a frame that nobody wants, or an objection; False when more of it is to come."""
        if not is_objection:
            if not self._fill(_SINK[: min(self._missing, len(_SINK))]):
                return False
            self._have = 0
            return True
        if not self._fill(self._objection[self._size - self._missing : self._size]):
            return False
        # stays the current frame: whoever reads on this link in this epoch hears it again
        raise Objection(bytes(self._objection[: self._size]).decode(errors="replace"))

    # ------------------------------------------------------------------ ending

    def close(self, why: str) -> None:
        """See ``Link``."""
        with self.lock:
            if self.lost is None:
                self.lost = why
            self._frames.clear()
            self._shut_down()  # a thread that polls this socket would keep it open until its poll ends
            self.sock.close()
