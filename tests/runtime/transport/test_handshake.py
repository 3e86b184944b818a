"""The proofs of membership as bytes, without sockets."""

from __future__ import annotations

import hmac
import random
import struct

import pytest

from megatron_elas.runtime.transport.handshake import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    Hello,
    HelloKind,
    NotAMember,
    answer_challenge,
    check_answer,
    make_challenge,
    make_key,
    pack_hello,
    parse_hello,
)

KEY = make_key("secret")
HELLO = Hello(HelloKind.LINK, worker=3, peer=1, channel=1 << 40, epoch=5)


def test_members_accept_each_other() -> None:
    hello = pack_hello(HELLO)
    challenge = make_challenge(KEY, hello)
    check_answer(KEY, hello, challenge, answer_challenge(KEY, hello, challenge))
    assert parse_hello(hello) == HELLO


def test_the_hello_is_as_documented() -> None:
    assert pack_hello(HELLO, b"n" * 32) == struct.pack("<IIIIQII", 0xE1A54E11, 1, 3, 1, 1 << 40, 5, 0) + b"n" * 32
    assert len(pack_hello(HELLO)) == HELLO_BYTES == 64


def test_neither_the_token_nor_the_key_is_on_the_wire() -> None:
    hello = pack_hello(HELLO)
    challenge = make_challenge(KEY, hello)
    wire = hello + challenge + answer_challenge(KEY, hello, challenge)
    assert b"secret" not in wire
    assert KEY not in wire


def test_who_does_not_know_the_token_is_found_out_by_both_sides() -> None:
    hello, other = pack_hello(HELLO), make_key("guess")
    with pytest.raises(NotAMember, match="does not know the token"):
        answer_challenge(KEY, hello, make_challenge(other, hello))
    challenge = make_challenge(KEY, hello)
    answer = hmac.digest(other, b"dialler" + hello + challenge[:32], "sha256")
    with pytest.raises(NotAMember, match="does not know the token"):
        check_answer(KEY, hello, challenge, answer)


def test_a_recorded_handshake_cannot_be_used_again() -> None:
    hello = pack_hello(HELLO)
    recorded = make_challenge(KEY, hello)
    answer = answer_challenge(KEY, hello, recorded)
    with pytest.raises(NotAMember):
        check_answer(KEY, hello, make_challenge(KEY, hello), answer)  # the listener has a new nonce
    with pytest.raises(NotAMember):
        answer_challenge(KEY, pack_hello(HELLO), recorded)  # the dialler has


def test_a_proof_cannot_be_sent_back() -> None:
    hello = pack_hello(HELLO)
    challenge = make_challenge(KEY, hello)
    with pytest.raises(NotAMember):
        check_answer(KEY, hello, challenge, challenge[32:])
    answer = answer_challenge(KEY, hello, challenge)
    with pytest.raises(NotAMember):
        answer_challenge(KEY, hello, challenge[:32] + answer)


@pytest.mark.parametrize(
    "changed",
    [
        HELLO._replace(kind=HelloKind.OFFER),
        HELLO._replace(worker=4),
        HELLO._replace(peer=2),
        HELLO._replace(channel=7),
        HELLO._replace(epoch=6),
    ],
)
def test_a_proof_holds_for_one_purpose_only(changed: Hello) -> None:
    hello, other = pack_hello(HELLO, b"n" * 32), pack_hello(changed, b"n" * 32)
    challenge = make_challenge(KEY, other)
    with pytest.raises(NotAMember):
        answer_challenge(KEY, hello, challenge)
    with pytest.raises(NotAMember):
        check_answer(KEY, other, challenge, answer_challenge(KEY, hello, _challenge_with(challenge[:32], hello)))


def _challenge_with(nonce: bytes, hello: bytes) -> bytes:
    """What the listening side would have sent for ``hello`` with that nonce."""
    return nonce + hmac.digest(KEY, b"listener" + hello + nonce, "sha256")


def test_any_changed_bit_is_noticed() -> None:
    chance = random.Random(7)
    hello = pack_hello(HELLO)
    challenge = make_challenge(KEY, hello)
    answer = answer_challenge(KEY, hello, challenge)
    for _ in range(300):
        bad = bytearray(challenge)
        bad[chance.randrange(CHALLENGE_BYTES)] ^= 1 << chance.randrange(8)
        with pytest.raises(NotAMember):
            answer_challenge(KEY, hello, bytes(bad))
        bad = bytearray(answer)
        bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
        with pytest.raises(NotAMember):
            check_answer(KEY, hello, challenge, bytes(bad))


def test_bytes_that_are_no_hello_are_refused() -> None:
    chance = random.Random(11)
    hello = pack_hello(HELLO)
    for data in [bytes(HELLO_BYTES), b"GET / HTTP/1.1\r\n".ljust(HELLO_BYTES), hello[:4] + bytes(4) + hello[8:]]:
        with pytest.raises(NotAMember, match="no hello"):
            parse_hello(data)
    for _ in range(300):
        with pytest.raises(NotAMember, match="no hello"):
            parse_hello(chance.randbytes(HELLO_BYTES))
