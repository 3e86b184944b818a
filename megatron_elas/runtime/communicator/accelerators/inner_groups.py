"""What others see when they ask an elastic group for its backend on an accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_elas.runtime.communicator.accelerators.driver import Inner


class InnerGroups:
    """All inner groups of a group, as one backend.

    torch-npu's ``stop_device``, ``restart_device`` and ``reinit_process_group`` call the first three methods on every
    group of the process. The properties keep torch from splitting or allocating through inner groups, which come and
    go. Anything else is the only inner group's.
    """

    supports_splitting = False
    supports_shrinking = False

    def __init__(self, inner: Sequence[Inner]) -> None:
        self._inner = tuple(inner)

    def set_watchdog_status(self, status: int) -> None:
        """1: run, 2: stop."""
        for group in self._inner:
            group.set_watchdog_status(status)

    def clear_workmeta_list(self) -> None:
        """Forget operations in flight."""
        for group in self._inner:
            group.clear_workmeta_list()

    def resume_hccl_comm(self, device_id: int) -> None:
        """Go on with the communicators as they are."""
        for group in self._inner:
            group.resume_hccl_comm(device_id)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """No."""
        return False

    def __getattr__(self, name: str) -> Any:
        if len(self._inner) != 1:
            raise AttributeError(f"{name}: the group has {len(self._inner)} inner groups now, not one")
        return getattr(self._inner[0], name)
