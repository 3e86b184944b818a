"""Streams, events and synchronisation: on a CPU everything has been done when the call returns."""

from __future__ import annotations

import contextlib
import time
from types import TracebackType
from typing import Any, Self

import torch

from megatron_elas.platform.cpu.availability import CPU
from megatron_elas.platform.cpu.substitution import Substitutions


class CpuEvent:
    """Stands in for ``torch.cuda.Event``: remembers when it was recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded_s = 0.0

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._recorded_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing is pending."""

    def synchronize(self) -> None:
        """Nothing is pending."""

    def query(self) -> bool:
        """Always done."""
        return True

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """Milliseconds from this event to ``end_event``."""
        return (end_event._recorded_s - self._recorded_s) * 1e3


class CpuStream:
    """Stands in for ``torch.cuda.Stream``. There is one order of execution, the program's."""

    cuda_stream = 0
    priority = 0
    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority."""
        return 0, 0

    def wait_stream(self, stream: Any) -> None:
        """Nothing is pending."""

    def wait_event(self, event: Any) -> None:
        """Nothing is pending."""

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Record ``event``, or a new one."""
        event = event or CpuEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Nothing is pending."""

    def query(self) -> bool:
        """Always done."""
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


_STREAM = CpuStream()


def substitute(substitutions: Substitutions) -> None:
    """Replace the stream part of ``torch.cuda``."""

    def current_stream(device: Any = None) -> CpuStream:
        return _STREAM

    def default_stream(device: Any = None) -> CpuStream:
        return _STREAM

    def set_stream(stream: Any) -> None:
        pass

    def stream(stream: Any = None) -> contextlib.nullcontext[Any]:
        return contextlib.nullcontext(stream)

    def device(device: Any = None) -> contextlib.nullcontext[Any]:
        return contextlib.nullcontext(device)

    def synchronize(device: Any = None) -> None:
        pass

    def is_current_stream_capturing() -> bool:
        return False

    for function in (
        current_stream,
        default_stream,
        set_stream,
        stream,
        device,
        synchronize,
        is_current_stream_capturing,
    ):
        substitutions.put(torch.cuda, function.__name__, function)
    substitutions.put(torch.cuda, "Stream", CpuStream)
    substitutions.put(torch.cuda, "ExternalStream", CpuStream)
    substitutions.put(torch.cuda, "Event", CpuEvent)
