"""Layers to stages so that the busiest stage is as little busy as can be, within memory. Exact.

A stage's time and memory only grow when it gets more layers. So, for a time that no stage may exceed, giving every
stage in turn as many layers as it may have decides whether there is a partition at all; the least such time is found
by bisection, each step of which ends on the time of a partition that exists. A stage costs a binary search in running
sums, however many cells it has: 100,000 workers take as long as 96.

Among all partitions of that least time the one that moves fewest bytes is taken, by dynamic programming over the places
that a boundary can have in any of them; of several, the one whose boundaries come earliest.

Every stage has at least one layer; the first one has the embedding, the last one head and loss.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from megatron_elas.spec.cost import JobCost, UnitCost
from megatron_elas.spec.errors import NoFeasiblePlan

_SAME = 1 + 1e-12
"""Times within this factor are one; sums in another order may differ by as much."""


class StageLoad(NamedTuple):
    """What the busiest cell of a stage runs in a step, whatever layers the stage gets."""

    samples: float
    items: float
    cells: int
    """Of the stage: they share the optimizer."""
    in_flight: float
    """Samples that it has to hold at once at least."""
    largest_item: float
    """In samples."""
    clock: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Which stage has which layers."""

    cuts: tuple[int, ...]
    """Stage ``s`` has layers ``[cuts[s], cuts[s + 1])``."""
    busiest_s: float
    """Seconds that the busiest cell computes in a step, its share of the optimizer included."""
    moved_parameters: int
    """Of one lane, of all layers that change their stage."""


class _Sums(NamedTuple):
    """Of one stage."""

    work: list[float]
    """Seconds of the first ``j`` layers."""
    extra: float
    """Seconds of embedding, head and loss, as far as the stage has them."""
    reach: list[int]
    """Of every first layer: one past the last that memory allows; at most the number of layers."""


class Partitioner:
    """Partitions of one job's layers. Keeps sums, so that many partitions cost less than each on its own."""

    def __init__(self, cost: JobCost, memory_bytes: float) -> None:
        """Prepare.

        Args:
            cost: Of the job.
            memory_bytes: Of a device, as far as a plan may fill it.
        """
        self.cost, self.memory_bytes = cost, memory_bytes
        self._memory = _Memory(cost)
        self._works: dict[tuple[float, float, int, float], _Work] = {}
        self._reaches: dict[tuple[StageLoad, bool, bool], list[int]] = {}

    def find(self, loads: Sequence[StageLoad], homes: Sequence[int] | None = None) -> Partition:
        """As ``partition``. Raises NoFeasiblePlan."""
        layers, stages = self.cost.num_layers, len(loads)
        if stages > layers:
            raise NoFeasiblePlan(f"{layers} layers cannot fill {stages} stages: use a pipeline of at most {layers}")
        sums = self._sums(loads)
        least = float("inf")
        best = _furthest(sums, least, layers)
        if best is None:
            raise NoFeasiblePlan(
                f"{layers} layers do not fit {stages} stages of {[load.cells for load in loads]} cells with "
                f"{self.memory_bytes / 1e9:.1f} GB each: use smaller micro-batches, recomputation or more stages"
            )
        low, least = 0.0, _busiest(sums, best)
        while least - low > 1e-10 * least:
            middle = (low + least) / 2
            cuts = _furthest(sums, middle, layers)
            if cuts is None:
                low = middle
            else:
                best, least = cuts, _busiest(sums, cuts)
        moved = 0
        if homes is not None:
            best, moved = _fewest_moves(self.cost, sums, least, best, homes)
        return Partition(cuts=tuple(best), busiest_s=least, moved_parameters=moved)

    def stage_seconds(self, cuts: Sequence[int], loads: Sequence[StageLoad]) -> tuple[float, ...]:
        """Seconds that the busiest cell of every stage computes in a step, its share of the optimizer included."""
        seconds = []
        for stage, load in enumerate(loads):
            work = self._work(load)
            layers = work.layers[cuts[stage + 1]] - work.layers[cuts[stage]]
            seconds.append(layers + work.extra(stage == 0, stage == len(loads) - 1))
        return tuple(seconds)

    def _work(self, load: StageLoad) -> _Work:
        key = (load.samples, load.items, load.cells, load.clock)
        found = self._works.get(key)
        if found is None:
            found = self._works[key] = _Work.of(self.cost, load)
        return found

    def _sums(self, loads: Sequence[StageLoad]) -> list[_Sums]:
        sums = []
        for stage, load in enumerate(loads):
            first, last = stage == 0, stage == len(loads) - 1
            work = self._work(load)
            reach = self._reaches.get((load, first, last))
            if reach is None:
                reach = self._memory.reach(load, self.memory_bytes, first, last)
                self._reaches[load, first, last] = reach
            sums.append(_Sums(work.layers, work.extra(first, last), reach))
        return sums


def partition(
    cost: JobCost, loads: Sequence[StageLoad], memory_bytes: float, homes: Sequence[int] | None = None
) -> Partition:
    """The partition with the least time of the busiest stage, then the fewest bytes moved.

    Args:
        cost: Of the job.
        loads: Of every stage.
        memory_bytes: Of a device, as far as a plan may fill it.
        homes: Of every layer: the stage whose cells have it now, -1 for none of them. None: moves do not matter.

    Raises:
        NoFeasiblePlan: Fewer layers than stages, or memory is too small for any partition.
    """
    return Partitioner(cost, memory_bytes).find(loads, homes)


def stage_seconds(cost: JobCost, cuts: Sequence[int], loads: Sequence[StageLoad]) -> tuple[float, ...]:
    """Seconds that the busiest cell of every stage computes in a step, its share of the optimizer included."""
    return Partitioner(cost, 0).stage_seconds(cuts, loads)


def moved_parameters(cost: JobCost, cuts: Sequence[int], homes: Sequence[int]) -> int:
    """Of one lane, of all layers that are not on the stage that has them now."""
    return sum(
        cost.layers[layer].parameters
        for stage, (first, last) in enumerate(pairwise(cuts))
        for layer in range(first, last)
        if homes[layer] != stage
    )


class _Work(NamedTuple):
    """Seconds of one kind of load."""

    layers: list[float]
    """Of the first ``j`` layers."""
    embedding: float
    after: float
    """Head and loss."""

    @staticmethod
    def of(cost: JobCost, load: StageLoad) -> _Work:
        """All sums."""
        share = load.cells if cost.optimizer_sharded else 1

        def seconds(unit: UnitCost) -> float:
            passes = (unit.forward, unit.input_gradient, unit.weight_gradient)
            each = sum(load.samples * work.sample_s(load.clock) + load.items * work.fixed_s for work in passes)
            return each + unit.optimizer_s / share

        # Layers are often one and the same object.
        known = {id(unit): seconds(unit) for unit in {id(unit): unit for unit in cost.layers}.values()}
        return _Work(
            list(accumulate([known[id(unit)] for unit in cost.layers], initial=0.0)),
            seconds(cost.embedding),
            seconds(cost.head) + seconds(cost.loss),
        )

    def extra(self, is_first: bool, is_last: bool) -> float:
        """Of what a stage has besides its layers."""
        return (self.embedding if is_first else 0.0) + (self.after if is_last else 0.0)


class _Memory:
    """Running sums of what layers keep in memory."""

    def __init__(self, cost: JobCost) -> None:
        self.cost = cost
        self.parameters = list(accumulate((unit.parameters for unit in cost.layers), initial=0))
        self.activations = list(accumulate((unit.activation_bytes for unit in cost.layers), initial=0.0))
        self.same = all(unit.working_bytes == cost.layers[0].working_bytes for unit in cost.layers)

    def needed(self, load: StageLoad, first: int, last: int, outer: Sequence[UnitCost]) -> float:
        """Bytes of a stage of these layers and outer units."""
        cost = self.cost
        count = self.parameters[last] - self.parameters[first] + sum(unit.parameters for unit in outer)
        share = load.cells if cost.optimizer_sharded else 1
        state = count * (cost.weight_bytes + cost.gradient_bytes) + -(-count // share) * cost.optimizer_bytes
        kept = self.activations[last] - self.activations[first] + sum(unit.activation_bytes for unit in outer)
        inner = cost.layers[first : first + 1] if self.same and last > first else cost.layers[first:last]
        working = max((unit.working_bytes for unit in (*inner, *outer)), default=0.0)
        return state + load.in_flight * kept + load.largest_item * working

    def reach(self, load: StageLoad, memory_bytes: float, is_first: bool, is_last: bool) -> list[int]:
        """Two pointers: a later first layer never reaches less far."""
        layers = self.cost.num_layers
        before = (self.cost.embedding,) if is_first else ()
        outer = (*before, self.cost.head, self.cost.loss) if is_last else before
        if is_last:
            # Only whether a first layer leaves room for all that follow.
            return [layers if self.needed(load, i, layers, outer) <= memory_bytes else i for i in range(layers)]
        if self.same:
            return self._reach_of_same(load, memory_bytes, 1 if is_first else layers, outer)
        reach, last = [], 0
        for first in range(1 if is_first else layers):
            last = max(last, first)
            while last < layers and self.needed(load, first, last + 1, outer) <= memory_bytes:
                last += 1
            reach.append(last)
        return reach

    def _reach_of_same(self, load: StageLoad, memory_bytes: float, firsts: int, outer: Sequence[UnitCost]) -> list[int]:
        """As above, by the same sums, where a pass needs as much working memory in every layer."""
        cost, layers = self.cost, self.cost.num_layers
        parameters, activations, in_flight = self.parameters, self.activations, load.in_flight
        whole, optimizer = cost.weight_bytes + cost.gradient_bytes, cost.optimizer_bytes
        share = load.cells if cost.optimizer_sharded else 1
        more = sum(unit.parameters for unit in outer)
        kept = sum(unit.activation_bytes for unit in outer)
        working = max(unit.working_bytes for unit in (cost.layers[0], *outer))
        room = memory_bytes - in_flight * kept - load.largest_item * working
        reach, last = [], 0
        for first in range(firsts):
            last = max(last, first)
            before, held = parameters[first] - more, activations[first]
            while last < layers:
                count = parameters[last + 1] - before
                state = count * whole - (-count // share) * optimizer
                if state + in_flight * (activations[last + 1] - held) > room:
                    break
                last += 1
            reach.append(last)
        return reach


def _furthest(sums: list[_Sums], limit_s: float, layers: int) -> list[int] | None:
    """Every stage takes as many layers as it may; None when they do not reach the end."""
    at, stages = 0, len(sums)
    cuts = [0]
    for stage, (work, extra, reach) in enumerate(sums):
        stop = bisect_right(work, work[at] + limit_s * _SAME - extra) - 1
        stop = min(stop, reach[at], layers - (stages - 1 - stage))
        if stop <= at:
            return None
        at = stop
        cuts.append(at)
    return cuts if at == layers else None


def _busiest(sums: list[_Sums], cuts: Sequence[int]) -> float:
    return max(
        own.work[last] - own.work[first] + own.extra for own, (first, last) in zip(sums, pairwise(cuts), strict=True)
    )


def _fewest_moves(
    cost: JobCost, sums: list[_Sums], limit_s: float, furthest: Sequence[int], homes: Sequence[int]
) -> tuple[list[int], int]:
    """Of all partitions within the limit, the one that moves fewest parameters, and how many."""
    layers, stages = cost.num_layers, len(sums)
    best: dict[int, tuple[int, list[int]]] = {0: (0, [0])}
    for stage, (work, extra, reach) in enumerate(sums):
        away = list(
            accumulate((0 if homes[i] == stage else cost.layers[i].parameters for i in range(layers)), initial=0)
        )
        longer: dict[int, tuple[int, list[int]]] = {}
        for first, (moved, cuts) in best.items():
            stop = bisect_right(work, work[first] + limit_s * _SAME - extra) - 1
            stop = min(stop, reach[first], furthest[stage + 1])
            for last in range(first + 1, stop + 1):
                total = moved + away[last] - away[first]
                other = longer.get(last)
                if other is None or (total, cuts) < (other[0], other[1][:-1]):
                    longer[last] = (total, [*cuts, last])
        best = longer
        if stage < stages - 1:
            # What is left has to be within reach of the later stages.
            best = {last: found for last, found in best.items() if _can_end(sums, stage + 1, last, limit_s, layers)}
    moved, cuts = best[layers]
    return cuts, moved


def _can_end(sums: list[_Sums], stage: int, at: int, limit_s: float, layers: int) -> bool:
    for own in sums[stage:]:
        stop = bisect_right(own.work, own.work[at] + limit_s * _SAME - own.extra) - 1
        at = min(stop, own.reach[at], layers) if at < layers else at
    return at >= layers
