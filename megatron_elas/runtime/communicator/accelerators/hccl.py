"""Inner groups of NPU tensors: ``ProcessGroupHCCL``.

Read in the wheel of torch-npu 2.13.0 (``npu/_recovery.py``, ``distributed/distributed_c10d.py``, texts in
``libtorch_npu.so``) and in Ascend/pytorch (bindings in ``csrc/distributed/Init.cpp``). Nothing was run.

HCCL cannot end the operations of one group. The whole device is stopped (what runs raises "FORCE STOP") and started
again; groups whose members are the same resume their communicator, the others get a new one. ``stop_device``,
``restart_device`` and ``reinit_process_group`` go through torch's list of groups and call
``group._get_backend(npu)`` on those that have ``npu`` among their devices; our groups answer that (``inner_groups``).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store, Work

from megatron_elas.runtime.communicator.accelerators.driver import Inner
from megatron_elas.runtime.communicator.accelerators.failures import Failure, Sign, read_signs
from megatron_elas.runtime.communicator.accelerators.moves import Move, transfer_as_one

logger = logging.getLogger(__name__)

SIGNS = (
    Sign("UCE ERROR", Failure.DEVICE),
    Sign("SUSPECT MEM ERROR", Failure.DEVICE),
    Sign("FORCE STOP", Failure.ABORTED),
    Sign("HCCS LINK ERROR", Failure.PEER),
    Sign("SUSPECT REMOTE ERROR", Failure.PEER),
)
"""Texts of torch-npu's errors. UCE: uncorrectable error of this device's memory."""

ABORT_REASON = "members changed"


class HcclDriver:
    """Makes and ends ``ProcessGroupHCCL`` objects, stops and restarts the device."""

    device_type = "npu"

    def __init__(
        self, timeout: timedelta = timedelta(minutes=30), *, rebuild_all_resources: bool = False, library: Any = None
    ) -> None:
        """Make a driver.

        Args:
            timeout: Of operations.
            rebuild_all_resources: Have ``restart_device`` make streams anew too. It marks all tensors of the device
                as unsafe to read.
            library: ``torch_npu``, imported unless given.
        """
        self._library: Any = importlib.import_module("torch_npu") if library is None else library
        self._timeout = timeout
        self._rebuild_all_resources = rebuild_all_resources
        self._stopped = False

    def make(self, store: Store, rank: int, workers: Sequence[int], name: str, device: torch.device) -> Inner:
        """See ``Driver``."""
        binding = self._library._C._distributed_c10d.ProcessGroupHCCL
        options = binding.Options()
        options._timeout = self._timeout
        options.global_ranks_in_group = list(workers)
        options.group_id = name
        return binding(store, rank, len(workers), options)

    def connect(self, inner: Inner, device: torch.device, check: Callable[[], None]) -> None:
        """See ``Driver``. HCCL connects with the first operation; ``check`` is not asked meanwhile."""
        first = torch.zeros(1, device=device)
        inner.allreduce([first]).wait()
        self._library.npu.synchronize(device.index)

    def can_shrink(self, inner: Inner) -> bool:
        """No: HCCL has nothing like it."""
        return False

    def shrink(self, inner: Inner, excluded: Sequence[int], device: torch.device) -> Inner:
        """Not there."""
        raise NotImplementedError("HCCL cannot shrink a communicator; make a new inner group")

    def transfer(self, inner: Inner, moves: Sequence[Move]) -> Work | None:
        """See ``Driver``."""
        if len(moves) == 1:
            return transfer_as_one(inner, moves)
        work: Work | None = inner.batch_isend_irecv(
            ["isend" if move.direction == "send" else "irecv" for move in moves],
            [move.tensors[0] for move in moves],
            [move.rank for move in moves],
        )
        return work

    def abort(self, inner: Inner) -> None:
        """See ``Driver``."""
        inner.abort_hccl_comm(ABORT_REASON)

    def classify(self, inner: Inner, error: BaseException) -> Failure | None:
        """See ``Driver``."""
        return read_signs(error, SIGNS)

    def stop(self, device: torch.device) -> bool:
        """See ``Driver``."""
        result = self._library.npu.stop_device(device.index)
        if result not in (None, 0):
            logger.warning("stop_device(%d) gave %s: operations in flight may go on", device.index, result)
        self._stopped = True
        return True

    def restart(self, device: torch.device, kept: Sequence[Inner]) -> bool:
        """See ``Driver``. Without support for resuming in the CANN version, all groups get a new inner group."""
        if not self._stopped:
            return True
        self._library.npu.restart_device(device.index, rebuild_all_resources=self._rebuild_all_resources)
        self._stopped = False
        if not kept:
            return True
        try:
            self._library.distributed.reinit_process_group(None, rebuild_link=False)
        except RuntimeError as error:
            logger.warning("inner groups could not be resumed, so all are made anew: %s", error)
            return False
        return True
