"""How the members of an inner group meet, over links that exist already.

Vendor libraries want a key-value store, from which all members read what the first one wrote (NCCL's unique id, HCCL's
root information). torch's TCPStore lives in one worker and is lost with it, and connecting to a dead one takes seconds;
the controller could serve one, but is kept free of what only workers need. The members' own transport has all it takes:
its links belong to the epoch, so a rendezvous ends in milliseconds when that does, and nothing of an older one is ever
read. Therefore a store that is one: what the first member sets is posted to the others.

Wire: a message is two frames, both with the tag of its purpose: lengths of key and value (two little-endian 32-bit
numbers), and both one after the other. Verdicts and rows are one frame of fixed size.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from megatron_elas.runtime.transport.base import Part, Transport
from megatron_elas.spec.errors import ElasticError

_LENGTHS = struct.Struct("<II")
_ROW = 1
_VERDICT = 2
_KEY = 3


class Meeting:
    """Messages among the members of one plane, in the epoch that is current when they are sent."""

    def __init__(self, transport: Transport, channel: int, members: Sequence[int]) -> None:
        """``channel`` is used by nobody else; all members, worker ids in group order, have the same one."""
        self._transport = transport
        self._channel = channel
        self.members = tuple(members)
        self.me = self.members.index(transport.worker)

    @property
    def others(self) -> list[int]:
        """Worker ids of the other members."""
        return [worker for worker in self.members if worker != self._transport.worker]

    def collect(self, row: bytes) -> list[bytes] | None:
        """Bring everybody's row (equally long everywhere) to the first member, which gets them in group order.

        Raises:
            EpochChanged: The epoch ended.
        """
        if self.me:
            self._post(self.members[0], _ROW, row)
            return None
        return [row, *self._receive(self.others, _ROW, len(row))]

    def spread(self, verdict: int) -> None:
        """Tell the others what the first member decided, 0 to 255. Called there."""
        for worker in self.others:
            self._post(worker, _VERDICT, bytes([verdict]))

    def hear(self) -> int:
        """What the first member decided. Called by the others."""
        return self._receive([self.members[0]], _VERDICT, 1)[0][0]

    def post_value(self, key: bytes, value: bytes) -> None:
        """Send a key's value to all others."""
        for worker in self.others:
            self._post(worker, _KEY, _LENGTHS.pack(len(key), len(value)))
            self._post(worker, _KEY, key + value)

    def next_value(self) -> tuple[bytes, bytes]:
        """The next key and value that the first member sent."""
        first = [self.members[0]]
        key_bytes, value_bytes = _LENGTHS.unpack(self._receive(first, _KEY, _LENGTHS.size)[0])
        both = self._receive(first, _KEY, key_bytes + value_bytes)[0]
        return both[:key_bytes], both[key_bytes:]

    def _post(self, worker: int, tag: int, data: bytes) -> None:
        self._transport.post(self._channel, tag, Part(worker, memoryview(data)))

    def _receive(self, workers: Sequence[int], tag: int, size: int) -> list[bytes]:
        buffers = [bytearray(size) for _ in workers]
        parts = [Part(worker, memoryview(buffer)) for worker, buffer in zip(workers, buffers, strict=True)]
        self._transport.exchange(self._channel, tag, (), parts)
        return [bytes(buffer) for buffer in buffers]


class MeetingStore(dist.Store):
    """The store of one inner group. Only its first member's values travel, and only until ``close``.

    Afterwards it is a dictionary: a library's watchdog threads look into their store for as long as they live, and must
    not touch the transport then. C++ holds no reference to the Python object, so whoever gives it away keeps it.
    """

    def __init__(self, meeting: Meeting) -> None:
        super().__init__()
        self._meeting: Meeting | None = meeting
        self._values: dict[str, bytes] = {}
        self.error: ElasticError | None = None
        """What ended the meeting: the library that asked tells it as a text only."""

    def close(self) -> None:
        """The members are connected, or will never be."""
        self._meeting = None

    def set(self, key: str, value: bytes | str) -> None:
        """Write; the first member's values go to the others."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        if self._meeting is not None and self._meeting.me == 0:
            self._meeting.post_value(key.encode(), data)

    def get(self, key: str) -> bytes:
        """Read; on members other than the first, wait for the first one to write it.

        Raises:
            EpochChanged: The epoch ended.
            KeyError: It is not there, and nobody will write it.
        """
        self._await(key)
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """As ``get``, for several keys. There is no time limit: the epoch's end is one."""
        for key in keys:
            self._await(key)
            if key not in self._values:
                raise KeyError(key)

    def check(self, keys: list[str]) -> bool:
        """Whether all are here. Does not wait."""
        return all(key in self._values for key in keys)

    def add(self, key: str, value: int) -> int:
        """Count, on this member only."""
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = str(total).encode()
        return total

    def deleteKey(self, key: str) -> bool:
        """Forget, on this member only."""
        return self._values.pop(key, None) is not None

    def getNumKeys(self) -> int:
        """Number of keys on this member."""
        return len(self._values)

    def clone(self) -> MeetingStore:
        """Itself: it needs no connection of its own per thread."""
        return self

    def _await(self, key: str) -> None:
        while key not in self._values and self._meeting is not None and self._meeting.me:
            try:
                name, value = self._meeting.next_value()
            except ElasticError as error:
                self.error = error
                raise
            self._values[name.decode()] = value
