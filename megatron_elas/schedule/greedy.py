"""Orders found by letting every cell take what is ready: for any items, any times, any memory.

Time goes from event to event. A cell that is free takes, of what has arrived, a backward pass first, then a forward
pass where memory allows, then a weight gradient that was put off. ``Taste`` turns this differently per stage.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_elas.schedule.actions import Action, Kind, Schedule
from megatron_elas.schedule.routes import Flow
from megatron_elas.schedule.timing import Deadlock, Durations

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
    run = _Run(flow, durations, limits, tastes)
    run.go()
    orders: list[list[tuple[Action, ...]]] = [[] for _ in flow.stages]
    for cell, order in enumerate(run.orders):
        stage = flow.stage_of_cell[cell]
        items = flow.items
        orders[stage].append(tuple([Action(stage, kind, items[i].number) for kind, i in order]))
    return Schedule(items=flow.stages, orders=tuple(map(tuple, orders))), run.step_s


class _Run:
    def __init__(self, flow: Flow, durations: Durations, limits: Sequence[Limit], tastes: Sequence[Taste]) -> None:
        self.flow = flow
        cells, stage_of = range(flow.num_cells), flow.stage_of_cell
        self.tastes = [tastes[stage_of[cell]] for cell in cells]
        self.room = [limits[stage_of[cell]].samples + 1e-9 for cell in cells]
        self.share = [limits[stage_of[cell]].kept_share if self.tastes[cell].split else 0.0 for cell in cells]
        self.times = [durations.cells[stage][cell] for stage, cell in map(flow.find, cells)]
        self.links = durations.links
        self.orders: list[list[tuple[Kind, int]]] = [[] for _ in cells]
        self.free_s = [0.0] * len(cells)
        self.held = [0.0] * len(cells)
        """Samples in memory."""
        self.flying = [0] * len(cells)
        """Items between F and B."""
        self.next_forward = [own.start for own in flow.own]
        self.backwards: list[list[tuple[float, int]]] = [[] for _ in cells]
        """Heaps of (known arrival, item)."""
        self.weights: list[list[int]] = [[] for _ in cells]
        self.weight_at = [0] * len(cells)
        self.forward_s = [0.0] * len(flow.items)
        """Latest arrival so far of what an item's forward pass waits for."""
        self.backward_s = [0.0] * len(flow.items)
        self.forward_missing = [len(before) for before in flow.before]
        # One more than what comes back: the item's own forward pass.
        self.backward_missing = [len(after) + 1 for after in flow.after]
        self.events = [(0.0, cell) for cell in cells]
        self.step_s = 0.0

    def go(self) -> None:
        """Until nothing happens any more."""
        events, free = self.events, self.free_s
        while events:
            now, cell = heapq.heappop(events)
            if now >= free[cell] - 1e-12:
                self._choose(cell, now)
        left = sum(map(len, self.orders))
        wanted = sum((3 if self.tastes[cell].split else 2) * len(own) for cell, own in enumerate(self.flow.own))
        if left < wanted:
            self._complain()

    def _complain(self) -> None:
        for cell, own in enumerate(self.flow.own):
            if self.next_forward[cell] < own.stop:
                stage, place = self.flow.find(cell)
                raise Deadlock(
                    f"cell {place} of stage {stage} holds {self.held[cell]:g} samples of at most "
                    f"{self.room[cell]:.4g} and can take no more, while others wait for it: allow more samples at "
                    f"once, or make items smaller"
                )
        raise AssertionError("all forward passes ran, but not all backward passes")

    def _choose(self, cell: int, now: float) -> None:
        taste, item = self.tastes[cell], self.next_forward[cell]
        backwards = self.backwards[cell]
        if len(self.weights[cell]) - self.weight_at[cell] > taste.deferred:
            self._weight(cell, now)
            return
        soon = now + 1e-12
        can_forward = False
        forward_s = float("inf")
        if (
            item < self.flow.own[cell].stop
            and not self.forward_missing[item]
            and self.flying[cell] < taste.ahead
            and self.held[cell] + self.flow.samples[item] <= self.room[cell]
        ):
            forward_s = self.forward_s[item]
            can_forward = forward_s <= soon
        can_backward = bool(backwards) and backwards[0][0] <= soon
        if can_forward and (taste.forward_first or not can_backward):
            self._forward(cell, item, now)
        elif can_backward:
            self._backward(cell, heapq.heappop(backwards)[1], now)
        elif self.weight_at[cell] < len(self.weights[cell]):
            waiting = self.weights[cell][self.weight_at[cell]]
            takes = self.times[cell].weight_gradient.seconds(self.flow.samples[waiting])
            arrival = min(forward_s, backwards[0][0] if backwards else float("inf"))
            if arrival < now + taste.patience * takes:
                heapq.heappush(self.events, (arrival, cell))
            else:
                self._weight(cell, now)
        elif backwards or forward_s < float("inf"):
            arrival = min(forward_s, backwards[0][0] if backwards else float("inf"))
            heapq.heappush(self.events, (arrival, cell))

    def _forward(self, cell: int, item: int, now: float) -> None:
        samples = self.flow.samples[item]
        end = now + self.times[cell].forward.seconds(samples)
        self.next_forward[cell] = item + 1
        self.held[cell] += samples
        self.flying[cell] += 1
        self._done(cell, "F", item, end)
        stage = self.flow.stage_of_cell[cell]
        for other, part in self.flow.after[item]:
            arrival = end + self.links[stage].seconds(part)
            if arrival > self.forward_s[other]:
                self.forward_s[other] = arrival
            self.forward_missing[other] -= 1
            receiver = self.flow.cell_of[other]
            if not self.forward_missing[other] and self.next_forward[receiver] == other:
                heapq.heappush(self.events, (max(self.forward_s[other], self.free_s[receiver]), receiver))
        self._returned(item, end)

    def _backward(self, cell: int, item: int, now: float) -> None:
        samples = self.flow.samples[item]
        times = self.times[cell]
        end = now + times.input_gradient.seconds(samples)
        if self.tastes[cell].split:
            self.weights[cell].append(item)
        else:
            end += times.weight_gradient.seconds(samples)
        self.held[cell] -= samples * (1 - self.share[cell])
        self.flying[cell] -= 1
        self._done(cell, "B", item, end)
        stage = self.flow.stage_of_cell[cell]
        for other, part in self.flow.before[item]:
            self._returned(other, end + self.links[stage - 1].seconds(part))

    def _returned(self, item: int, arrival: float) -> None:
        if arrival > self.backward_s[item]:
            self.backward_s[item] = arrival
        self.backward_missing[item] -= 1
        if not self.backward_missing[item]:
            cell = self.flow.cell_of[item]
            heapq.heappush(self.backwards[cell], (self.backward_s[item], item))
            heapq.heappush(self.events, (max(self.backward_s[item], self.free_s[cell]), cell))

    def _weight(self, cell: int, now: float) -> None:
        item = self.weights[cell][self.weight_at[cell]]
        samples = self.flow.samples[item]
        self.weight_at[cell] += 1
        self.held[cell] -= samples * self.share[cell]
        self._done(cell, "W", item, now + self.times[cell].weight_gradient.seconds(samples))

    def _done(self, cell: int, kind: Kind, item: int, end: float) -> None:
        self.orders[cell].append((kind, item))
        self.free_s[cell] = end
        if end > self.step_s:
            self.step_s = end
        heapq.heappush(self.events, (end, cell))
