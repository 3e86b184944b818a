"""What crosses a link: frames, and the hello that opens it.

All integers are little-endian. A part (one directed transfer) is sent as one or more frames; an empty part is one
empty frame.

====== ====== =====================================================================================
offset type   frame
====== ====== =====================================================================================
0      u32    ``MAGIC``
4      u32    epoch of the sender when the frame was made
8      u64    tag of the operation
16     u64    left: bytes of the part from this frame on, this frame's payload included
24     bytes  payload, ``min(left, MAX_PAYLOAD)`` bytes
====== ====== =====================================================================================

So the first frame of a part tells its whole length, the last one has ``left <= MAX_PAYLOAD``, and a receiver that
expects another length notices at the first header. A frame with the tag ``OBJECTION`` is no part: it may come between
the frames of one, and its payload, at most ``OBJECTION_BYTES`` of UTF-8, says which worker noticed that operations were
mixed up. It is the last frame of its sender on this link in this epoch that anybody reads.

====== ====== =====================================================================================
offset type   hello, once, from the dialling side
====== ====== =====================================================================================
0      u32    ``HELLO_MAGIC``
4      u32    kind: 1 = the rest of this connection is a link, 2 = please dial me for this channel
8      u32    worker id of the sender
12     u64    channel
20     32 B   SHA-256 of the job token
====== ====== =====================================================================================
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from typing import NamedTuple

MAGIC = 0xE1A5_57F2
HELLO_MAGIC = 0xE1A5_4E10

HEADER = struct.Struct("<IIQQ")
HEADER_BYTES = HEADER.size
MAX_PAYLOAD = 1 << 20
"""Bytes. What a cut frame wastes at most; larger frames gained nothing (the socket takes about 0.4 MB at once)."""

OBJECTION = 0xFFFF_FFFF_FFFF_FFFF
"""Tag of an objection; operations have smaller ones."""
OBJECTION_BYTES = 1000

_HELLO = struct.Struct("<IIIQ32s")
HELLO_BYTES = _HELLO.size


class HelloKind(enum.IntEnum):
    """What the dialling side wants."""

    LINK = 1
    KNOCK = 2


class Hello(NamedTuple):
    """A hello whose token was right."""

    kind: HelloKind
    worker: int
    channel: int


def token_digest(token: str) -> bytes:
    """The 32 bytes that stand for the job token on the wire."""
    return hashlib.sha256(token.encode()).digest()


def pack_hello(hello: Hello, digest: bytes) -> bytes:
    """The bytes of a hello."""
    return _HELLO.pack(HELLO_MAGIC, hello.kind, hello.worker, hello.channel, digest)


def parse_hello(data: bytes, digest: bytes) -> Hello:
    """Read a hello of ``HELLO_BYTES`` bytes. The token is compared in constant time.

    Raises:
        ValueError: It is no hello, or carries another token.
    """
    magic, kind, worker, channel, theirs = _HELLO.unpack(data)
    if not hmac.compare_digest(theirs, digest) or magic != HELLO_MAGIC:
        raise ValueError("not a hello of this job")
    return Hello(HelloKind(kind), worker, channel)
