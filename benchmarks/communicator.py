"""Time of the elastic backend over gloo's, both alive in the same processes and measured in turns.

    python benchmarks/communicator.py [--workers 2 4] [--transport unix|tcp]

Prints lines ``RESULT name=value unit``. Ratios below 1 mean that the elastic backend is faster.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from megatron_elas.runtime.communicator.communicator import Communicator
from megatron_elas.runtime.transport.sockets import SocketTransport

SIZES = {"1KiB": 1 << 10, "64KiB": 1 << 16, "1MiB": 1 << 20}
TURNS = 5
CALLS = {"1KiB": 100, "64KiB": 100, "1MiB": 30}


def call_all_reduce(group: Any, tensor: torch.Tensor, rank: int) -> None:
    """One all-reduce."""
    dist.all_reduce(tensor, group=group)


def call_ping_pong(group: Any, tensor: torch.Tensor, rank: int) -> None:
    """Rank 0 to 1 and back; the others do nothing."""
    if rank == 0:
        dist.send(tensor, 1, group=group)
        dist.recv(tensor, 1, group=group)
    elif rank == 1:
        dist.recv(tensor, 0, group=group)
        dist.send(tensor, 0, group=group)


def time_us(call: Callable[[Any, torch.Tensor, int], None], group: Any, size: str, rank: int) -> float:
    """Mean time of one call, after a few to warm up."""
    tensor = torch.zeros(SIZES[size] // 4)
    for _ in range(5):
        call(group, tensor, rank)
    dist.barrier(group=group)
    started = time.perf_counter()
    for _ in range(CALLS[size]):
        call(group, tensor, rank)
    return (time.perf_counter() - started) / CALLS[size] * 1e6


def run_worker(rank: int, size: int, folder: str, scheme: str) -> None:
    """Measure; rank 0 prints."""
    store = dist.FileStore(f"{folder}/store", size)
    listen = f"unix:{folder}/{rank}" if scheme == "unix" else "tcp:127.0.0.1:0"
    transport = SocketTransport(rank, listen, "benchmark")
    store.set(f"address/{rank}", transport.address)
    transport.set_addresses({at: store.get(f"address/{at}").decode() for at in range(size)})
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    communicator = Communicator(transport, range(size))
    communicator.register_backend()
    groups = {"gloo": dist.new_group(backend="gloo"), "elastic": dist.new_group(backend="elastic")}
    for name, call in (("all_reduce", call_all_reduce), ("p2p_round_trip", call_ping_pong)):
        for label in SIZES:
            times: dict[str, list[float]] = {backend: [] for backend in groups}
            for _ in range(TURNS):
                for backend, group in groups.items():
                    times[backend].append(time_us(call, group, label, rank))
            if rank == 0:
                medians = {backend: statistics.median(values) for backend, values in times.items()}
                prefix = f"RESULT {name}_{label}_{size}workers"
                for backend, value in medians.items():
                    print(f"{prefix}_{backend}={value:.1f} us")
                print(f"{prefix}_ratio={medians['elastic'] / medians['gloo']:.3f} elastic/gloo", flush=True)
    dist.barrier(group=groups["gloo"])
    communicator.close()
    transport.close()
    dist.destroy_process_group()


def main() -> None:
    """Run all sizes for each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--transport", choices=["unix", "tcp"], default="unix")
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")
    for size in options.workers:
        with tempfile.TemporaryDirectory() as folder:
            processes = [
                context.Process(target=run_worker, args=(rank, size, folder, options.transport)) for rank in range(size)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            if any(process.exitcode for process in processes):
                raise SystemExit(f"a worker failed: exit codes {[process.exitcode for process in processes]}")


if __name__ == "__main__":
    main()
