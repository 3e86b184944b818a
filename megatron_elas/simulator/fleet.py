"""Devices that work, and the cells that they make."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megatron_elas.spec.cluster import Cluster
from megatron_elas.spec.errors import BadUsage


class Change(NamedTuple):
    """What became of cells."""

    broken: tuple[int, ...]
    made: tuple[int, ...]
    """Whole again, or of lanes of several broken ones. May have the number of one that broke at the same time."""


class _Unit:
    """Devices whose lanes may make a cell together."""

    def __init__(self, cells: range, lanes: int) -> None:
        self.cells = {cell: set(range(cell * lanes, (cell + 1) * lanes)) for cell in cells}
        self.free: set[int] = set()
        self.empty: list[int] = []

    def take(self, device: int) -> int | None:
        """The device is gone; gives the cell that it breaks."""
        if device in self.free:
            self.free.remove(device)
            return None
        cell = next(cell for cell, own in self.cells.items() if device in own)
        self.free |= self.cells.pop(cell) - {device}
        self.empty.append(cell)
        return cell

    def make(self, lanes: int) -> list[int]:
        """Cells of the free lanes, the lowest first."""
        made = []
        self.empty.sort()
        while len(self.free) >= lanes:
            own = sorted(self.free)[:lanes]
            cell = self.empty.pop(0)
            self.cells[cell] = set(own)
            self.free -= set(own)
            made.append(cell)
        return made


class Fleet:
    """All devices of a cluster.

    Cell ``c`` begins as devices ``[c * lanes, (c + 1) * lanes)``. When one of them breaks, the cell is broken and the
    others are spare lanes. Spare lanes of one node make new cells, as many as there can be; lanes of different nodes
    do not, because a step's times are those of tensor parallelism inside a node. Where a cell is larger than a node,
    or does not divide it, each cell is on its own.
    """

    def __init__(self, cluster: Cluster, lanes: int) -> None:
        self.cluster = cluster
        self.lanes = lanes
        inside = cluster.devices_per_node % lanes == 0
        self._cells_of_unit = cluster.devices_per_node // lanes if inside else 1
        self.num_cells = cluster.num_devices // (self._cells_of_unit * lanes) * self._cells_of_unit
        if not self.num_cells:
            raise BadUsage(f"{cluster.name} has {cluster.num_devices} devices: too few for a cell of {lanes}")
        self.working = cluster.num_devices
        self._down: dict[int, float] = {}
        """Of every device that does not work: when it is repaired."""
        self._units: dict[int, _Unit] = {}
        """Of those that something happened to."""

    def fail(self, devices: Iterable[int], until_s: float) -> Change:
        """Devices stop working. Those that did not work already are down until the later of their repairs."""
        broken = []
        units = []
        for device in devices:
            self.cluster.node_of(device)
            if device in self._down:
                self._down[device] = max(self._down[device], until_s)
                continue
            self._down[device] = until_s
            self.working -= 1
            unit = self._unit(device)
            if unit is None:
                continue
            units.append(unit)
            cell = unit.take(device)
            if cell is not None:
                broken.append(cell)
        return Change(tuple(broken), self._make(units))

    def repair(self, devices: Iterable[int], now_s: float) -> Change:
        """Devices work again, but those that failed anew in the meantime."""
        units = []
        for device in devices:
            if self._down.get(device, float("inf")) > now_s:
                continue
            del self._down[device]
            self.working += 1
            unit = self._unit(device)
            if unit is not None:
                unit.free.add(device)
                units.append(unit)
        return Change((), self._make(units))

    def cell_of(self, device: int) -> int | None:
        """The cell that a device is part of; None when it is down or spare."""
        unit = self._unit(device)
        if unit is None:
            return None
        return next((cell for cell, own in unit.cells.items() if device in own), None)

    def domain_of(self, cell: int) -> int:
        """The failure domain of a cell: that of its first lane."""
        return self.cluster.domain_of(cell * self.lanes)

    def is_node_gone(self, device: int) -> bool:
        """Whether no device of the device's node works."""
        size = self.cluster.devices_per_node
        first = self.cluster.node_of(device) * size
        return all(other in self._down for other in range(first, first + size))

    def _unit(self, device: int) -> _Unit | None:
        """None for devices that are left over, too few for a cell."""
        number = device // (self._cells_of_unit * self.lanes)
        first = number * self._cells_of_unit
        if first >= self.num_cells:
            return None
        if number not in self._units:
            self._units[number] = _Unit(range(first, first + self._cells_of_unit), self.lanes)
        return self._units[number]

    def _make(self, units: list[_Unit]) -> tuple[int, ...]:
        return tuple(cell for unit in dict.fromkeys(units) for cell in unit.make(self.lanes))
