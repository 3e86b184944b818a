"""Vendors' classes that record their calls, with the signatures of the real ones.

Members of a group are threads with transports of their own. The classes meet through the store as the real ones do: the
first member writes an id, the others read it. They move no data; an operation completes when the test says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import AllreduceOptions, Work

from tests.runtime.workers import wait_until

_ids = itertools.count(1)

Call = tuple[Any, ...]


class FakeWork(Work):
    """Completes when ``done`` is set; ``error`` is raised by ``wait``."""

    def __init__(self, done: bool = True) -> None:
        super().__init__()
        self.done = done
        self.error: Exception | None = None
        self.failed: Exception | None = None
        """What ``exception`` tells."""
        self.waits: list[timedelta | None] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waits.append(timeout)
        if self.error is not None:
            raise self.error
        return True

    def exception(self) -> Exception | None:
        return self.failed

    def is_completed(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.done


class Record:
    """The calls on all inner groups of one worker, in order, and what the next ones shall do."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.groups: list[FakeNccl] = []
        self.works: list[FakeWork] = []
        self.busy = False
        """Operations started from now on are in flight until the test completes them."""
        self.fail_next: Exception | None = None
        self.ready = True
        """Otherwise operations wait, as those of a communicator that is not ready."""
        self.shrinks = True
        self.shrink_error: Exception | None = None
        self.version = (2, 29, 7)

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def note(self, *call: Any) -> None:
        self.calls.append(call)


class FakeNccl:
    """``torch.distributed.ProcessGroupNCCL``."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.config = SimpleNamespace(blocking=-(2**31))
            self._timeout = timedelta(minutes=10)
            self.global_ranks_in_group: list[int] = []
            self.group_name = ""

    record: Record
    """Set per worker, by ``nccl_of``."""

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        self.store, self._rank, self._size, self.options = store, rank, size, options
        self.bound_device_id: torch.device | None = None
        self.number = len(self.record.groups)
        self.meeting_id: bytes | None = None
        self.aborted = False
        self.record.groups.append(self)
        self._note("make", rank, size, options.config.blocking)

    def _note(self, what: str, *rest: Any) -> None:
        self.record.note(what, self.number, *rest)

    # connecting and ending

    def eager_connect_single_device(self, arg0: torch.device) -> None:
        self._note("connect", str(arg0))
        if self._rank == 0:
            self.store.set("0", str(next(_ids)))
        try:
            self.meeting_id = self.store.get("0")
        except Exception as error:  # as the real one: the reason becomes a text
            raise dist.DistBackendError(f"store->get('0') got error: {error}") from None

    def abort(self) -> None:
        self.aborted = True
        self._note("abort")

    @property
    def supports_shrinking(self) -> bool:
        return self.record.shrinks

    def get_runtime_nccl_version(self) -> tuple[int, int, int]:
        return self.record.version

    def shrink(self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts_override: Any = None) -> FakeNccl:
        self._note("shrink", list(ranks_to_exclude), shrink_flags)
        if self.record.shrink_error is not None:
            raise self.record.shrink_error
        before = sum(rank < self._rank for rank in ranks_to_exclude)
        self.store.clone()
        smaller = type(self)(self.store, self._rank - before, self._size - len(ranks_to_exclude), self.options)
        smaller.meeting_id = self.meeting_id
        return smaller

    def get_error(self) -> Any:
        return SimpleNamespace(name="SUCCESS")

    # operations

    def _operate(self, name: str, *details: Any) -> FakeWork:
        self._note(name, *details)
        wait_until(lambda: self.record.ready or self.aborted)
        if self.aborted:
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self._rank}.")
        failing, self.record.fail_next = self.record.fail_next, None
        if failing is not None:
            raise failing
        work = FakeWork(done=not self.record.busy)
        self.record.works.append(work)
        return work

    def allreduce(self, tensors: Sequence[Tensor], opts: AllreduceOptions = AllreduceOptions()) -> Work:  # noqa: B008
        return self._operate("allreduce", len(tensors))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        return self._operate("allreduce_coalesced", len(tensors))

    def _reduce_scatter_base(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> Work:
        return self._operate("_reduce_scatter_base", outputTensor.numel(), inputTensor.numel())

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self._operate("_allgather_base", output.numel(), input.numel())

    def allgather(
        self, output_tensors: Sequence[Sequence[Tensor]], input_tensors: Sequence[Tensor], opts: Any = None
    ) -> Work:
        return self._operate("allgather", len(output_tensors))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        return self._operate("broadcast", opts.rootRank)

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        return self._operate("reduce", opts.rootRank)

    def reduce_scatter(
        self, output_tensors: Sequence[Tensor], input_tensors: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> Work:
        return self._operate("reduce_scatter", len(output_tensors))

    def gather(
        self, output_tensors: Sequence[Sequence[Tensor]], input_tensors: Sequence[Tensor], opts: Any = None
    ) -> Work:
        return self._operate("gather", len(output_tensors))

    def scatter(
        self, output_tensors: Sequence[Tensor], input_tensors: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> Work:
        return self._operate("scatter", len(input_tensors))

    def alltoall(self, output_tensor: Sequence[Tensor], input_tensor: Sequence[Tensor], opts: Any = None) -> Work:
        return self._operate("alltoall", len(output_tensor))

    def alltoall_base(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        return self._operate("alltoall_base", list(output_split_sizes), list(input_split_sizes))

    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int) -> Work:
        return self._operate("send", dstRank, tag)

    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int) -> Work:
        return self._operate("recv", srcRank, tag)

    def _start_coalescing(self) -> None:
        self._note("_start_coalescing")

    def _end_coalescing(self) -> Work:
        return self._operate("_end_coalescing")


def nccl_of(record: Record) -> type[FakeNccl]:
    """The class for one worker."""
    return type("FakeNccl", (FakeNccl,), {"record": record})


class FakeHccl(FakeNccl):
    """``torch_npu._C._distributed_c10d.ProcessGroupHCCL``: connects with the first operation."""

    class Options(FakeNccl.Options):
        def __init__(self) -> None:
            super().__init__()
            self.group_id = ""

    supports_shrinking = False  # type: ignore[assignment]

    def _operate(self, name: str, *details: Any) -> FakeWork:
        if self.meeting_id is None:
            if self._rank == 0:
                self.store.set("0", str(next(_ids)))
            self.meeting_id = self.store.get("0")
        return super()._operate(name, *details)

    def abort_hccl_comm(self, reason: str) -> None:
        self._note("abort_hccl_comm", reason)

    def resume_hccl_comm(self, device_id: int) -> None:
        self._note("resume_hccl_comm", device_id)

    def set_watchdog_status(self, status: int) -> None:
        self._note("set_watchdog_status", status)

    def clear_workmeta_list(self) -> None:
        self._note("clear_workmeta_list")

    def batch_isend_irecv(
        self, op_type: Sequence[str], tensors: Sequence[Tensor], remote_rank_list: Sequence[int]
    ) -> Work:
        return self._operate("batch_isend_irecv", list(op_type), list(remote_rank_list))


def npu_library(record: Record, groups: Any) -> Any:
    """``torch_npu`` of one worker. Its functions go through ``groups()`` as the real ones go through torch's list."""
    device = torch.device("meta")  # stands for npu, which torch does not know without torch-npu

    def backends() -> list[Any]:
        return [group._get_backend(device) for group in groups() if device in group._device_types]

    def stop_device(device_id: int) -> int:
        record.note("stop_device", device_id)
        for backend in backends():
            backend.set_watchdog_status(2)
        return 0

    def restart_device(
        device_id: int, rebuild_all_resources: bool = False, disable_tensor_unsafe_check: bool = False
    ) -> None:
        record.note("restart_device", device_id, rebuild_all_resources)
        for backend in backends():
            backend.clear_workmeta_list()
            backend.set_watchdog_status(1)

    def reinit_process_group(group: Any = None, rebuild_link: bool = True) -> None:
        record.note("reinit_process_group", group, rebuild_link)
        failing, record.fail_next = record.fail_next, None
        if failing is not None:
            raise failing
        for backend in backends():
            backend.resume_hccl_comm(0)

    binding = type("FakeHccl", (FakeHccl,), {"record": record})
    return SimpleNamespace(
        npu=SimpleNamespace(
            stop_device=stop_device,
            restart_device=restart_device,
            synchronize=lambda device_index=None: record.note("synchronize", device_index),
        ),
        distributed=SimpleNamespace(reinit_process_group=reinit_process_group),
        _C=SimpleNamespace(_distributed_c10d=SimpleNamespace(ProcessGroupHCCL=binding)),
    )
