"""Collectives and transfers on the elastic backend and on gloo, both alive in the same processes and measured in turns.

SIZE is the whole tensor: what is reduced, what a reduce-scatter takes, what an all-gather gives, what is sent. ``p2p``
is half of a round trip between neighbours 0-1, 2-3, ..., all pairs at the same time.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from elastic_peers import open_transport
from results import print_ratio, print_table
from shared_board import SharedBoard

from megatron_elas.runtime.communicator.communicator import Communicator
from megatron_elas.testing.ranks import run_ranks

SIZES = {
    "1KiB": 1 << 10,
    "16KiB": 1 << 14,
    "64KiB": 1 << 16,
    "1MiB": 1 << 20,
    "8MiB": 1 << 23,
    "64MiB": 1 << 26,
}
BACKENDS = ("gloo", "elastic")
MOST_CALLS = 200
WARM_UP_CALLS = 20
TURN_S = 0.15
"""What a turn of the slower backend is to take; one that needs longer for two calls takes longer."""

Times = dict[tuple[str, str], dict[str, list[float]]]
"""Seconds per call, one per turn, by (operation, size) and backend."""


class AllReduce:
    """In place."""

    share = 1.0
    """Seconds of one operation in those of a call."""

    def __init__(self, group: Any, rank: int, ranks: int, numel: int) -> None:
        self._group = group
        self._ranks = ranks
        self._tensor = torch.ones(numel)

    def call(self) -> None:
        """Once."""
        dist.all_reduce(self._tensor, group=self._group)

    def check(self) -> None:
        """After the first call."""
        assert (self._tensor == self._ranks).all()
        self._tensor.zero_()  # ones would grow without end


class ReduceScatter:
    """From one tensor."""

    share = 1.0

    def __init__(self, group: Any, rank: int, ranks: int, numel: int) -> None:
        self._group = group
        self._ranks = ranks
        self._input = torch.ones(numel)
        self._output = torch.zeros(numel // ranks)

    def call(self) -> None:
        """Once."""
        dist.reduce_scatter_tensor(self._output, self._input, group=self._group)

    def check(self) -> None:
        """After the first call."""
        assert (self._output == self._ranks).all()


class AllGather:
    """Into one tensor."""

    share = 1.0

    def __init__(self, group: Any, rank: int, ranks: int, numel: int) -> None:
        self._group = group
        self._ranks = ranks
        self._input = torch.full((numel // ranks,), float(rank))
        self._output = torch.full((numel,), -1.0)

    def call(self) -> None:
        """Once."""
        dist.all_gather_into_tensor(self._output, self._input, group=self._group)

    def check(self) -> None:
        """After the first call."""
        expected = torch.arange(self._ranks).float()
        assert (self._output.view(self._ranks, -1) == expected[:, None]).all()


class RoundTrip:
    """To the neighbour and back; the last of an odd number does nothing."""

    share = 0.5

    def __init__(self, group: Any, rank: int, ranks: int, numel: int) -> None:
        self._group = group
        self._rank = rank
        self._other = rank ^ 1
        self._paired = self._other < ranks
        self._tensor = torch.full((numel,), float(rank))

    def call(self) -> None:
        """There and back."""
        if not self._paired:
            return
        steps = [dist.send, dist.recv] if self._rank < self._other else [dist.recv, dist.send]
        for step in steps:
            step(self._tensor, self._other, group=self._group)

    def check(self) -> None:
        """After the first call: the upper one's tensor was overwritten by the lower one's."""
        assert not self._paired or (self._tensor == min(self._rank, self._other)).all()


OPERATIONS: dict[str, Callable[..., Any]] = {
    "all_reduce": AllReduce,
    "reduce_scatter": ReduceScatter,
    "all_gather": AllGather,
    "p2p": RoundTrip,
}


def measure_collectives(
    workers: Sequence[int], sizes: Sequence[str], operations: Sequence[str], turns: int, scheme: str
) -> None:
    """All operations and sizes for each number of workers."""
    for ranks in workers:
        board = SharedBoard({"addresses": ranks, "turn": ranks}, numbers=1)
        with tempfile.TemporaryDirectory(prefix="elas-bench-") as folder:
            limit_s = 60 + 2 * turns * len(sizes) * len(operations) * ranks
            told = run_ranks(ranks, time_rank, limit_s, (Path(folder), scheme, board, sizes, operations, turns))
        report(ranks, sizes, operations, [slowest(told, key) for key in told[0]], list(told[0]), turns)


def slowest(told: Sequence[Times], key: tuple[str, str]) -> dict[str, list[float]]:
    """The largest over all ranks, turn by turn."""
    return {
        backend: [max(turn) for turn in zip(*(times[key][backend] for times in told), strict=True)]
        for backend in BACKENDS
    }


def time_rank(
    rank: int,
    ranks: int,
    folder: Path,
    scheme: str,
    board: SharedBoard,
    sizes: Sequence[str],
    operations: Sequence[str],
    turns: int,
) -> Times:
    """One worker."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    transport = open_transport(rank, ranks, folder, scheme, board)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    communicator = Communicator(transport, range(ranks))
    communicator.register_backend()
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    times: Times = {}
    for size in sizes:
        for operation in operations:
            runs = {
                backend: OPERATIONS[operation](group, rank, ranks, SIZES[size] // 4)
                for backend, group in groups.items()
            }
            times[operation, size] = time_both(runs, rank, board, turns)
            del runs
    board.wait("turn")
    communicator.close()
    transport.close()
    dist.destroy_process_group()
    return times


def time_both(runs: dict[str, Any], rank: int, board: SharedBoard, turns: int) -> dict[str, list[float]]:
    """Seconds of one operation for each backend, one per turn; all ranks start a turn together."""
    once_s = 0.0
    for run in runs.values():
        run.call()
        run.check()
        board.wait("turn")
        started = time.perf_counter()
        run.call()
        once_s = max(once_s, time.perf_counter() - started)
        board.wait("turn")
    if rank == 0:  # the same number for both
        board.numbers[0] = max(2, min(MOST_CALLS, int(TURN_S / once_s)))
    board.wait("turn")
    calls = board.numbers[0]
    times: dict[str, list[float]] = {backend: [] for backend in runs}
    for turn in range(1 + turns):
        for backend in list(runs) if turn % 2 else reversed(list(runs)):
            run = runs[backend]
            board.wait("turn")
            started = time.perf_counter()
            for _ in range(calls if turn else min(calls, WARM_UP_CALLS)):
                run.call()
            times[backend].append((time.perf_counter() - started) / calls * run.share)
    return {backend: seconds[1:] for backend, seconds in times.items()}  # the first turn was to warm up


def report(
    ranks: int,
    sizes: Sequence[str],
    operations: Sequence[str],
    measured: Sequence[dict[str, list[float]]],
    keys: Sequence[tuple[str, str]],
    turns: int,
) -> None:
    """A table of medians, the RESULT lines, and where ours was slower."""
    by_key = dict(zip(keys, measured, strict=True))

    def cell(operation: str, size: str) -> str:
        times = by_key[operation, size]
        ours, theirs = (statistics.median(times[backend]) * 1e6 for backend in ("elastic", "gloo"))
        return f"{ours:.0f} / {theirs:.0f}"

    print_table(
        f"{ranks} workers: one operation in us, ours / gloo, medians of {turns} turns",
        sizes,
        {operation: [cell(operation, size) for size in sizes] for operation in operations},
    )
    slower = []
    for operation in operations:
        for size in sizes:
            times = by_key[operation, size]
            ratio = print_ratio(f"{operation}_vs_gloo@{size}x{ranks}", times["gloo"], times["elastic"])
            if ratio < 1:
                slower.append(f"{operation} {size} ({ratio:.2f})")
    if slower:
        print(f"slower than gloo with {ranks} workers: {', '.join(slower)}", flush=True)
