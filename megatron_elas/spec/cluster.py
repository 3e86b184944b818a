"""How many devices there are, what connects them, and what dies together."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_elas.spec.device import Device, load_device, require_not_negative, require_positive
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.tables import build, find_table, read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What one device sends over, in one direction."""

    bandwidth: float
    """Bytes per second."""
    latency_s: float

    def __post_init__(self) -> None:
        require_positive(self, "bandwidth")
        require_not_negative(self, "latency_s")

    def transfer_s(self, num_bytes: float) -> float:
        """Seconds from sending to having received."""
        return self.latency_s + num_bytes / self.bandwidth

    def ring_s(self, num_bytes: float, members: int) -> float:
        """Seconds of one reduce-scatter, or one all-gather, of ``num_bytes`` in all round a ring."""
        return (members - 1) * self.transfer_s(num_bytes / members)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """What was measured inside a node: "bus" bandwidth of an all-reduce, which ``2 (n - 1) / n`` of the bytes go at."""

    members: int
    bandwidth: float
    """Bytes per second."""

    def __post_init__(self) -> None:
        require_positive(self, "members", "bandwidth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices. Devices are numbered node by node."""

    name: str
    nodes: int
    devices_per_node: int
    device: Device
    inside: Link
    """Between two devices of a node."""
    between: Link
    """From a device to one of another node."""
    host_memory_bytes: int
    """Of a node."""
    nodes_per_domain: int = 1
    """Nodes that die together, such as those behind one switch."""
    collectives: tuple[Collective, ...] = ()
    """Inside a node, by number of members, ascending; without any, those of a ring over ``inside``."""

    def __post_init__(self) -> None:
        require_positive(self, "nodes", "devices_per_node", "host_memory_bytes", "nodes_per_domain")

    @property
    def num_devices(self) -> int:
        """In all."""
        return self.nodes * self.devices_per_node

    def node_of(self, device: int) -> int:
        """The node that a device sits in."""
        if not 0 <= device < self.num_devices:
            raise BadUsage(f"{self.name} has devices 0 to {self.num_devices - 1}, not {device}")
        return device // self.devices_per_node

    def domain_of(self, device: int) -> int:
        """The failure domain that a device dies with."""
        return self.node_of(device) // self.nodes_per_domain

    def link(self, sender: int, receiver: int) -> Link:
        """What connects two devices."""
        return self.inside if self.node_of(sender) == self.node_of(receiver) else self.between

    def all_reduce_s(self, num_bytes: float, members: int) -> float:
        """Seconds of an all-reduce, or of its two halves, among devices of one node as far as they fit in one."""
        if members == 1:
            return 0.0
        link = self.inside if members <= self.devices_per_node else self.between
        bandwidth = link.bandwidth
        if members <= self.devices_per_node:
            # Of a number of members that was not measured: the next smaller one that was.
            bandwidth = next((c.bandwidth for c in reversed(self.collectives) if c.members <= members), bandwidth)
        return 2 * (members - 1) * (link.latency_s + num_bytes / members / bandwidth)


def load_cluster(name: str) -> Cluster:
    """A cluster by the name of its profile in ``configs/clusters``, or by a file's path.

    The file names its device by a profile in ``configs/devices``.

    Raises:
        BadUsage: There is none, or it cannot be used.
    """
    path = find_table("clusters", name)
    table = read_table(path)
    device = table.get("device")
    if not isinstance(device, str):
        raise BadUsage(f"{path}: device is {device!r}: name a profile of configs/devices, or a .toml file")
    return build(Cluster, {**table, "device": load_device(device)}, str(path))
