"""The elastic side of a benchmark's rank: a transport that knows the others' addresses."""

from __future__ import annotations

from pathlib import Path

from shared_board import SharedBoard

from megatron_elas.runtime.transport.sockets import SocketTransport


def open_transport(worker: int, workers: int, folder: Path, scheme: str, board: SharedBoard) -> SocketTransport:
    """Listen, tell the others through the folder, and know where they are.

    Args:
        worker: Own id.
        workers: How many there are; all call this, and meet in the board's barrier ``addresses``.
        folder: Shared, and short enough for unix sockets.
        scheme: ``unix`` or ``tcp``.
        board: Of all ranks.
    """
    listen = f"unix:{folder}/{worker}" if scheme == "unix" else "tcp:127.0.0.1:0"
    transport = SocketTransport(worker, listen, "benchmark")
    (folder / f"{worker}.address").write_text(transport.address)
    board.wait("addresses")
    transport.set_addresses({at: (folder / f"{at}.address").read_text() for at in range(workers)})
    return transport
