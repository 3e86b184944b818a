"""Several transports in one process, each used by a thread of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_elas.runtime.transport.sockets import SocketTransport

MIB = 1 << 20


def data(size: int, seed: int = 1) -> memoryview:
    return memoryview((bytes(range(251)) * (size // 251 + 2))[seed : seed + size])


def room(size: int) -> memoryview:
    return memoryview(bytearray(size))


def in_thread(function: Callable[[], object]) -> Callable[[], object]:
    """Start it; calling the result waits for it and raises what it raised."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join() -> object:
        thread.join(30)
        assert outcome, "still blocked"
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    return join


def all_at_once(functions: list[Callable[[], object]]) -> list[object]:
    """Run each in a thread; what they returned or raised."""
    joins = [in_thread(function) for function in functions]
    outcomes: list[object] = []
    for join in joins:
        try:
            outcomes.append(join())
        except Exception as error:
            outcomes.append(error)
    return outcomes


@contextlib.contextmanager
def transports(count: int, folder: Path, scheme: str = "unix") -> Iterator[list[SocketTransport]]:
    """Several in one process, introduced to each other."""
    with contextlib.ExitStack() as stack:
        made = []
        for worker in range(count):
            listen = f"unix:{folder}/{worker}" if scheme == "unix" else "tcp:127.0.0.1:0"
            made.append(SocketTransport(worker, listen, "secret"))
            stack.callback(made[-1].close)
        addresses = {transport.worker: transport.address for transport in made}
        for transport in made:
            transport.set_addresses(addresses)
        yield made


def next_epoch(made: list[SocketTransport], epoch: int = 1) -> None:
    """As the session does: everybody has cancelled before anybody adopts."""
    for transport in made:
        transport.cancel()
    for transport in made:
        transport.adopt(epoch, lost=())
