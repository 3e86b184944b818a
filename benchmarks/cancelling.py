"""How long after ``Transport.cancel`` an operation in flight returns, in every state an operation can be in.

Four workers; one of them is what the others wait for. ``cancel`` is called by a thread of its own, as the control link
does, while the worker's main thread is in the operation. A time runs from just before the call of ``cancel`` until the
main thread has the error in its hands. Rounds in which the operation was over before are counted, not timed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from elastic_peers import open_transport
from results import percentile, print_result, print_table
from shared_board import SharedBoard

from megatron_elas.runtime.communicator.communicator import Communicator
from megatron_elas.spec.errors import EpochChanged
from megatron_elas.testing.ranks import run_ranks

WORKERS = 4
AWAITED = WORKERS - 1
"""The worker that is silent, stopped or slow."""
LARGE_NUMEL = (64 << 20) // 4
ROUND_LIMIT_S = 5.0

STATES = {
    "live silent peer": "all-reduce; the peer lives and does not call it",
    "stopped peer": "all-reduce; the peer is stopped (SIGSTOP) before its part",
    "mid-transfer": "all-reduce of 64 MiB, with all taking part",
    "stopped mid-transfer": "the same, with a peer stopped (SIGSTOP) on the way",
    "async": "all-reduce on the group's thread, waited for; the peer does not call it",
    "receive": "recv from a peer that sends nothing",
}


def measure_cancel(rounds: int, scheme: str) -> None:
    """Every state in ``rounds`` rounds."""
    board = SharedBoard({"addresses": WORKERS, "round": WORKERS}, numbers=WORKERS)
    with tempfile.TemporaryDirectory(prefix="elas-bench-") as folder:
        limit_s = min(3600.0, 60 + rounds * len(STATES) * ROUND_LIMIT_S)
        told = run_ranks(WORKERS, time_rank, limit_s, (Path(folder), scheme, board, rounds))
    rows, all_ms = {}, []
    for state, meaning in STATES.items():
        times_ms = [seconds * 1e3 for times in told for seconds in times[state]]
        if not times_ms:
            sys.exit(f"no operation was cancelled in flight in the state '{state}'")
        all_ms += times_ms
        shares = [percentile(times_ms, share) for share in (0.5, 0.99, 1)]
        rows[state] = [str(len(times_ms)), *(f"{value:.3f}" for value in shares), meaning]
    columns = ("operations", "p50", "p99", "max", "")
    print_table(f"from cancel to the operation's return, {WORKERS} workers, in ms", columns, rows)
    for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        print_result(f"cancel_ms_{name}", percentile(all_ms, share), "ms")


def time_rank(
    rank: int, ranks: int, folder: Path, scheme: str, board: SharedBoard, rounds: int
) -> dict[str, list[float]]:
    """Seconds of every operation that was cancelled in flight on this worker, by state."""
    worker = CancelledWorker(rank, ranks, folder, scheme, board)
    times: dict[str, list[float]] = {state: [] for state in STATES}
    for number in range(rounds):
        for state in STATES:
            if (seconds := worker.play_round(state, number)) is not None:
                times[state].append(seconds)
    worker.close()
    return times


class CancelledWorker:
    """One rank: plays rounds, each of which ends its epoch."""

    def __init__(self, rank: int, ranks: int, folder: Path, scheme: str, board: SharedBoard) -> None:
        self._rank = rank
        self._board = board
        board.numbers[rank] = os.getpid()
        self._transport = open_transport(rank, ranks, folder, scheme, board)
        self._communicator = Communicator(self._transport, range(ranks))
        self._communicator.register_backend()
        dist.init_process_group("elastic", store=dist.HashStore(), rank=rank, world_size=ranks)
        self._small, self._large = torch.zeros(256), torch.zeros(LARGE_NUMEL)
        self._random = random.Random(rank)
        self._in_flight = threading.Event()
        dist.all_reduce(self._small)
        self._warm_up()

    def _warm_up(self) -> None:
        """Open the links and touch the memory; the large operation's time says where its middle is."""
        dist.all_reduce(self._large)
        if self._rank == 0:
            dist.recv(self._small, AWAITED)
        elif self._rank == AWAITED:
            dist.send(self._small, 0)
        started = time.perf_counter()
        dist.all_reduce(self._large)
        self._large_s = time.perf_counter() - started

    def play_round(self, state: str, number: int) -> float | None:
        """One operation that is cancelled; seconds, or None when this worker had none or it was over before."""
        self._board.wait("round")
        operation, delay_s = self._choose(state)
        seconds = None
        if state == "stopped mid-transfer" and self._rank == 0:
            stop_after = threading.Timer(0.2 * self._large_s, os.kill, (self._board.numbers[AWAITED], signal.SIGSTOP))
            stop_after.start()
        if operation is None:
            self._be_awaited(state)
        else:
            if state == "stopped peer":
                wait_until_stopped(self._board.numbers[AWAITED])
            seconds = self._cancel_in_flight(operation, delay_s)
        if state.startswith("stopped") and self._rank == 0:
            if state == "stopped mid-transfer":
                stop_after.join()
            os.kill(self._board.numbers[AWAITED], signal.SIGCONT)
        self._board.wait("round")  # adopting is for when nobody is in an operation of the epoch any more
        self._communicator.drain()
        self._transport.cancel()
        self._transport.adopt(self._transport.epoch + 1, lost=())
        return None if self._rank == AWAITED else seconds

    def _choose(self, state: str) -> tuple[Callable[[], None] | None, float]:
        """This worker's operation, if it has one, and how long after its start to cancel it."""
        soon_s = self._random.uniform(0.001, 0.006)
        match state:
            case "mid-transfer":
                return partial(dist.all_reduce, self._large), self._random.uniform(0.1, 0.6) * self._large_s
            case "stopped mid-transfer":
                return partial(dist.all_reduce, self._large), self._large_s + soon_s
        if self._rank == AWAITED:
            return None, 0.0
        match state:
            case "async":
                return self._wait_for_async, soon_s
            case "receive":
                return partial(dist.recv, self._small, AWAITED), soon_s
        return partial(dist.all_reduce, self._small), soon_s

    def _wait_for_async(self) -> None:
        work: Any = dist.all_reduce(self._small, async_op=True)
        work.wait()

    def _be_awaited(self, state: str) -> None:
        if state == "stopped peer":
            os.kill(os.getpid(), signal.SIGSTOP)  # worker 0 lets it go on

    def _cancel_in_flight(self, operation: Callable[[], None], delay_s: float) -> float | None:
        cancelled_s: list[float] = []

        def cancel() -> None:
            time.sleep(delay_s)
            cancelled_s.append(time.perf_counter())
            self._transport.cancel()

        thread = threading.Thread(target=cancel)
        thread.start()
        try:
            operation()
        except EpochChanged:
            ended_s = time.perf_counter()
            thread.join()
            return ended_s - cancelled_s[0] if ended_s > cancelled_s[0] else None
        thread.join()
        return None

    def close(self) -> None:
        """Leave."""
        self._communicator.close()
        self._transport.close()


def wait_until_stopped(pid: int) -> None:
    """Until the process is stopped by a signal."""
    deadline = time.monotonic() + ROUND_LIMIT_S
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline, f"process {pid} was not stopped"
        time.sleep(0.0005)
