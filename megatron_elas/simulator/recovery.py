"""What a recovery costs, by policy: phases and their seconds, from ``configs/recovery``, with the source of each.

``backups``: the state of every cell is at one other cell, the next one of its stage in another failure domain. It is
lost when both go together, or one after the other before the copy was made again. Without it, all cells of a stage are
taken to hold the stage's whole state, as the papers of these policies have it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron_elas.planner.situation import Situation
from megatron_elas.spec.cluster import Cluster
from megatron_elas.spec.device import require_not_negative, require_positive
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.tables import build, find_table, read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of a recovery."""

    name: str
    fixed_s: float = 0.0
    per_doubling_s: float = 0.0
    """For every doubling of the workers."""
    per_worker_s: float = 0.0
    power_s: float = 0.0
    """At 1000 workers; grows with the workers to the power of ``power``."""
    power: float = 1.0
    carries: str = ""
    """What is sent or read, see ``Sizes``; empty: nothing that counts."""

    def __post_init__(self) -> None:
        require_not_negative(self, "fixed_s", "per_doubling_s", "per_worker_s", "power_s", "power")
        if self.carries not in _LOADS:
            raise BadUsage(f"carries is {self.carries!r}: write one of {', '.join(_LOADS)}")

    def seconds(self, sizes: Sizes) -> float:
        """How long it takes a job of these sizes."""
        workers = sizes.workers
        return (
            self.fixed_s
            + self.per_doubling_s * math.log2(workers)
            + self.per_worker_s * workers
            + self.power_s * math.pow(workers / 1000, self.power)
            + (sizes.load_s[self.carries] if self.carries else 0.0)
        )

    def times(self, factor: float) -> Phase:
        """So many times as slow, what it carries excepted."""
        return replace(
            self,
            fixed_s=self.fixed_s * factor,
            per_doubling_s=self.per_doubling_s * factor,
            per_worker_s=self.per_worker_s * factor,
            power_s=self.power_s * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartCosts:
    """Of checkpoints and of what begins with one."""

    storage_bandwidth: float
    """Bytes per second of every device, to and from storage."""
    phases: tuple[Phase, ...]
    """After detecting."""
    save: tuple[Phase, ...]
    """Training waits for it."""
    write: tuple[Phase, ...] = ()
    """After ``save``, beside training, until the checkpoint can be read."""
    interval_s: float | None = None
    """Of training between checkpoints; None: Young's and Daly's, from the mean time between the trace's failures."""

    def __post_init__(self) -> None:
        require_positive(self, "storage_bandwidth")
        if self.interval_s is not None:
            require_positive(self, "interval_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryCosts:
    """Of one policy."""

    name: str
    detect_s: float
    """From the failure of a device until it is acted on."""
    detect_node_s: float
    """The same for a whole node, which says nothing any more."""
    phases: tuple[Phase, ...] = ()
    """After detecting, to go on without what was lost; none: the policy restarts."""
    join: tuple[Phase, ...] = ()
    """To take cells in, or to leave slow ones out, while nothing else is wrong; the job waits."""
    backups: bool
    """See above."""
    leaves_slow_out: bool
    """The policy may go on without a slow cell."""
    drops_step: bool = False
    """The samples of a step that a failure ends are passed over."""
    checkpoint_s: float | None = None
    """Between checkpoints, for failures that take too much; None: as ``RestartCosts.interval_s``."""
    restart: RestartCosts | None = None
    """None: those of ``restart.toml``."""

    def __post_init__(self) -> None:
        require_not_negative(self, "detect_s", "detect_node_s")
        if self.checkpoint_s is not None:
            require_positive(self, "checkpoint_s")

    def times(self, factor: float) -> RecoveryCosts:
        """Detecting, recovering and joining so many times as slow; bytes, restarts and saving as they are."""
        return replace(
            self,
            detect_s=self.detect_s * factor,
            detect_node_s=self.detect_node_s * factor,
            phases=tuple(phase.times(factor) for phase in self.phases),
            join=tuple(phase.times(factor) for phase in self.join),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large a job is, as far as recoveries depend on it.

    Of the fullest stage: ``shard`` is the part of the optimizer state that a cell owns, ``cell`` that and the weights;
    these go over the link between nodes. ``moves`` is what the busiest link carries when the plan changes, see
    ``moved_state``, ``shard`` at least; ``moves in`` is the same, ``cell`` at least. ``digest`` is ``cell`` read from
    memory. ``checkpoint`` is ``cell`` read from storage, ``saved`` is ``shard`` written there, ``to host`` is ``shard``
    copied to the host. A lane does its part; all lanes of all cells do at once.
    """

    workers: int
    load_s: dict[str, float]

    @staticmethod
    def of(begin: Situation, cluster: Cluster, storage_bandwidth: float) -> Sizes:
        """Of a whole job."""
        cost, rows = begin.cost, begin.job.data_parallel
        parameters = max(cost.parameters(first, last) for first, last in pairwise(begin.cuts))
        owners = rows if cost.optimizer_sharded else 1
        shard = parameters * cost.optimizer_bytes / owners
        cell = shard + parameters * cost.weight_bytes
        link, device = begin.link, cluster.device
        return Sizes(
            workers=begin.job.world_size,
            load_s={
                "shard": link.transfer_s(shard),
                "cell": link.transfer_s(cell),
                "moves": link.transfer_s(shard),
                "moves in": link.transfer_s(cell),
                "digest": cell / device.memory_bandwidth,
                "checkpoint": cell / storage_bandwidth,
                "to host": shard / device.host_bandwidth,
                "saved": shard / storage_bandwidth,
            },
        )

    def moving(self, seconds: float) -> Sizes:
        """When a change of the plan keeps the busiest link busy for so long."""
        load_s = self.load_s
        moves = {"moves": max(load_s["shard"], seconds), "moves in": max(load_s["cell"], seconds)}
        return replace(self, load_s=load_s | moves)


_LOADS = ("", "shard", "cell", "moves", "moves in", "digest", "checkpoint", "to host", "saved")


def load_recovery(name: str) -> RecoveryCosts:
    """Costs by the name of a policy's file in ``configs/recovery``, or by a file's path.

    Raises:
        BadUsage: There is none, or it cannot be used.
    """
    path = find_table("recovery", name)
    return build(RecoveryCosts, read_table(path), str(path))


def load_restart() -> RestartCosts:
    """What all policies fall back to, from ``configs/recovery/restart.toml``."""
    found = load_recovery("restart").restart
    assert found is not None
    return found


def checkpoint_interval_s(save_s: float, between_failures_s: float) -> float:
    """Of training between checkpoints: Daly's higher-order estimate, whose first term is Young's.

    Args:
        save_s: That training waits for each.
        between_failures_s: Mean time.
    """
    if save_s >= 2 * between_failures_s:
        return between_failures_s
    ratio = save_s / (2 * between_failures_s)
    return math.sqrt(2 * save_s * between_failures_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s
