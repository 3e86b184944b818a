"""Handles of operations on an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future

Ended = Callable[[BaseException | None], None]
"""Raises what the end of an epoch, or an error, means to the operation's caller; returns when nothing is wrong."""


class DeviceWork(Work):
    """An inner group's work. Stream semantics are the vendor's: ``wait`` makes the current stream wait, not the CPU.

    An aborted operation leaves its tensors undefined while its stream goes on as if nothing were wrong, so ``wait``
    asks about the epoch before and after. A future is the inner one as it is: it tells nothing of an abort. Neither
    matters to a step, because none commits without a barrier over the transport.
    """

    def __init__(self, inner: Work, ended: Ended) -> None:
        super().__init__()
        self._inner = inner
        self._ended = ended
        self.void = False
        """The operation was cut short; set by its plane, on any thread."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait for the operation; with a positive ``timeout``, as the vendor does.

        Raises:
            EpochChanged: It was cut short.
        """
        if self._was_cut_short():
            return True
        try:
            if timeout is not None and timeout > timedelta():
                self._inner.wait(timeout)
            else:
                self._inner.wait()
        except RuntimeError as error:
            self._ended(error)
        self._was_cut_short()
        return True

    def _was_cut_short(self) -> bool:
        """Whether it was cut short; raises unless that is tolerated."""
        if self.void:
            self._ended(None)
        return self.void

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def block_current_stream(self) -> None:
        """As ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the device is done with it. True when it was cut short."""
        return self.void or self._inner.is_completed()

    def unfinished(self) -> bool:
        """Whether it still needs the inner group: a failed one counts as completed, but the device may be at it."""
        try:
            return not self.is_completed() or self._inner.exception() is not None
        except RuntimeError:  # a failed operation is asked about: its result is not to be used
            return True

    def is_success(self) -> bool:
        """Whether it is done and was not cut short."""
        return not self.void and self._inner.is_success()

    def exception(self) -> Any:
        """The vendor's error, if any."""
        return self._inner.exception()

    def result(self) -> list[torch.Tensor]:
        """The tensors it wrote."""
        tensors: list[torch.Tensor] = self._inner.result()
        return tensors

    def get_future(self) -> Future[Any]:
        """The vendor's future: complete as soon as the operation is on its stream."""
        return self._inner.get_future()

    def source_rank(self) -> int:
        """Group rank of the sender."""
        return int(self._inner.source_rank())
