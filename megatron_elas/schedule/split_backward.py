"""Orders for any items that are as short as a search finds: weight gradients fill what would be bubbles.

Where backward is split, a cell sends the input's gradient on before it computes the weights' one, and computes that
when it has nothing better to do. The memory of what a weight gradient needs is part of the limit.

The search tries greedy orders (``schedule.greedy``) with different tastes and keeps the best. It stops when the order
is as short as the bound that no order beats, or when its tries are spent. It is deterministic, and more tries begin
with those that fewer have, so that more never give a slower order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from megatron_elas.schedule.actions import Schedule
from megatron_elas.schedule.greedy import NO_MATTER, Limit, Problem, Run, Taste
from megatron_elas.schedule.items import count_samples
from megatron_elas.schedule.one_f_one_b import one_f_one_b_program, stock_warmups
from megatron_elas.schedule.routes import Flow
from megatron_elas.schedule.timing import Deadlock, Durations, Program
from megatron_elas.spec.cost import StageTimes
from megatron_elas.spec.items import CellItems, StageItems

ENOUGH = 1 + 1e-9
"""An order within this factor of the bound is as good as it."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best of the orders that were tried."""

    run: Run | Program = field(repr=False, compare=False)
    step_s: float
    bound_s: float
    """No order of these items is shorter; one that is as short may not exist."""
    tries: int
    tastes: tuple[Taste, ...] | None = None
    """That gave it; None: it is 1F1B."""

    @cached_property
    def program(self) -> Program:
        """The order, ready to be timed."""
        return self.run if isinstance(self.run, Program) else self.run.program()

    @property
    def schedule(self) -> Schedule:
        """The order."""
        return self.program.schedule


class Stock(NamedTuple):
    """1F1B of some items, whatever they cost."""

    program: Program
    peaks: tuple[int, ...]
    """Of every stage: most samples that a cell holds at once."""

    @staticmethod
    def of(flow: Flow) -> Stock:
        """1F1B of these items."""
        program = one_f_one_b_program(flow)
        peaks = [0] * len(flow.stages)
        for stage, order in zip(flow.stage_of_cell, program.steps, strict=True):
            held = 0
            for kind, item in order:
                held += flow.samples[item] if kind == "F" else -flow.samples[item]
                peaks[stage] = max(peaks[stage], held)
        return Stock(program, tuple(peaks))


def split_backward(
    items: Sequence[StageItems],
    durations: Durations,
    limits: Sequence[Limit],
    *,
    tries: int = 12,
    split: bool = True,
    flow: Flow | None = None,
    stock: Stock | None = None,
    measure: Callable[[Program], float] | None = None,
    least_s: float | None = None,
    first: Sequence[Taste] | None = None,
    seed: int = 0,
) -> Found:
    """The best order found; never slower than 1F1B of the same items, where that fits the limits.

    Args:
        items: Of every stage and cell.
        durations: Of passes and transfers.
        limits: Memory of every stage's cells.
        tries: Most orders to try, besides 1F1B. One takes some ten times as long as timing an order that is there.
        split: False: weight gradients stay part of backward passes.
        flow: Of the items, when there is one already.
        stock: 1F1B of the items, when there is one already.
        measure: Seconds that an order is judged by, instead of those from its begin to its end.
        first: Tastes that were good for similar items, of every stage: tried first, then small changes to them.
        seed: Of the small changes.
        least_s: What ``measure`` never falls below; without it, the bound of a step from begin to end.

    Raises:
        Deadlock: Memory is too small for every order that was tried.
    """
    flow = flow or Flow(items)
    problem = Problem(flow, durations, limits) if tries else None
    bound = bound_s(items, durations, limits, split=split) if least_s is None else least_s
    tastes = _Tastes(flow, durations, split, first, seed)
    best: Run | None = None
    best_tastes: tuple[Taste, ...] | None = None
    best_s = float("inf")
    failure: Deadlock | None = None
    count = 0
    for count, taste in enumerate(tastes, 1):
        if problem is None or count > tries or best_s <= bound * ENOUGH:
            count -= 1
            break
        try:
            run = problem.run(taste)
        except Deadlock as error:
            failure = error
            continue
        seconds = measure(run.program()) if measure else run.step_s
        if seconds < best_s:
            best, best_s, best_tastes = run, seconds, taste
        tastes.tell(taste, seconds)
    if best_s > bound * ENOUGH:
        stock = stock or Stock.of(flow)
        if all(peak <= limit.samples + 1e-9 for peak, limit in zip(stock.peaks, limits, strict=True)):
            seconds = measure(stock.program) if measure else stock.program.run(durations).step_s
            if seconds < best_s:
                return Found(run=stock.program, step_s=seconds, bound_s=bound, tries=count)
    if best is None:
        raise failure or Deadlock("1F1B of these items does not fit the memory: allow tries, or make items smaller")
    return Found(run=best, step_s=best_s, bound_s=bound, tries=count, tastes=best_tastes)


def bound_s(
    items: Sequence[StageItems], durations: Durations, limits: Sequence[Limit] | None = None, *, split: bool = True
) -> float:
    """Seconds that no order is shorter than.

    Of every cell: it waits for its first item's way down. Until the first gradient comes back from the last stage it
    can only run forward passes, of as many samples as its memory holds. After its last backward pass the gradient goes
    up to stage 0, where one more weight gradient follows; meanwhile the cell may run weight gradients of its own.

    Args:
        items: Of every stage and cell.
        durations: Of passes and transfers.
        limits: Memory of every stage; None: enough.
        split: False: weight gradients are part of backward passes.
    """
    ends = [_shortest(cells, times) for cells, times in zip(items, durations.cells, strict=True)]
    links = [link.seconds(1) for link in durations.links]
    best = 0.0
    for stage, cells in enumerate(items):
        down = sum(ends[s].forward + links[s] for s in range(stage))
        up = sum(ends[s].back + links[s] + (0.0 if split else ends[s].weight) for s in range(stage))
        turn = sum(ends[s].forward + ends[s].back + 2 * links[s - 1] for s in range(stage + 1, len(ends)))
        if not split:
            turn += sum(ends[s].weight for s in range(stage + 1, len(ends)))
        for times, own in zip(durations.cells[stage], cells, strict=True):
            forward, back, weight = _work(times, own)
            if not own:
                continue
            returned = down + ends[stage].forward + turn
            early = min(forward, returned - down)
            if limits is not None:
                early = min(early, limits[stage].samples * (times.forward.sample_s + times.forward.fixed_s))
            rest = returned + forward - early + back
            best = max(best, rest + (max(weight, up + ends[0].weight if stage else 0.0) if split else weight + up))
    return best


class _Shortest(NamedTuple):
    """The shortest passes of a stage, in seconds."""

    forward: float
    back: float
    weight: float


def _shortest(cells: StageItems, times_of: Sequence[StageTimes]) -> _Shortest:
    passes = [
        (times.forward.seconds(least), times.input_gradient.seconds(least), times.weight_gradient.seconds(least))
        for times, own in zip(times_of, cells, strict=True)
        if own
        for least in [min(item.samples for item in own)]
    ]
    return _Shortest(*map(min, zip(*passes, strict=True)))


def _work(times: StageTimes, own: CellItems) -> tuple[float, float, float]:
    """Seconds of all forward passes, input gradients and weight gradients of a cell."""
    samples, count = count_samples(own), len(own)
    forward, back, weight = (
        samples * passes.sample_s + count * passes.fixed_s
        for passes in (times.forward, times.input_gradient, times.weight_gradient)
    )
    return forward, back, weight


class _Tastes:
    """What to try: some that are often good, then the best so far with small changes. Never ends."""

    def __init__(self, flow: Flow, durations: Durations, split: bool, first: Sequence[Taste] | None, seed: int) -> None:
        widths = [len(cells) for cells in flow.stages]
        self._split = split
        counts = [max(map(len, cells)) for cells in flow.stages]
        self._stock = [ahead + 1 for ahead in stock_warmups(widths, counts)]
        work = [
            max(sum(_work(times, own)) for times, own in zip(times_of, cells, strict=True))
            for times_of, cells in zip(durations.cells, flow.stages, strict=True)
        ]
        self._busiest = work.index(max(work))
        self._best: tuple[Taste, ...] = ()
        self._best_s = float("inf")
        # Seeded: the same sequence in every process, which a plan has to be.
        self._random = random.Random(seed)
        self._first = first

    def tell(self, tastes: Sequence[Taste], step_s: float) -> None:
        """How long the step is that these gave."""
        if step_s < self._best_s:
            self._best, self._best_s = tuple(tastes), step_s

    def __iter__(self) -> Iterator[tuple[Taste, ...]]:
        if self._first is None:
            yield from self._usual()
        else:
            yield tuple(self._first)
        while True:
            yield self._changed()

    def _usual(self) -> Iterator[tuple[Taste, ...]]:
        # In this order they were best together over 135 grids, memories and times, each after those before it.
        busiest, count = self._busiest, len(self._stock)
        plain = Taste(split=self._split)
        if self._split:
            eager, quick = replace(plain, forward_first=True, patience=0.3), replace(plain, patience=0.3)
            yield tuple(eager if stage <= busiest else quick for stage in range(count))
            yield (replace(plain, forward_first=True, deferred=1),) * count
            yield tuple(replace(plain, patience=0.0 if stage == busiest else 1.0) for stage in range(count))
            yield (replace(plain, forward_first=True, deferred=0),) * count
            yield tuple(quick if stage <= busiest else eager for stage in range(count))
            yield (eager,) * count
            yield (replace(plain, deferred=2),) * count
        else:
            yield tuple(replace(plain, ahead=stock) for stock in self._stock)
            yield tuple(replace(plain, ahead=stock + 1) for stock in self._stock)
            yield tuple(replace(plain, ahead=2 * stock) for stock in self._stock)
            yield tuple(replace(plain, forward_first=stage <= busiest) for stage in range(count))

    def _changed(self) -> tuple[Taste, ...]:
        draw = self._random
        tastes = list(self._best or (Taste(split=self._split),) * len(self._stock))
        for _ in range(draw.choice((1, 1, 2, 3))):
            # One stage, or all from one on: neighbours want the same more often than not.
            stage = draw.randrange(len(tastes))
            stop = stage + 1 if draw.random() < 0.5 else len(tastes)
            what, stock = draw.randrange(4 if self._split else 2), draw.choice((0, 1, 2, 3))
            patience = draw.choice((0.0, 0.3, 0.6, 1.0, 1.5, 2.5))
            for i in range(stage, stop):
                if what == 0:
                    ahead = self._stock[i] + stock if stock < 3 else NO_MATTER
                    tastes[i] = replace(tastes[i], ahead=ahead)
                elif what == 1:
                    tastes[i] = replace(tastes[i], forward_first=not tastes[stage].forward_first)
                elif what == 2:
                    tastes[i] = replace(tastes[i], patience=patience)
                else:
                    tastes[i] = replace(tastes[i], deferred=(0, 1, 2, NO_MATTER)[stock])
        return tuple(tastes)
