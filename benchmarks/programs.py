"""All-reduces by the transport's programs over gloo's, without torch.distributed in between: to choose algorithms by.

    python benchmarks/programs.py [--workers 2 4 8] [--sizes 1024 65536 ...] [--engine native|python]

All shapes and gloo are alive in the same processes and measured in turns. Shown is gloo's time / ours, above 1 ours is
faster: medians over the turns of the slowest worker's wall time, and behind the stroke of the processor time of all
workers together, which other jobs of the machine disturb less.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from megatron_elas.runtime.communicator.buffers import as_bytes
from megatron_elas.runtime.transport.program import Program
from megatron_elas.runtime.transport.sockets import SocketTransport
from tests.runtime.transport.programs import TorchReducer, bruck, direct, ring, whole

KIB = 1 << 10
SIZES = [KIB, 8 * KIB, 64 * KIB, 256 * KIB, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
TURNS = 5
SLICES = (16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB)


def shapes(me: int, count: int, size: int, reducer: TorchReducer) -> dict[str, Program]:
    """Programs that are worth trying at this size."""
    found = {}
    if size <= 1 << 20:
        found["whole"] = whole(me, count, size, reducer)
        if count > 2:
            found["bruck"] = bruck(me, count, size, reducer)
    if size >= 8 * KIB:
        found["ring"] = ring(me, count, size, 4, reducer)
        for slice_bytes in SLICES:
            if slice_bytes == SLICES[0] or slice_bytes // 2 < size // count:
                found[f"direct/{slice_bytes // KIB}K"] = direct(me, count, size, 4, reducer, slice_bytes)
    return found


class Cost(NamedTuple):
    """Of one call, in microseconds."""

    wall: float
    """Of the slowest worker."""
    processor: float
    """Of all workers together."""


def cost_of(call: Callable[[int], None], calls: int) -> Cost:
    """Mean of some calls, from a common start."""
    dist.barrier()
    began, started = time.process_time(), time.perf_counter()
    for turn in range(calls):
        call(turn)
    wall = torch.tensor((time.perf_counter() - started) / calls * 1e6)
    processor = torch.tensor((time.process_time() - began) / calls * 1e6)
    dist.all_reduce(wall, op=dist.ReduceOp.MAX)
    dist.all_reduce(processor)
    return Cost(float(wall), float(processor))


def run_worker(rank: int, count: int, folder: str, options: argparse.Namespace) -> None:
    """Measure; rank 0 prints."""
    os.environ["ELAS_NATIVE"] = "1" if options.engine == "native" else "0"
    store = dist.FileStore(f"{folder}/store", count)
    listen = f"unix:{folder}/{rank}" if options.transport == "unix" else "tcp:127.0.0.1:0"
    transport = SocketTransport(rank, listen, "benchmark")
    store.set(f"address/{rank}", transport.address)
    transport.set_addresses({at: store.get(f"address/{at}").decode() for at in range(count)})
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=60))
    reducer = TorchReducer("SUM", torch.float32)
    for size in options.sizes:
        tensor = torch.zeros(size // 4)
        view = [as_bytes(tensor)]
        calls: dict[str, Callable[[int], None]] = {"gloo": lambda turn, tensor=tensor: dist.all_reduce(tensor)}
        for name, program in shapes(rank, count, size, reducer).items():
            calls[name] = lambda turn, program=program, view=view: transport.run(1, turn, program, view)
        costs: dict[str, list[Cost]] = {name: [] for name in calls}
        repeats = max(2, min(100, (16 << 20) // size))
        for call in calls.values():
            cost_of(call, 2)
        for _ in range(options.turns):
            for name, call in calls.items():
                costs[name].append(cost_of(call, repeats))
        if rank == 0:
            medians = {
                name: Cost(*(statistics.median(values) for values in zip(*found, strict=True)))
                for name, found in costs.items()
            }
            gloo = medians.pop("gloo")
            print(f"{count} workers {size // KIB:6d} KiB: gloo {gloo.wall:.0f} us", end="")
            for name, ours in medians.items():
                print(f"  {name} {gloo.wall / ours.wall:.2f}/{gloo.processor / ours.processor:.2f}", end="")
            print(flush=True)
    dist.barrier()
    transport.close()
    dist.destroy_process_group()


def main() -> None:
    """Run all sizes for each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--engine", choices=["native", "python"], default="native")
    parser.add_argument("--transport", choices=["unix", "tcp"], default="unix")
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")
    for count in options.workers:
        with tempfile.TemporaryDirectory() as folder:
            processes = [
                context.Process(target=run_worker, args=(rank, count, folder, options)) for rank in range(count)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            if any(process.exitcode for process in processes):
                raise SystemExit(f"a worker failed: exit codes {[process.exitcode for process in processes]}")


if __name__ == "__main__":
    main()
