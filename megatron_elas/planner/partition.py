"""Layers to stages so that the busiest stage is as little busy as can be, within memory. Exact.

Least is what the busiest stage computes, or, with ``Fill``, that and the time in which the first item comes down to it
(for backward that is not split also goes back up): a step from begin to end is as long as the stage that ends last.

A stage's time and memory only grow when it gets more layers. So, for a time that no stage may exceed, giving every
stage in turn as many layers as it may have decides whether there is a partition at all; the least such time is found
by bisection, each step of which ends on the time of a partition that exists, or on the least one at which any stage
could take another layer. A stage costs a binary search in running
sums, however many cells it has: 100,000 workers take as long as 96.

Among all partitions of that least time the one that moves fewest bytes is taken, by dynamic programming over the places
that a boundary can have in any of them; of several, the one whose boundaries come earliest.

Every stage has at least one layer; the first one has the embedding, the last one head and loss.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import NamedTuple

from megatron_elas.spec.cost import CostSums, JobCost, UnitCost
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


class Fill(NamedTuple):
    """How an item passes through the stages before a stage, when the pipeline fills."""

    samples: float
    """Of the item, the same for all stages."""
    transfer_s: float
    """Over a boundary between stages."""
    split: bool
    """Backward is split: what comes back up hides behind weight gradients. Else it adds to the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Which stage has which layers."""

    cuts: tuple[int, ...]
    """Stage ``s`` has layers ``[cuts[s], cuts[s + 1])``."""
    busiest_s: float
    """Seconds that the busiest cell computes in a step, its share of the optimizer included; with ``Fill``: until the
    last stage ends."""
    moved_parameters: int
    """Of one lane, of all layers that change their stage."""


class _Sums(NamedTuple):
    """Of one stage."""

    work: list[float]
    """Seconds of the first ``j`` layers."""
    extra: float
    """Seconds of embedding, head and loss, as far as the stage has them."""
    before: list[float]
    """Of every first layer: seconds that pass before the stage has something to do, or after it has nothing more."""
    reach: _Reach
    """Of every first layer: one past the last that memory allows; at most the number of layers."""


class Partitioner:
    """Partitions of one job's layers. Keeps sums, so that many partitions cost less than each on its own."""

    def __init__(self, cost: JobCost, memory_bytes: float, sums: Callable[[float], CostSums] | None = None) -> None:
        """Prepare.

        Args:
            cost: Of the job.
            memory_bytes: Of a device, as far as a plan may fill it.
            sums: Of the cost at a clock, where there are such already.
        """
        self.cost, self.memory_bytes = cost, memory_bytes
        self._sums_at = sums or cache(partial(CostSums, cost))
        self._memory = _Memory(cost)
        self._works: dict[tuple[float, float, int, float], _Work] = {}
        self._befores: dict[Fill | None, list[float]] = {}
        self._reaches: dict[tuple[StageLoad, bool, bool], _Reach] = {}

    def find(
        self, loads: Sequence[StageLoad], homes: Sequence[int] | None = None, fill: Fill | None = None
    ) -> Partition:
        """As ``partition``. Raises NoFeasiblePlan."""
        layers, stages = self.cost.num_layers, len(loads)
        if stages > layers:
            raise NoFeasiblePlan(f"{layers} layers cannot fill {stages} stages: use a pipeline of at most {layers}")
        sums = self._sums(loads, fill)
        best, _ = _furthest(sums, float("inf"), layers)
        if best is None:
            raise NoFeasiblePlan(
                f"{layers} layers do not fit {stages} stages of {[load.cells for load in loads]} cells with "
                f"{self.memory_bytes / 1e9:.1f} GB each: use smaller micro-batches, recomputation or more stages"
            )
        low, least = 0.0, _busiest(sums, best)
        while low * _SAME < least:
            cuts, more = _furthest(sums, (low + least) / 2, layers)
            if cuts is None:
                low = more
            else:
                best, least = cuts, _busiest(sums, cuts)
        moved = 0
        if homes is not None:
            best, moved = _fewest_moves(self.cost, sums, least, best, homes)
        return Partition(cuts=tuple(best), busiest_s=least, moved_parameters=moved)

    def fits(self, cuts: Sequence[int], loads: Sequence[StageLoad]) -> bool:
        """Whether every stage has memory for its layers."""
        return all(
            last <= self._reach(load, stage == 0, stage == len(loads) - 1)[first]
            for stage, (load, (first, last)) in enumerate(zip(loads, pairwise(cuts), strict=True))
        )

    def _reach(self, load: StageLoad, is_first: bool, is_last: bool) -> _Reach:
        key = (load, is_first, is_last)
        found = self._reaches.get(key)
        if found is None:
            found = _Reach(self._memory, load, self.memory_bytes, is_first=is_first, is_last=is_last)
            self._reaches[key] = found
        return found

    def stage_seconds(self, cuts: Sequence[int], loads: Sequence[StageLoad]) -> tuple[float, ...]:
        """Seconds that the busiest cell of every stage computes in a step, its share of the optimizer included."""
        seconds = []
        for stage, load in enumerate(loads):
            work = self._work(load)
            layers = work.layers[cuts[stage + 1]] - work.layers[cuts[stage]]
            seconds.append(layers + work.extra(stage == 0, stage == len(loads) - 1))
        return tuple(seconds)

    def spans(
        self, cuts: Sequence[int], loads: Sequence[StageLoad], fill: Fill, *, steady: bool = False
    ) -> tuple[float, ...]:
        """Seconds of every stage from its step's begin to its last gradient, at least, were all its items as large.

        A stage's first item comes down to it; until the first gradient comes back it can only run forward passes; its
        last gradient goes up to stage 0, where one more weight gradient follows, while it may run its own. The longest
        span is that of the step.

        Args:
            cuts: Of the partition.
            loads: Of every stage.
            fill: Whether backward is split, and how long transfers take.
            steady: Steps follow each other at once: a stage's span is from its first pass to its last.
        """
        all_work, items = [], []
        for stage, load in enumerate(loads):
            times = self._sums_at(load.clock).stage_times(cuts[stage], cuts[stage + 1])
            kinds = (times.forward, times.input_gradient, times.weight_gradient)
            forward, back, weight = (load.samples * each.sample_s + load.items * each.fixed_s for each in kinds)
            if not fill.split:
                back, weight = back + weight, 0.0
            all_work.append((forward, back, weight))
            items.append((forward / load.items, back / load.items))
        turn = sum(forward + back for forward, back in items) + 2 * (len(loads) - 1) * fill.transfer_s
        weight_s = all_work[0][2] / loads[0].items
        down = up = 0.0
        spans = []
        for stage, ((forward, back, weight), (item_forward, item_back)) in enumerate(zip(all_work, items, strict=True)):
            idle = max(0.0, turn - item_back - forward)
            after = max(weight, up + weight_s) if stage else weight
            spans.append(idle + forward + back + (weight if steady else down + after))
            turn -= item_forward + item_back + 2 * fill.transfer_s
            down += item_forward + fill.transfer_s
            up += item_back + fill.transfer_s
        return tuple(spans)

    def _work(self, load: StageLoad) -> _Work:
        key = (load.samples, load.items, load.cells, load.clock)
        found = self._works.get(key)
        if found is None:
            part = 1 / load.cells if self.cost.optimizer_sharded else 1.0
            amount = (load.samples, load.items, part)
            sums = self._sums_at(load.clock)
            found = self._works[key] = _Work(sums.layers(*amount), *sums.outer(*amount))
        return found

    def _before(self, fill: Fill | None) -> list[float]:
        found = self._befores.get(fill)
        if found is None:
            passes = [0.0] * self.cost.num_layers
            if fill is not None:
                units = (self.cost.embedding, *self.cost.layers[:-1])
                passes = list(accumulate(_fill_s(unit, fill) for unit in units))
                # A stage that has the embedding waits for nobody.
                passes[0] = 0.0
            found = self._befores[fill] = passes
        return found

    def _sums(self, loads: Sequence[StageLoad], fill: Fill | None) -> list[_Sums]:
        sums = []
        before = self._before(fill)
        crossing = 0.0 if fill is None else fill.transfer_s * (1 if fill.split else 2)
        for stage, load in enumerate(loads):
            first, last = stage == 0, stage == len(loads) - 1
            work = self._work(load)
            reach = self._reach(load, first, last)
            sums.append(_Sums(work.layers, work.extra(first, last) + stage * crossing, before, reach))
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

    def extra(self, is_first: bool, is_last: bool) -> float:
        """Of what a stage has besides its layers."""
        return (self.embedding if is_first else 0.0) + (self.after if is_last else 0.0)


def _fill_s(unit: UnitCost, fill: Fill) -> float:
    kinds = (unit.forward,) if fill.split else (unit.forward, unit.input_gradient, unit.weight_gradient)
    return sum(work.seconds(fill.samples) for work in kinds)


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
        state = count * cost.whole_bytes + -(-count // share) * cost.optimizer_bytes
        kept = self.activations[last] - self.activations[first] + sum(unit.activation_bytes for unit in outer)
        inner = cost.layers[first : first + 1] if self.same and last > first else cost.layers[first:last]
        working = max((unit.working_bytes for unit in (*inner, *outer)), default=0.0)
        return state + load.in_flight * kept + load.largest_item * working


class _Reach(dict[int, int]):
    """Of every first layer that is asked for: one past the last that memory allows; at most the number of layers."""

    def __init__(self, memory: _Memory, load: StageLoad, memory_bytes: float, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self._memory, self._load, self._room, self._is_last = memory, load, memory_bytes, is_last
        cost = memory.cost
        before = (cost.embedding,) if is_first else ()
        self._outer = (*before, cost.head, cost.loss) if is_last else before
        if memory.same and not is_last:
            share = load.cells if cost.optimizer_sharded else 1
            each = cost.whole_bytes + cost.optimizer_bytes / share
            counts = zip(memory.parameters, memory.activations, strict=True)
            self._sums = [each * count + load.in_flight * kept for count, kept in counts]
            # With one layer, so that its working memory counts.
            self._free = memory_bytes - memory.needed(load, 0, 1, self._outer) + self._sums[1]

    def __missing__(self, first: int) -> int:
        """Find out."""
        layers = self._memory.cost.num_layers
        if self._is_last:
            # Only whether there is room for all that follow.
            last = layers if self._fits(first, layers) else first
        else:
            last, most = first, layers
            if self._memory.same:
                # Shares of the optimizer are rounded up: only near the limit is memory counted to the byte.
                room, slack = self._sums[first] + self._free, self._memory.cost.optimizer_bytes + 1
                last = max(first, bisect_right(self._sums, room - slack) - 1)
                most = max(first, bisect_right(self._sums, room + slack) - 1)
            while last < most and self._fits(first, last + 1):
                last += 1
        self[first] = last
        return last

    def _fits(self, first: int, last: int) -> bool:
        return self._memory.needed(self._load, first, last, self._outer) <= self._room


def _furthest(sums: list[_Sums], limit_s: float, layers: int) -> tuple[list[int] | None, float]:
    """Every stage takes as many layers as it may.

    Returns:
        The boundaries, None when they do not reach the end; and the least limit at which a stage could take more.
    """
    at, left = 0, len(sums)
    more = float("inf")
    cuts = [0]
    for work, extra, before, reach in sums:
        left -= 1
        done = work[at] - extra - before[at]
        stop = bisect_right(work, limit_s * _SAME + done) - 1
        most = min(reach[at], layers - left)
        if stop >= most:
            stop = most
        elif work[stop + 1] - done < more:
            more = work[stop + 1] - done
        if stop <= at:
            return None, more
        at = stop
        cuts.append(at)
    return (cuts if at == layers else None), more


def _busiest(sums: list[_Sums], cuts: Sequence[int]) -> float:
    return max(
        own.work[last] - own.work[first] + own.extra + own.before[first]
        for own, (first, last) in zip(sums, pairwise(cuts), strict=True)
    )


def _fewest_moves(
    cost: JobCost, sums: list[_Sums], limit_s: float, furthest: Sequence[int], homes: Sequence[int]
) -> tuple[list[int], int]:
    """Of all partitions within the limit, the one that moves fewest parameters, and how many."""
    layers = cost.num_layers
    nearest = _nearest(sums, limit_s, furthest)
    if nearest == list(furthest):
        return nearest, moved_parameters(cost, nearest, homes)
    best: dict[int, tuple[int, list[int]]] = {0: (0, [0])}
    for stage, (work, extra, before, reach) in enumerate(sums):
        away = list(
            accumulate((0 if homes[i] == stage else cost.layers[i].parameters for i in range(layers)), initial=0)
        )
        longer: dict[int, tuple[int, list[int]]] = {}
        for first, (moved, cuts) in best.items():
            stop = bisect_right(work, work[first] + limit_s * _SAME - extra - before[first]) - 1
            stop = min(stop, reach[first], furthest[stage + 1])
            for last in range(max(first + 1, nearest[stage + 1]), stop + 1):
                total = moved + away[last] - away[first]
                other = longer.get(last)
                if other is None or (total, cuts) < (other[0], other[1][:-1]):
                    longer[last] = (total, [*cuts, last])
        best = longer
    moved, cuts = best[layers]
    return cuts, moved


def _nearest(sums: list[_Sums], limit_s: float, furthest: Sequence[int]) -> list[int]:
    """Of every boundary: the first place from which the stages after it still reach the end."""
    nearest = list(furthest)
    for stage in reversed(range(1, len(sums))):
        work, extra, before, reach = sums[stage]
        first = furthest[stage]
        while first > stage:
            earlier = first - 1
            stop = bisect_right(work, work[earlier] + limit_s * _SAME - extra - before[earlier]) - 1
            if min(stop, reach[earlier]) < nearest[stage + 1]:
                break
            first = earlier
        nearest[stage] = first
    return nearest
