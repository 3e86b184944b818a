"""Workers as threads with real links, each with an accelerator that is a recorded fake."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_elas.runtime.communicator.accelerators.accelerator import Accelerator
from megatron_elas.runtime.communicator.accelerators.driver import Driver
from megatron_elas.runtime.communicator.accelerators.group import DeviceProcessGroup
from megatron_elas.runtime.communicator.accelerators.hccl import HcclDriver
from megatron_elas.runtime.communicator.accelerators.nccl import NcclDriver
from megatron_elas.runtime.communicator.communicator import Communicator
from megatron_elas.runtime.communicator.membership import GroupMembers, Membership
from megatron_elas.runtime.transport.sockets import SocketTransport
from tests.runtime.communicator.accelerators.fakes import Record, nccl_of, npu_library
from tests.runtime.workers import introduce

DEVICE = torch.device("meta", 0)
"""Stands for the accelerator: its tensors have shapes and no memory."""

JOIN_S = 60.0


class NcclOnMeta(NcclDriver):
    device_type = "meta"


class HcclOnMeta(HcclDriver):
    device_type = "meta"


class Member:
    """One worker."""

    def __init__(self, worker: int, count: int, folder: Path, vendor: str, groups: Mapping[str, Sequence[int]]) -> None:
        self.worker = worker
        self.record = Record()
        self.transport: SocketTransport = introduce(worker, count, folder)
        driver: Driver
        if vendor == "nccl":
            driver = NcclOnMeta(binding=nccl_of(self.record))
        else:
            driver = HcclOnMeta(library=npu_library(self.record, lambda: self.communicator.groups))
        self.accelerator = Accelerator(driver, self.transport, DEVICE)
        self.communicator = Communicator(self.transport, range(count), self.accelerator)
        self.groups: dict[str, DeviceProcessGroup] = {}
        for name, members in groups.items():
            if worker in members:
                group = self.communicator.open_group(name, members)
                assert isinstance(group, DeviceProcessGroup)
                self.groups[name] = group

    def all_reduce(self, name: str, **opts: Any) -> Any:
        return self.groups[name].allreduce([on_device(2)])

    def change(self, epoch: int, members: Mapping[str, Sequence[int]], lost: Sequence[int] = ()) -> None:
        """What a recovery does to the communicator."""
        self.communicator.cancel()
        self.communicator.drain()
        groups = {  # a test may call a group otherwise than the communicator does
            group.group_name: GroupMembers(members=tuple(members.get(name, group.members)), channel=group.channel)
            for name, group in self.groups.items()
        }
        workers = sorted({worker for group in groups.values() for worker in group.members})
        known = self.transport._connections._addresses
        self.communicator.edit(
            Membership(
                epoch=epoch,
                addresses={worker: known[worker] for worker in known if worker not in lost},
                ranks={worker: rank for rank, worker in enumerate(workers)},
                groups=groups,
            )
        )
        self.record.calls.append(("epoch", epoch))

    def since(self, epoch: int) -> list[Any]:
        """Calls made since the epoch was entered."""
        return self.record.calls[self.record.calls.index(("epoch", epoch)) + 1 :]

    def close(self) -> None:
        self.transport.cancel()
        self.communicator.close()
        self.transport.close()


def on_device(*shape: int) -> Tensor:
    return torch.zeros(*shape, device=DEVICE)


def together(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run them at once; gives what each returned or raised."""
    outcomes: list[Any] = ["not done in time"] * len(functions)

    def run(at: int) -> None:
        try:
            outcomes[at] = functions[at]()
        except Exception as error:
            outcomes[at] = error

    threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    return outcomes


def all_well(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    assert "not done in time" not in outcomes
    return outcomes


class Job:
    def __init__(self, count: int, folder: Path, groups: Mapping[str, Sequence[int]], vendor: str = "nccl") -> None:
        made = together([lambda w=w: Member(w, count, folder, vendor, groups) for w in range(count)])
        self.members: list[Member] = all_well(made)

    def __getitem__(self, worker: int) -> Member:
        return self.members[worker]

    def each(self, workers: Sequence[int], act: Callable[[Member], Any]) -> list[Any]:
        return all_well(self.attempt(workers, act))

    def attempt(self, workers: Sequence[int], act: Callable[[Member], Any]) -> list[Any]:
        return together([lambda w=w: act(self.members[w]) for w in workers])


@contextlib.contextmanager
def running(count: int, folder: Path, groups: Mapping[str, Sequence[int]], vendor: str = "nccl") -> Iterator[Job]:
    job = Job(count, folder, groups, vendor)
    try:
        yield job
    finally:
        for member in job.members:
            member.close()
