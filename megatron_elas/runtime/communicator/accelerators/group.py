"""An elastic process group that also takes tensors of an accelerator.

Where the tensors lie decides: those on the accelerator go to the inner group, all others the way of
``ElasticProcessGroup``. Operations without tensors (``barrier``) stay on the transport and do not wait for the device.

Collectives, and sends and receives inside ``_coalescing_manager``, use the inner group of all members: as with NCCL
itself, all must take part in the first one of an epoch. Other sends and receives use an inner group of the two. While
groups are muted between steps everything completes locally, as on the CPU; a reduction that the end of an epoch cuts
short there leaves its tensors undefined on an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from megatron_elas.runtime.communicator.accelerators.accelerator import Accelerator
from megatron_elas.runtime.communicator.accelerators.driver import Inner
from megatron_elas.runtime.communicator.accelerators.inner_groups import InnerGroups
from megatron_elas.runtime.communicator.accelerators.transfers import Transfers
from megatron_elas.runtime.communicator.channels import INTRODUCTION, PAIR_INTRODUCTION
from megatron_elas.runtime.communicator.process_group import ElasticProcessGroup
from megatron_elas.runtime.communicator.work import CompletedWork
from megatron_elas.runtime.transport.base import Transport
from megatron_elas.spec.errors import EpochChanged

_BACKEND_METHODS = {
    "allreduce": ("allreduce",),
    "reduce": ("reduce",),
    "reduce_scatter": ("reduce_scatter",),
    "reduce_scatter_single": ("_reduce_scatter_base", "reduce_scatter_single"),
    "allgather": ("allgather",),
    "all_gather_single": ("_allgather_base", "all_gather_single"),
    "broadcast": ("broadcast",),
    "gather": ("gather",),
    "scatter": ("scatter",),
    "alltoall": ("alltoall",),
    "all_to_all_single": ("alltoall_base", "all_to_all_single"),
}
"""What a group's method is called on ``c10d.Backend``: today's name first, then the group's own."""

_COALESCED = {
    "reduce_scatter_single_coalesced": "reduce_scatter_single",
    "all_gather_single_coalesced": "all_gather_single",
}
"""Methods over several tensors that ``c10d.Backend`` lacks, and the one for one tensor."""


class DeviceProcessGroup(ElasticProcessGroup):
    """Made by ``Communicator.open_group`` where there is an accelerator."""

    def __init__(
        self,
        owner: Any,
        transport: Transport,
        accelerator: Accelerator,
        *,
        name: str,
        members: Sequence[int],
        channel: int,
    ) -> None:
        """As ``ElasticProcessGroup``, whose ``owner`` is the communicator; ``accelerator`` is the process's."""
        self._accelerator = accelerator
        self._plane = accelerator.open_plane(f"group {name}", members)
        self._transfers = Transfers(accelerator, transport.worker, name, self._tolerate)
        self._batch: Inner | None = None
        super().__init__(owner, transport, name=name, members=members, channel=channel)

    # ------------------------------------------------------------------ membership

    def edit(self, members: Sequence[int], channel: int | None = None) -> None:
        """As ``ElasticProcessGroup.edit``. ``Accelerator.settle`` is due when all groups were edited."""
        super().edit(members, channel)
        self._leave_batch()
        self._plane.edit(self.members)
        self._transfers.edit(self.members)

    def drain(self) -> None:
        """As ``ElasticProcessGroup.drain``. ``Accelerator.interrupt`` was called before."""
        super().drain()
        self._transfers.edit(self.members)
        self._leave_batch()

    def _leave_batch(self) -> None:
        """An inner group that was left with operations to be started as one is of no use any more."""
        if self._batch is not None:
            self._batch = None
            self._plane.drop()

    def shutdown(self) -> None:
        """End the inner groups too."""
        for plane in (self._plane, *self._transfers.planes):
            plane.interrupt()
            plane.drop()
            plane.clear()
        super().shutdown()

    def abort(self) -> None:
        """Cancel all communication of the process, also the device's."""
        super().abort()
        self._accelerator.interrupt()

    # ------------------------------------------------------------------ what torch asks about a group

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device(self._accelerator.device.type)]

    def _get_backend(self, device: torch.device) -> Any:
        """What vendors' recovery functions call for their part: the inner groups that are there now."""
        if device.type != self._accelerator.device.type:
            return super()._get_backend(device)
        planes = (self._plane, *self._transfers.planes)
        return InnerGroups([plane.inner for plane in planes if plane.inner is not None])

    # ------------------------------------------------------------------ collectives

    def _on_device(self, kind: str, call: Callable[[Inner], Work | None], result: Any) -> Work:
        """Run an operation on the inner group of all members."""
        self._accelerator.start_waiting()
        part = self._batch is not None
        try:
            work = self._plane.run(kind, call, self.channel + INTRODUCTION, self._tolerate, part=part)
        except EpochChanged as error:
            if not self._tolerate(error):
                raise
            work = None
        return CompletedWork(result) if work is None else work

    def _tolerate(self, error: EpochChanged) -> bool:
        if self._owner.tolerant:
            self._owner.note_failure(error)
        return self._owner.tolerant

    def _takes(self, tensors: Any) -> bool:
        """Whether an operation on these is the inner group's. Muted groups complete locally, on any device."""
        return _first(tensors).device.type == self._accelerator.device.type and not self._owner.silent

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """See ``ElasticProcessGroup``."""
        return self._route("allreduce", tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """See ``ElasticProcessGroup``."""
        if not self._takes(tensors):
            return super().allreduce_coalesced(tensors, opts)
        return self._on_device("allreduce", lambda inner: inner.allreduce_coalesced(tensors, *_given(opts)), tensors)

    def _route(self, method: str, *args: Any) -> Work:
        """One call with tensors first and options last."""
        if not self._takes(args[0]):
            work: Work = getattr(super(), method)(*args)
            return work
        *tensors, opts = args
        names = _BACKEND_METHODS[method]
        return self._on_device(method, lambda inner: _method(inner, names)(*tensors, *_given(opts)), args[0])

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        """See ``ElasticProcessGroup``."""
        return self._route("reduce", tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        """See ``ElasticProcessGroup``."""
        return self._route("broadcast", tensors, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        """See ``ElasticProcessGroup``."""
        return self._route("reduce_scatter", outputs, inputs, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """See ``ElasticProcessGroup``."""
        return self._route("reduce_scatter_single", output, input, opts)

    _reduce_scatter_base = reduce_scatter_single

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """See ``ElasticProcessGroup``."""
        return self._route("allgather", outputs, inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """See ``ElasticProcessGroup``."""
        return self._route("all_gather_single", output, input, opts)

    _allgather_base = all_gather_single

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        """See ``ElasticProcessGroup``."""
        return self._route("scatter", outputs, inputs, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """See ``ElasticProcessGroup``."""
        return self._route("alltoall", outputs, inputs, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        """See ``ElasticProcessGroup``."""
        if not self._takes(inputs):  # only the root has outputs
            return super().gather(outputs, inputs, opts)
        return self._on_device("gather", lambda inner: inner.gather(outputs, inputs, *_given(opts)), outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        opts: Any = None,
    ) -> Work:
        """See ``ElasticProcessGroup``."""
        if not self._takes(output):
            return super().all_to_all_single(output, input, output_split_sizes, input_split_sizes, opts)
        names = _BACKEND_METHODS["all_to_all_single"]
        sizes = (output_split_sizes or [], input_split_sizes or [])
        return self._on_device(
            "all_to_all_single", lambda inner: _method(inner, names)(output, input, *sizes, *_given(opts)), output
        )

    alltoall_base = all_to_all_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """See ``ElasticProcessGroup``."""
        if not self._takes(outputs):
            return super().reduce_scatter_single_coalesced(outputs, inputs, opts)
        return self._one_by_one("reduce_scatter_single_coalesced", outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """See ``ElasticProcessGroup``."""
        if not self._takes(outputs):
            return super().all_gather_single_coalesced(outputs, inputs, opts)
        return self._one_by_one("all_gather_single_coalesced", outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """See ``ElasticProcessGroup``."""
        if not self._takes(inputs):
            return super().allgather_coalesced(outputs, inputs, opts)
        by_input = [[slots[at] for slots in outputs] for at in range(len(inputs))]

        def call(inner: Inner) -> Work:
            inner._start_coalescing()
            for slots, tensor in zip(by_input, inputs, strict=True):
                inner.allgather([slots], [tensor], *_given(opts))
            work: Work = inner._end_coalescing()
            return work

        return self._on_device("allgather_coalesced", call, outputs)

    def _one_by_one(self, method: str, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:
        """Several operations of one tensor each, started as one."""
        names = _BACKEND_METHODS[_COALESCED[method]]

        def call(inner: Inner) -> Work:
            inner._start_coalescing()
            for output, tensor in zip(outputs, inputs, strict=True):
                _method(inner, names)(output, tensor, *_given(opts))
            work: Work = inner._end_coalescing()
            return work

        return self._on_device(method, call, outputs)

    # ------------------------------------------------------------------ several as one

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != self._accelerator.device.type or self._owner.silent:
            super()._start_coalescing(device)
            return
        self._accelerator.start_waiting()
        inner = self._plane.prepare("coalesced operations", self.channel + INTRODUCTION)
        inner._start_coalescing()
        self._batch = inner

    def _end_coalescing(self, device: torch.device) -> Work:
        if self._batch is None:
            return super()._end_coalescing(device)
        batch, self._batch = self._batch, None
        return self._on_device("coalesced operations", lambda _: batch._end_coalescing(), [])

    # ------------------------------------------------------------------ point to point

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Work:
        """See ``ElasticProcessGroup``; on an accelerator not eager, but as ``transfers`` says."""
        if not self._takes(tensors):
            return super().send(tensors, dstRank, tag)
        return self._with_peer("send", tensors, dstRank, tag)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Work:
        """See ``ElasticProcessGroup``; on an accelerator as ``transfers`` says."""
        if not self._takes(tensors):
            return super().recv(tensors, srcRank, tag)
        return self._with_peer("recv", tensors, srcRank, tag)

    def batch_isend_irecv(self, op_type: list[str], tensors: list[Tensor], remote_rank_list: list[int]) -> Work:
        """What torch-npu's ``batch_isend_irecv`` calls."""
        return self._on_device(
            "batch_isend_irecv", lambda inner: inner.batch_isend_irecv(op_type, tensors, remote_rank_list), tensors
        )

    def _with_peer(self, direction: str, tensors: list[Tensor], rank: int, tag: int) -> Work:
        if self._batch is not None:
            return self._on_device(direction, lambda inner: getattr(inner, direction)(tensors, rank, tag), tensors)
        return self._transfers.add(direction, tensors, self.members[rank], tag, self.channel + PAIR_INTRODUCTION)


def _first(tensors: Any) -> Tensor:
    while not isinstance(tensors, Tensor):
        tensors = tensors[0]
    return tensors


def _given(opts: Any) -> tuple[Any, ...]:
    """Options to pass on; without any, torch's own are taken."""
    return () if opts is None else (opts,)


def _method(inner: Inner, names: Sequence[str]) -> Callable[..., Work]:
    for name in names:
        found = getattr(inner, name, None)
        if found is not None:
            method: Callable[..., Work] = found
            return method
    raise NotImplementedError(f"{type(inner).__name__} of this torch has none of {', '.join(names)}")
