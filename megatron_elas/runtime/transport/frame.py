"""What crosses a link once it stands: frames. ``handshake`` has what comes before.

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
"""

from __future__ import annotations

import struct

MAGIC = 0xE1A5_57F2

HEADER = struct.Struct("<IIQQ")
HEADER_BYTES = HEADER.size
MAX_PAYLOAD = 1 << 20
"""Bytes. What a cut frame wastes at most; larger frames gained nothing (the socket takes about 0.4 MB at once)."""

OBJECTION = 0xFFFF_FFFF_FFFF_FFFF
"""Tag of an objection; operations have smaller ones."""
OBJECTION_BYTES = 1000
