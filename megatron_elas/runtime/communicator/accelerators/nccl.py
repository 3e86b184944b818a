"""Inner groups of CUDA tensors: ``ProcessGroupNCCL``.

Read in torch 2.13.0 (``_distributed_c10d.pyi``, docstrings of the bindings, headers) with NCCL 2.29.7; the tests
compare the calls with the class that is installed.

* Non-blocking, so that no call of NCCL itself waits for a peer. torch does, with a time limit, when a communicator is
  used before it is ready, and holds a lock meanwhile that abort wants too: NONBLOCKING_TIMEOUT_S. A peer that died is
  noticed by NCCL before that, one that is stopped is not.
* Connected at once and bound to the device, so sends and receives use the group's own communicator, and the store is
  needed only while connecting.
* ``shrink`` needs NCCL 2.27. torch 2.13 has no way to add a member (it does not bind ``ncclCommGrow`` of NCCL 2.29), so
  a join makes a new inner group.
* torch's watchdog would end the process when an operation fails or takes long. Here the control plane decides about
  that, so error handling and monitoring are switched off; torch reads these variables when an inner group is made.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store, Work

from megatron_elas.runtime.communicator.accelerators.driver import Inner
from megatron_elas.runtime.communicator.accelerators.failures import Failure, Sign, read_signs
from megatron_elas.runtime.communicator.accelerators.moves import Move, transfer_as_one

logger = logging.getLogger(__name__)

SHRINK_ABORT = 1
"""NCCL_SHRINK_ABORT: operations in flight are ended first."""

WATCHDOG_OFF = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
"""The epoch ends operations here, not torch's clock."""

NONBLOCKING_TIMEOUT_S = 120
"""In which a communicator must become ready (torch's default: 30 min). Taken where the environment says nothing."""

SIGNS = (
    Sign("communicator was aborted", Failure.ABORTED),
    Sign("ncclCommAbort", Failure.ABORTED),
    Sign("remote process exited", Failure.PEER),
    Sign("ncclRemoteError", Failure.PEER),
    Sign("remote error", Failure.PEER),
    Sign("ncclSystemError", Failure.PEER),
    Sign("unhandled system error", Failure.PEER),
    Sign("connection closed by remote peer", Failure.PEER),
    Sign("ncclInternalError", Failure.PEER),
    Sign("timed out", Failure.TIMEOUT),
    Sign("timeout", Failure.TIMEOUT),
)
"""Texts of ``ncclGetErrorString`` and of torch around it. Wrong arguments (``ncclInvalidUsage``) are not among them."""

DEVICE_SIGNS = (Sign("uncorrectable ECC error", Failure.DEVICE),)


class NcclDriver:
    """Makes and ends ``ProcessGroupNCCL`` objects."""

    device_type = "cuda"

    def __init__(self, timeout: timedelta = timedelta(minutes=10), binding: Any = None) -> None:
        """Switch torch's watchdog off.

        Args:
            timeout: After which torch notes that an operation is late. It is not ended by it.
            binding: The class; torch's unless given.
        """
        if binding is None:
            from torch.distributed import ProcessGroupNCCL as binding  # type: ignore[no-redef]
        self._binding: Any = binding
        self._timeout = timeout
        for name, value in WATCHDOG_OFF.items():
            if os.environ.get(name, value) != value:
                logger.warning("%s was %s and is set to %s: epochs end operations here", name, os.environ[name], value)
            os.environ[name] = value
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(NONBLOCKING_TIMEOUT_S))

    def make(self, store: Store, rank: int, workers: Sequence[int], name: str, device: torch.device) -> Inner:
        """See ``Driver``."""
        options = self._binding.Options()
        options.config.blocking = 0
        options._timeout = self._timeout
        options.global_ranks_in_group = list(workers)
        options.group_name = name
        inner = self._binding(store, rank, len(workers), options)
        inner.bound_device_id = device
        return inner

    def connect(self, inner: Inner, device: torch.device, check: Callable[[], None]) -> None:
        """See ``Driver``."""
        inner.eager_connect_single_device(device)
        check()
        inner.allreduce([torch.zeros(1, device=device)]).wait()  # torch waits for the communicator only when it is used
        check()

    def can_shrink(self, inner: Inner) -> bool:
        """See ``Driver``. NCCL 2.27 or later, when torch was built and now."""
        return bool(getattr(inner, "supports_shrinking", False)) and _runtime_version(inner) >= (2, 27)

    def shrink(self, inner: Inner, excluded: Sequence[int], device: torch.device) -> Inner:
        """See ``Driver``."""
        smaller = inner.shrink(list(excluded), SHRINK_ABORT)
        smaller.bound_device_id = device
        inner.abort()  # not shutdown, which would wait for the dead
        return smaller

    def transfer(self, inner: Inner, moves: Sequence[Move]) -> Work | None:
        """See ``Driver``."""
        return transfer_as_one(inner, moves)

    def abort(self, inner: Inner) -> None:
        """See ``Driver``."""
        inner.abort()

    def classify(self, inner: Inner, error: BaseException) -> Failure | None:
        """See ``Driver``. The inner group's own opinion counts where the text says nothing."""
        told = read_signs(error, DEVICE_SIGNS) or read_signs(error, SIGNS)
        if told is not None:
            return told
        verdict = getattr(inner.get_error(), "name", "SUCCESS")
        return {"TIMEOUT": Failure.TIMEOUT, "COMM_ERROR": Failure.PEER, "REMOTE_ERROR": Failure.PEER}.get(verdict)

    def stop(self, device: torch.device) -> bool:
        """Nothing: groups are aborted one by one."""
        return False

    def restart(self, device: torch.device, kept: Sequence[Inner]) -> bool:
        """Nothing was stopped."""
        return True


def _runtime_version(inner: Inner) -> tuple[int, ...]:
    ask = getattr(inner, "get_runtime_nccl_version", torch.cuda.nccl.version)
    return tuple(ask())
