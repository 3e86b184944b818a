"""Orders found by letting every cell take what is ready: for any items, any times, any memory.

Time goes from event to event. A cell that is free takes, of what has arrived, a backward pass first, then a forward
pass where memory allows, then a weight gradient that was put off. ``Taste`` turns this differently per stage.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_elas.schedule.actions import Kind, Schedule
from megatron_elas.schedule.routes import Flow
from megatron_elas.schedule.timing import Deadlock, Durations, Program, Step, schedule_of

_NEVER = float("inf")
NO_MATTER = 1 << 30
"""A number of items that is never reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What fits on the cells of a stage, in samples whose activations are kept whole."""

    samples: float
    """At once."""
    kept_share: float = 0.0
    """Bytes of a sample that is between B and W, as a share of its bytes between F and B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taste:
    """How the cells of a stage choose."""

    split: bool = False
    """Weight gradients are passes of their own."""
    ahead: int = NO_MATTER
    """Most items between F and B, beside what memory allows."""
    forward_first: bool = False
    """Of a forward and a backward pass that are both ready, forward goes first."""
    deferred: int = NO_MATTER
    """Most items between B and W: where there are more, a weight gradient goes before anything else."""
    patience: float = 1.0
    """A weight gradient begins only when nothing else is known to arrive within this share of its time."""


def greedy(
    flow: Flow, durations: Durations, limits: Sequence[Limit], tastes: Sequence[Taste]
) -> tuple[Schedule, float]:
    """An order in which each cell takes what is ready.

    Args:
        flow: Of the items.
        durations: By which the choice is made.
        limits: Of every stage.
        tastes: Of every stage.

    Returns:
        The schedule, and the seconds of its step.

    Raises:
        Deadlock: Memory is too small for these items.
    """
    run = Problem(flow, durations, limits).run(tastes)
    return run.schedule(), run.step_s


class Problem:
    """What greedy runs with different tastes have in common, as plain lists by cell and by item."""

    def __init__(self, flow: Flow, durations: Durations, limits: Sequence[Limit]) -> None:
        self.flow = flow
        self.room = [limits[stage].samples + 1e-9 for stage in flow.stage_of_cell]
        self.share = [limits[stage].kept_share for stage in flow.stage_of_cell]
        # What a sample between F and B counts: where it takes more between B and W, there must be room for that, too.
        self.weight = [max(1.0, share) for share in self.share]
        passes = [(durations.cells[stage][place], n) for cell, n in flow.kinds for stage, place in [flow.find(cell)]]
        forward = [times.forward.seconds(n) for times, n in passes]
        back = [times.input_gradient.seconds(n) for times, n in passes]
        weight = [times.weight_gradient.seconds(n) for times, n in passes]
        self.forward_s = [forward[kind] for kind in flow.kind_of]
        self.input_s = [back[kind] for kind in flow.kind_of]
        self.weight_s = [weight[kind] for kind in flow.kind_of]
        delays = [durations.links[boundary].seconds(n) for boundary, n in flow.ways]
        self.after = [[(other, delays[way]) for other, way in parts] for parts in flow.after]
        """Of every item: (item of the later stage, seconds of the transfer)."""
        self.before = [[(other, delays[way]) for other, way in parts] for parts in flow.before]
        self.stops = [own.stop for own in flow.own]

    def run(self, tastes: Sequence[Taste]) -> Run:
        """Go through a step. Raises Deadlock when memory is too small."""
        run = Run(self, tastes)
        run.go()
        return run


class Run:
    """One step from its begin to its end. Lists are by cell or by item."""

    def __init__(self, problem: Problem, tastes: Sequence[Taste]) -> None:
        flow = problem.flow
        self._problem = problem
        self.tastes = [tastes[stage] for stage in flow.stage_of_cell]
        cells = range(flow.num_cells)
        self.orders: list[list[Step]] = [[] for _ in cells]
        self._sequence: list[int] = []
        """Cells, in the order in which they began their actions."""
        self.step_s = 0.0
        self._free_s = [0.0] * len(cells)
        self._held = [0.0] * len(cells)
        """Samples in memory."""
        self._flying = [0] * len(cells)
        """Items between F and B."""
        self._next = [own.start for own in flow.own]
        """The next forward pass."""
        self._backwards: list[list[tuple[float, int]]] = [[] for _ in cells]
        """Heaps of (known arrival, item)."""
        self._weights: list[deque[int]] = [deque() for _ in cells]
        self._forward_at = [0.0] * len(flow.items)
        """Latest arrival so far of what an item's forward pass waits for."""
        self._backward_at = [0.0] * len(flow.items)
        self._forward_missing = [len(before) for before in flow.before]
        # One more than what comes back: the item's own forward pass.
        self._backward_missing = [len(after) + 1 for after in flow.after]
        self._events = [(0.0, cell) for cell in cells]

    def program(self) -> Program:
        """The order that was taken, ready to be timed."""
        return Program.of_steps(self._problem.flow, self.orders, self._sequence)

    def schedule(self) -> Schedule:
        """The order that was taken."""
        return schedule_of(self._problem.flow, self.orders)

    def go(self) -> None:
        """Until nothing happens any more. Raises Deadlock."""
        events, free, pop, choose = self._events, self._free_s, heapq.heappop, self._choose
        while events:
            now, cell = pop(events)
            # An event of a cell that has begun something meanwhile is void.
            if now >= free[cell] - 1e-12:
                choose(cell, now)
        done = len(self._sequence)
        wanted = sum(
            (3 if self.tastes[cell].split else 2) * len(own) for cell, own in enumerate(self._problem.flow.own)
        )
        if done < wanted:
            self._complain()

    def _complain(self) -> None:
        for cell, stop in enumerate(self._problem.stops):
            if self._next[cell] < stop:
                stage, place = self._problem.flow.find(cell)
                raise Deadlock(
                    f"cell {place} of stage {stage} holds {self._held[cell]:g} samples of at most "
                    f"{self._problem.room[cell]:.4g} and can take no more, while others wait for it: allow more "
                    f"samples at once, or make items smaller"
                )
        raise AssertionError("all forward passes ran, but not all backward passes")

    def _choose(self, cell: int, now: float) -> None:
        problem, taste, item = self._problem, self.tastes[cell], self._next[cell]
        weights = self._weights[cell]
        if len(weights) > taste.deferred:
            self._weight(cell, now)
            return
        soon = now + 1e-12
        forward_s = backward_s = _NEVER
        if (
            item < problem.stops[cell]
            and not self._forward_missing[item]
            and self._flying[cell] < taste.ahead
            and self._held[cell] + problem.flow.samples[item] * problem.weight[cell] <= problem.room[cell]
        ):
            forward_s = self._forward_at[item]
        if self._backwards[cell]:
            backward_s = self._backwards[cell][0][0]
        if forward_s <= soon and (taste.forward_first or backward_s > soon):
            self._forward(cell, item, now)
        elif backward_s <= soon:
            self._backward(cell, now)
        else:
            arrival = forward_s if forward_s < backward_s else backward_s
            if weights and arrival >= now + taste.patience * problem.weight_s[weights[0]]:
                self._weight(cell, now)
            elif arrival < _NEVER:
                heapq.heappush(self._events, (arrival, cell))

    def _forward(self, cell: int, item: int, now: float) -> None:
        problem = self._problem
        end = now + problem.forward_s[item]
        self._next[cell] = item + 1
        self._held[cell] += problem.flow.samples[item] * problem.weight[cell]
        self._flying[cell] += 1
        self._done(cell, "F", item, end)
        arrivals, missing, cell_of = self._forward_at, self._forward_missing, problem.flow.cell_of
        for other, delay in problem.after[item]:
            arrival = end + delay
            if arrival > arrivals[other]:
                arrivals[other] = arrival
            missing[other] -= 1
            if not missing[other]:
                receiver = cell_of[other]
                arrival = arrivals[other]
                if self._next[receiver] == other and arrival >= self._free_s[receiver]:
                    heapq.heappush(self._events, (arrival, receiver))
        self._returned(item, end)

    def _backward(self, cell: int, now: float) -> None:
        problem = self._problem
        item = heapq.heappop(self._backwards[cell])[1]
        end = now + problem.input_s[item]
        samples = problem.flow.samples[item]
        if self.tastes[cell].split:
            self._weights[cell].append(item)
            self._held[cell] -= samples * (problem.weight[cell] - problem.share[cell])
        else:
            end += problem.weight_s[item]
            self._held[cell] -= samples * problem.weight[cell]
        self._flying[cell] -= 1
        self._done(cell, "B", item, end)
        for other, delay in problem.before[item]:
            self._returned(other, end + delay)

    def _returned(self, item: int, arrival: float) -> None:
        if arrival > self._backward_at[item]:
            self._backward_at[item] = arrival
        self._backward_missing[item] -= 1
        if not self._backward_missing[item]:
            cell, arrival = self._problem.flow.cell_of[item], self._backward_at[item]
            heapq.heappush(self._backwards[cell], (arrival, item))
            # A cell that is busy until later looks again when it is free.
            if arrival >= self._free_s[cell]:
                heapq.heappush(self._events, (arrival, cell))

    def _weight(self, cell: int, now: float) -> None:
        item = self._weights[cell].popleft()
        self._held[cell] -= self._problem.flow.samples[item] * self._problem.share[cell]
        self._done(cell, "W", item, now + self._problem.weight_s[item])

    def _done(self, cell: int, kind: Kind, item: int, end: float) -> None:
        self.orders[cell].append((kind, item))
        self._sequence.append(cell)
        self._free_s[cell] = end
        if end > self.step_s:
            self.step_s = end
        heapq.heappush(self._events, (end, cell))
