"""An accelerator for ``scripts/device_checks.py`` where there is none: CPU tensors, and inner groups that move bytes.

An inner group is an elastic CPU group on a transport of its own, run on its thread, so that it can hang and be aborted
like a vendor's. It has no streams: waiting for an operation blocks the CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import AllreduceOptions, Store, Work

from megatron_elas.runtime.communicator.accelerators.failures import Failure
from megatron_elas.runtime.communicator.accelerators.moves import Move, transfer_as_one
from megatron_elas.runtime.communicator.process_group import ElasticProcessGroup
from megatron_elas.runtime.transport.sockets import SocketTransport
from megatron_elas.spec.errors import EpochChanged
from tests.runtime.workers import wait_until

CPU = torch.device("cpu", 0)


class Owner:
    """Of inner groups: nothing is muted."""

    silent = False
    tolerant = False
    deterministic = False

    def note_failure(self, error: EpochChanged) -> None:
        raise AssertionError("an inner group is never tolerant")

    def forget(self, group: ElasticProcessGroup) -> None:
        pass


class Inner:
    """What a vendor's ``c10d.Backend`` is elsewhere."""

    def __init__(self, folder: Path, worker: int, workers: Sequence[int], name: str) -> None:
        self.workers, self.name = list(workers), name
        self.addresses = {at: f"unix:{folder}/{name}-{at}" for at in workers}
        self.files = [folder / f"{name}-{at}" for at in workers]
        self.transport = SocketTransport(worker, self.addresses[worker], name)
        self.transport.set_addresses(self.addresses)
        self.group = ElasticProcessGroup(Owner(), self.transport, name=name, members=workers, channel=1)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        opts = opts or AllreduceOptions()
        opts.asyncOp = True
        return self.group.allreduce(tensors, opts)

    def _start_coalescing(self) -> None:
        self.group._start_coalescing(CPU)

    def _end_coalescing(self) -> Work:
        return self.group._end_coalescing(CPU)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)


class StandInDriver:
    """See ``Driver``."""

    device_type = "cpu"

    def __init__(self, folder: Path, worker: int) -> None:
        self.folder, self.worker = folder, worker
        self.inner: list[Inner] = []
        self.numbers = itertools.count()

    def make(self, store: Store, rank: int, workers: Sequence[int], name: str, device: torch.device) -> Inner:
        if rank == 0:
            store.set("0", f"{name}-{self.worker}-{next(self.numbers)}")
        self.inner.append(Inner(self.folder, self.worker, workers, store.get("0").decode()))
        return self.inner[-1]

    def connect(self, inner: Inner, device: torch.device, check: Callable[[], None]) -> None:
        wait_until(lambda: all(file.exists() for file in inner.files))
        check()

    def can_shrink(self, inner: Inner) -> bool:
        return True

    def shrink(self, inner: Inner, excluded: Sequence[int], device: torch.device) -> Inner:
        left = [worker for at, worker in enumerate(inner.workers) if at not in excluded]
        self.inner.append(Inner(self.folder, self.worker, left, f"{inner.name}-less"))
        self.connect(self.inner[-1], device, lambda: None)
        self.abort(inner)
        return self.inner[-1]

    def transfer(self, inner: Inner, moves: Sequence[Move]) -> Work | None:
        return transfer_as_one(inner, moves)

    def abort(self, inner: Inner) -> None:
        inner.transport.cancel()

    def classify(self, inner: Inner, error: BaseException) -> Failure | None:
        return Failure.ABORTED if isinstance(error, EpochChanged) else None

    def stop(self, device: torch.device) -> bool:
        return False

    def restart(self, device: torch.device, kept: Sequence[Inner]) -> bool:
        return True


class StandIn:
    """See ``device_checks.Platform``."""

    device = CPU
    numel = 1 << 14
    has_streams = False

    def __init__(self, folder: Path, worker: int) -> None:
        self.driver = StandInDriver(folder, worker)

    def make_driver(self) -> StandInDriver:
        return self.driver

    def synchronize(self) -> None:
        for inner in self.driver.inner:
            inner.group._runner.drain()

    def keep_busy(self) -> None:
        raise AssertionError("there is nothing to keep busy")
