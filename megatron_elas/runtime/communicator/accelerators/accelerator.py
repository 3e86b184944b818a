"""What all planes of a process share: the device and its vendor's library."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from megatron_elas.runtime.communicator.accelerators.driver import Driver, Inner
from megatron_elas.runtime.communicator.accelerators.plane import DevicePlane
from megatron_elas.runtime.transport.base import Transport


class Accelerator:
    """One device of this process. Order at an epoch's end: ``interrupt``, edits of the groups, ``settle``."""

    def __init__(self, driver: Driver, transport: Transport, device: torch.device) -> None:
        """``device`` comes with its index and is the process's current one."""
        if device.type != driver.device_type or device.index is None:
            raise ValueError(f"expected a {driver.device_type} device with its index, got {device}")
        self.driver = driver
        self._transport = transport
        self.device = device
        self._lock = threading.Lock()
        self._planes: weakref.WeakSet[DevicePlane] = weakref.WeakSet()
        self._stopping = threading.Lock()
        self._stopped = False
        self._later: dict[object, Callable[[], None]] = {}

    def open_plane(self, name: str, members: Sequence[int]) -> DevicePlane:
        """A plane without inner group."""
        plane = DevicePlane(self.driver, self._transport, self.device, name=name, members=members)
        with self._lock:
            self._planes.add(plane)
        return plane

    @property
    def planes(self) -> list[DevicePlane]:
        """All that somebody holds."""
        with self._lock:
            return list(self._planes)

    def start_later(self, key: object, start: Callable[[], None]) -> None:
        """Have ``start`` called before the next operation on the device; once per ``key``."""
        with self._lock:
            self._later[key] = start

    def start_waiting(self) -> None:
        """Call what was put off: an operation behind it may need what the peer does only after receiving."""
        if self._later:
            with self._lock:
                later, self._later = self._later, {}
            for start in later.values():
                start()

    def interrupt(self) -> None:
        """End what is in flight on the device. Any thread, after ``Transport.cancel``; may be called again.

        Where the vendor can, only inner groups with an operation in flight are ended; idle ones stay connected.
        """
        planes = self.planes
        with self._stopping:
            if not self._stopped and any(plane.inner is not None or plane.busy for plane in planes):
                self._stopped = self.driver.stop(self.device)
        for plane in planes:
            plane.interrupt(abort=not self._stopped)

    def settle(self) -> None:
        """Make the device usable in the new epoch. On the main thread, after all groups were edited."""
        planes = self.planes
        kept: list[tuple[DevicePlane, Inner]] = []
        for plane in planes:
            if plane.inner is not None:
                kept.append((plane, plane.inner))
            elif self._stopped:
                plane.drop()
        if not self.driver.restart(self.device, [inner for _, inner in kept]):
            for plane, _ in kept:
                plane.drop()
        self._stopped = False
        for plane in planes:
            plane.clear()

    def close(self) -> None:
        """End all inner groups."""
        for plane in self.planes:
            plane.interrupt()
            plane.drop()
            plane.clear()
