"""What a plane asks of a vendor's library. ``nccl`` and ``hccl`` implement it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.distributed import Store, Work

from megatron_elas.runtime.communicator.accelerators.failures import Failure
from megatron_elas.runtime.communicator.accelerators.moves import Move

Inner = Any
"""A ``c10d.Backend`` of the vendor: ``ProcessGroupNCCL`` or ``ProcessGroupHCCL``."""


class Driver(Protocol):
    """Makes, ends and explains inner groups of one vendor."""

    device_type: str
    """torch's: ``"cuda"``, ``"npu"``."""

    def make(self, store: Store, rank: int, workers: Sequence[int], name: str, device: torch.device) -> Inner:
        """An inner group that is not connected. Returns at once.

        Args:
            store: Introduces the members to each other while they connect; the caller keeps it alive.
            rank: Own position in ``workers``.
            workers: Ids of the members.
            name: The vendor's; equal on all members and unique in the process.
            device: Of this worker.
        """

    def connect(self, inner: Inner, device: torch.device, check: Callable[[], None]) -> None:
        """Connect all members; everyone calls it. ``check`` raises when it is no longer worth it; asked in between."""

    def can_shrink(self, inner: Inner) -> bool:
        """Whether ``shrink`` is there. Equal on all members."""

    def shrink(self, inner: Inner, excluded: Sequence[int], device: torch.device) -> Inner:
        """A connected inner group without the members at ``excluded``; survivors call it, and it ends ``inner``."""

    def transfer(self, inner: Inner, moves: Sequence[Move]) -> Work | None:
        """Start sends and receives as one, so that none waits for another of them."""

    def abort(self, inner: Inner) -> None:
        """End its operations and connections, without the others. Any thread may call it, also twice."""

    def classify(self, inner: Inner, error: BaseException) -> Failure | None:
        """Why an operation failed; None when the caller is to blame."""

    def stop(self, device: torch.device) -> bool:
        """End everything that runs on the device, where the vendor has no way to end one group's operations.

        Returns:
            Whether that was done. If not, planes with an operation in flight are aborted one by one.
        """

    def restart(self, device: torch.device, kept: Sequence[Inner]) -> bool:
        """Undo ``stop``, and let the inner groups go on whose members have not changed.

        Returns:
            Whether those in ``kept`` can be used again.
        """
