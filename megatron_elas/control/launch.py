"""What was launched: the shape of the job's processes and its time limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_elas.config import ControlTimeouts
from megatron_elas.spec.policy import RunningPolicy

CostSource = Literal["measured", "profile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalance:
    """A line of a script: from some step on stages are to have these layers."""

    step: int
    """Once a worker says that it has come to it, the order is given; it is carried out some steps later."""
    layers: tuple[int, ...]
    """Transformer layers of every stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What was launched; fixed."""

    nnodes: int
    workers_per_node: int
    timeouts: ControlTimeouts
    elastic: bool = False
    """What is launched was told so by its flags; otherwise it shows when its workers join."""
    cluster: str = "cpu"
    """Profile in configs/clusters, or a file: what plans take layers, memory and links to cost."""
    costs: CostSource = "measured"
    """Whether plans go by what the job's own steps took, once they did, or by the profile alone."""
    policy: RunningPolicy = "ours"
    """Who plans after a loss, and what layers move to beside training."""
    rebalances: tuple[Rebalance, ...] = ()
    """Changes of layers that are ordered while the job runs, by ascending step."""

    @property
    def world_size(self) -> int:
        """Worker processes over all nodes."""
        return self.nnodes * self.workers_per_node

    def node_of(self, worker: int) -> int:
        """The node that runs the worker."""
        return worker // self.workers_per_node

    def workers_of(self, node: int) -> tuple[int, ...]:
        """The node's workers, ascending."""
        return tuple(range(node * self.workers_per_node, (node + 1) * self.workers_per_node))
