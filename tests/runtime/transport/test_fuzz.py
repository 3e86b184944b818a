"""Whatever arrives on a link, both engines do the same: no crash, no hang, no byte outside of the buffer."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from megatron_elas.runtime.transport.engine import Call, Control, Engine
from megatron_elas.runtime.transport.frame import HEADER, MAGIC, MAX_PAYLOAD, OBJECTION, OBJECTION_BYTES
from megatron_elas.runtime.transport.native_engine import NativeEngine
from megatron_elas.runtime.transport.python_engine import PythonEngine
from megatron_elas.spec.errors import EpochChanged
from tests.runtime.transport.conftest import needs_library

EPOCH, TAG = 5, 9
GUARD = bytes([0xA5]) * 64


@contextlib.contextmanager
def control_of_its_own() -> Iterator[Control]:
    control = Control(lambda: EpochChanged("cancelled"))
    yield control
    control.close()


def outcome(make: Callable[[Control], Engine], stream: bytes, sizes: list[int], cuts: list[int]) -> tuple[str, bytes]:
    """Receive parts of ``sizes`` from a peer that sends ``stream`` in pieces and hangs up: what came of it."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)

    def feed() -> None:
        with contextlib.suppress(OSError):
            for first, last in zip([0, *cuts], [*cuts, len(stream)], strict=True):
                theirs.sendall(stream[first:last])
        theirs.close()

    with control_of_its_own() as control:
        link = make(control).link(3, 7, ours, EPOCH)
        space = bytearray(b"".join(GUARD + bytes(size) for size in sizes) + GUARD)
        view, places, at = memoryview(space), [], 0
        for size in sizes:
            at += len(GUARD)
            places.append(view[at : at + size])
            at += size
        feeder = threading.Thread(target=feed)
        feeder.start()
        try:
            made = make(control)
            made.exchange(Call.begin(7, EPOCH, TAG, 20), [], [(link, place) for place in places])
            text = "done"
        except (RuntimeError, OSError) as error:  # PeerLost, EpochChanged, ProtocolError; a TimeoutError is a failure
            assert not isinstance(error, TimeoutError)
            text = f"{type(error).__name__}: {error}"
        link.close("over")
        feeder.join()
    at = 0
    for size in [*sizes, 0]:
        assert space[at : at + len(GUARD)] == GUARD
        at += len(GUARD) + size
    return text, bytes(space)


def frames(rng: random.Random) -> bytes:
    """Mostly right, sometimes not."""
    stream = b""
    for _ in range(rng.randint(1, 6)):
        kind = rng.random()
        if kind < 0.4:
            size = rng.choice([0, 1, 8, 100, 20_000, MAX_PAYLOAD + 5])
            payload, left = rng.randbytes(size), size
            while True:
                piece = payload[size - left :][:MAX_PAYLOAD]
                stream += HEADER.pack(MAGIC, EPOCH, TAG, left) + piece
                left -= len(piece)
                if not left:
                    break
        elif kind < 0.6:  # stale: dropped
            size = rng.choice([0, 5, 70_000])
            stream += HEADER.pack(MAGIC, rng.randrange(EPOCH), rng.randrange(20), size) + rng.randbytes(size)
        elif kind < 0.7:  # a length that is not true
            left = rng.choice([1 << 63, (1 << 64) - 1, MAX_PAYLOAD, 1 << 32, 3])
            stream += HEADER.pack(MAGIC, rng.randrange(EPOCH + 1), rng.choice([TAG, 1]), left) + rng.randbytes(50)
        elif kind < 0.8:
            size = rng.choice([0, 3, OBJECTION_BYTES, OBJECTION_BYTES + 1, 1 << 40])
            text = b"a" * min(size, 2000)
            stream += HEADER.pack(MAGIC, rng.choice([EPOCH, EPOCH - 1]), OBJECTION, size) + text
        elif kind < 0.85:
            stream += HEADER.pack(MAGIC, rng.choice([EPOCH + 1, 0xFFFF_FFFF]), TAG, 8)
        else:
            stream += rng.randbytes(rng.choice([1, 23, 24, 100, 5000]))
    if rng.random() < 0.5:
        at = rng.randrange(len(stream))
        stream = stream[:at] + rng.randbytes(1) + stream[at + 1 :]
    return stream[: rng.randrange(len(stream) + 1)] if rng.random() < 0.3 else stream


@needs_library
@pytest.mark.parametrize("seed", range(8))
def test_both_engines_make_the_same_of_any_bytes(seed: int) -> None:
    rng = random.Random(seed)
    seen = set()
    for _ in range(60):
        stream = frames(rng)
        sizes = [rng.choice([0, 1, 8, 100, 20_000, MAX_PAYLOAD + 5]) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.3:  # as it should be
            payloads = [rng.randbytes(size) for size in sizes]
            stream = b"".join(
                HEADER.pack(MAGIC, EPOCH, TAG, size - start) + payload[start : start + MAX_PAYLOAD]
                for size, payload in zip(sizes, payloads, strict=True)
                for start in range(0, max(size, 1), MAX_PAYLOAD)
            )
        cuts = sorted(rng.randrange(len(stream) + 1) for _ in range(rng.randint(0, 3)))
        python, native = (outcome(make, stream, sizes, cuts) for make in (PythonEngine, NativeEngine))
        assert native[0] == python[0]
        if native[0] == "done":
            assert native[1] == python[1]
        seen.add(native[0].split(":")[0])
    assert len(seen) >= 3  # it does get somewhere
