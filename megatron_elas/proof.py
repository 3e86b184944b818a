"""Proofs that a process knows the job's token. Neither the token nor a hash of it is ever sent.

Each side of a new connection chooses a nonce, and proves itself by an HMAC over the key, its own role and both nonces.
So a recorded proof is of no use later, and one that is sent back to its maker is not accepted. Keys are made for a
purpose: a proof for a data link opens no control connection.

A short token can be guessed by whoever has seen one proof: use a random one.
"""

from __future__ import annotations

import hmac
import os

NONCE_BYTES = 32
PROOF_BYTES = 32


class NotAMember(ValueError):
    """The other side has not proven that it belongs to the job."""


def make_key(token: str, purpose: bytes) -> bytes:
    """The secret that proofs for one purpose are made with."""
    return hmac.digest(token.encode(), purpose, "sha256")


def make_nonce() -> bytes:
    """``NONCE_BYTES`` random bytes, to be used once."""
    return os.urandom(NONCE_BYTES)


def prove(key: bytes, role: bytes, *said: bytes) -> bytes:
    """``PROOF_BYTES`` bytes: HMAC-SHA256 over the role and what was said; the lengths of its parts are fixed."""
    return hmac.digest(key, b"".join((role, *said)), "sha256")


def check_proof(proof: bytes, key: bytes, role: bytes, *said: bytes) -> None:
    """Check what ``prove`` gave to the other side, in constant time.

    Raises:
        NotAMember: It is wrong.
    """
    if not hmac.compare_digest(proof, prove(key, role, *said)):
        raise NotAMember("it does not know the token of this job")
