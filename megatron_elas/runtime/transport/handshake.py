"""How the two ends of a new connection prove to each other that they belong to the job.

Neither the token nor a hash of it crosses the wire. Both sides choose a nonce, and each proves that it knows the token
by an HMAC over both nonces, both worker ids, the channel, the epoch, what the connection is for, and its own role. So
a recorded handshake is of no use later, nor for another worker or channel, and a proof sent back is not accepted.

All integers are little-endian.

====== ====== =====================================================================================
offset type   hello, from the dialling side
====== ====== =====================================================================================
0      u32    ``HELLO_MAGIC``
4      u32    kind, see ``HelloKind``
8      u32    worker id of the sender
12     u32    worker id of the one it wants to reach
16     u64    channel
24     u32    epoch of the sender
28     u32    0
32     32 B   nonce
====== ====== =====================================================================================

====== ====== =====================================================================================
offset type   challenge, from the listening side
====== ====== =====================================================================================
0      32 B   nonce
32     32 B   proof: HMAC-SHA256(key, "listener" + hello + nonce)
====== ====== =====================================================================================

The dialling side checks it and answers with 32 bytes: HMAC-SHA256(key, "dialler" + hello + the challenge's nonce).
After an offer the listening side sends one more byte, a ``Verdict``. The key is HMAC-SHA256(token, "megatron_elas
link").

What this does not do: encrypt, or keep somebody who can change packets on their way from taking the connection over
after the handshake. A short token can be guessed by whoever has seen one handshake: use a random one.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from megatron_elas import proof
from megatron_elas.proof import NONCE_BYTES, PROOF_BYTES, NotAMember

HELLO_MAGIC = 0xE1A5_4E11

_HEAD = struct.Struct("<IIIIQII")
HELLO_BYTES = _HEAD.size + NONCE_BYTES
CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES
ANSWER_BYTES = PROOF_BYTES


class HelloKind(enum.IntEnum):
    """What the dialling side wants."""

    LINK = 1
    """This connection is a link, as soon as the dialling side has proven itself."""
    OFFER = 2
    """May this connection be a link? The listening side answers with a verdict."""


class Verdict(enum.IntEnum):
    """Answer to an offer."""

    TAKEN = 1
    """It is a link now."""
    CROSSED = 2
    """It is not: there is one already, or the answering side is dialling one."""


class Hello(NamedTuple):
    """What a connection is for."""

    kind: HelloKind
    worker: int
    """Id of the dialling side."""
    peer: int
    """Id of the listening side."""
    channel: int
    epoch: int
    """Of the dialling side."""


def make_key(token: str) -> bytes:
    """The secret that proofs are made with."""
    return proof.make_key(token, b"megatron_elas link")


def pack_hello(hello: Hello, nonce: bytes | None = None) -> bytes:
    """The bytes of a hello, with a new nonce unless one is given."""
    kind, worker, peer, channel, epoch = hello
    return _HEAD.pack(HELLO_MAGIC, kind, worker, peer, channel, epoch, 0) + (nonce or proof.make_nonce())


def parse_hello(data: bytes) -> Hello:
    """Read a hello of ``HELLO_BYTES`` bytes. It proves nothing yet.

    Raises:
        NotAMember: It is no hello.
    """
    magic, kind, worker, peer, channel, epoch, zero = _HEAD.unpack_from(data)
    if magic != HELLO_MAGIC or zero or kind not in (HelloKind.LINK, HelloKind.OFFER):
        raise NotAMember("the bytes are no hello")
    return Hello(HelloKind(kind), worker, peer, channel, epoch)


def make_challenge(key: bytes, hello: bytes) -> bytes:
    """The listening side's nonce and proof, for the hello that came."""
    nonce = proof.make_nonce()
    return nonce + proof.prove(key, b"listener", hello, nonce)


def answer_challenge(key: bytes, hello: bytes, challenge: bytes) -> bytes:
    """The dialling side's proof.

    Args:
        key: See ``make_key``.
        hello: As it was sent.
        challenge: As it came.

    Raises:
        NotAMember: The listening side's proof is wrong.
    """
    nonce = challenge[:NONCE_BYTES]
    proof.check_proof(challenge[NONCE_BYTES:], key, b"listener", hello, nonce)
    return proof.prove(key, b"dialler", hello, nonce)


def check_answer(key: bytes, hello: bytes, challenge: bytes, answer: bytes) -> None:
    """Check the dialling side's proof, in constant time.

    Raises:
        NotAMember: It is wrong.
    """
    proof.check_proof(answer, key, b"dialler", hello, challenge[:NONCE_BYTES])
