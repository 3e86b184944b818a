"""1F1B as the running job has it: warm-ups that cannot get stuck, and the seconds of a step.

The same as ``one_f_one_b_program`` and ``Program.run``, in less time: no orders are built, every cell goes through its
own as far as it gets. ``find_order`` and ``time_order`` ask ``schedule.lockstep`` first, which takes less still.

Besides its input, a stage's first forward pass may wait for all cells of the stage: they join in an all-gather of
parameters (Megatron's ``--overlap-param-gather``) once each of them has its input. An order that gets stuck then,
though it would not without, is no order for the running job.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

from megatron_elas.schedule.lockstep import Known, Lockstep
from megatron_elas.schedule.one_f_one_b import stock_warmups
from megatron_elas.schedule.routes import Flow
from megatron_elas.schedule.timing import Deadlock, Durations
from megatron_elas.spec.cost import PassTime, StageTimes
from megatron_elas.spec.items import StageItems


class Order(NamedTuple):
    """1F1B of some items."""

    warmups: tuple[int, ...]
    """As of ``find_warmups``."""
    step_s: float
    """Seconds from the first forward pass to the last gradient; 0 where nothing takes time."""


def find_order(
    items: Sequence[StageItems],
    times: Sequence[StageTimes] = (),
    links: Sequence[PassTime] = (),
    known: Known | None = None,
) -> Order:
    """Warm-ups, and what a step takes with them: both at once.

    Args:
        items: Of every stage and cell.
        times: Of every stage; empty: nothing takes time.
        links: Between stages.
        known: See ``Lockstep``.
    """
    lockstep = Lockstep(items, known)
    stock = tuple(_stock(items))
    step_s = lockstep.run(stock, times, links)
    if step_s is not None:
        return Order(stock, step_s)
    warmups = find_warmups(items)
    return Order(warmups, _time(lockstep, items, warmups, times, links) if times else 0.0)


def time_order(
    items: Sequence[StageItems], warmups: Sequence[int], times: Sequence[StageTimes], links: Sequence[PassTime]
) -> float:
    """Seconds of 1F1B with these warm-ups, see ``Order.step_s``. Raises Deadlock."""
    return _time(Lockstep(items), items, warmups, times, links)


def _time(
    lockstep: Lockstep,
    items: Sequence[StageItems],
    warmups: Sequence[int],
    times: Sequence[StageTimes],
    links: Sequence[PassTime],
) -> float:
    step_s = lockstep.run(warmups, times, links)
    if step_s is None:
        step_s = run_items(Flow(items), warmups, Durations.of(times, items, links))
    if step_s is None:
        raise Deadlock(f"1F1B with warm-ups {list(warmups)} gets stuck")
    return step_s


def _stock(items: Sequence[StageItems]) -> list[int]:
    return stock_warmups([len(cells) for cells in items], [max(map(len, cells)) for cells in items])


def find_warmups(items: Sequence[StageItems]) -> tuple[int, ...]:
    """Forward passes of every stage before forward and backward take turns, whether cells join or not.

    Those of the stock schedule, and more where cells would wait for each other in a circle.
    """
    if runs_in_step(items):
        return tuple(range(len(items) - 1, -1, -1))
    flow = Flow(items)
    for warmups in _longer(_stock(items)):
        if run_items(flow, warmups, joined=True) is not None:
            return warmups
    raise AssertionError


def runs_in_step(items: Sequence[StageItems]) -> bool:
    """Whether the cells of every stage together run the same samples one after the other, in an item of each of them.

    These are the samples of a micro-step. An item waits for items of its own micro-step only, and so do cells that
    join, so the stock schedule goes through like a single pipeline: no cell waits in a circle.
    """
    first: list[int] | None = None
    before: StageItems | None = None
    for cells in items:
        if cells is before:
            continue
        before = cells
        if len({len(own) for own in cells}) > 1:
            return False
        stops = []
        total = 0
        for step in zip(*cells, strict=True):
            total += sum(item.samples for item in step)
            if max(item.ranges[-1][1] for item in step) != total:
                return False
            stops.append(total)
        if first is None:
            first = stops
        elif first != stops:
            return False
    return True


def _longer(stock: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """These warm-ups, and ever longer ones, the more so the more stages follow.

    One of them gets through: once warm-ups are as long as the items are many, no forward pass waits for a backward one.
    """
    for more in count():
        yield tuple(ahead + more * (len(stock) - 1 - stage) for stage, ahead in enumerate(stock))


def run_items(
    flow: Flow, warmups: Sequence[int], durations: Durations | None = None, *, joined: bool = False
) -> float | None:
    """Seconds from the first forward pass to the last gradient; None where cells wait for each other in a circle.

    Args:
        flow: Of the items.
        warmups: Forward passes of every stage before forward and backward take turns.
        durations: None: nothing takes time.
        joined: The first forward pass of a cell waits until all cells of its stage have their first input.
    """
    return _Run(flow, warmups, durations, joined=joined).go()


class _Run:
    def __init__(self, flow: Flow, warmups: Sequence[int], durations: Durations | None, *, joined: bool) -> None:
        self.flow, self.warmups = flow, warmups
        self.forward_s, self.backward_s = [0.0] * len(flow.kinds), [0.0] * len(flow.kinds)
        self.sent_s = [0.0] * len(flow.ways)
        if durations is not None:
            for kind, (cell, samples) in enumerate(flow.kinds):
                stage, place = flow.find(cell)
                times = durations.cells[stage][place]
                self.forward_s[kind] = times.forward.seconds(samples)
                self.backward_s[kind] = times.input_gradient.seconds(samples) + times.weight_gradient.seconds(samples)
            self.sent_s = [durations.links[boundary].seconds(samples) for boundary, samples in flow.ways]
        total = len(flow.items)
        # When all parts of an input or a gradient are there, and how many are not yet.
        self.inputs, self.gradients = [0.0] * total, [0.0] * total
        self.missing_inputs, self.missing_gradients = list(map(len, flow.before)), list(map(len, flow.after))
        self.absent = [len(cells) if joined else 0 for cells in flow.stages]
        """Cells of the stage that have not joined."""
        self.joined = [not joined] * flow.num_cells
        self.done = [(0, 0)] * flow.num_cells
        """Forward and backward passes."""
        self.free_s = [0.0] * flow.num_cells
        self.todo = list(range(flow.num_cells - 1, -1, -1))

    def go(self) -> float | None:
        while self.todo:
            self._advance(self.todo.pop())
        if any(back < len(own) for own, (_, back) in zip(self.flow.own, self.done, strict=True)):
            return None
        return max(self.free_s)

    def _join(self, cell: int, stage: int) -> bool:
        """Whether the cell, whose first input is there, may go on."""
        if not self.joined[cell]:
            self.joined[cell] = True
            self.absent[stage] -= 1
            if not self.absent[stage]:
                first = self.flow.first_cell[stage]
                self.todo += range(first, first + len(self.flow.stages[stage]))
        return not self.absent[stage]

    def _advance(self, cell: int) -> None:
        """Run passes until one has to wait. Whoever gets the last part of something goes on after this cell."""
        flow, todo = self.flow, self.todo
        stage, own = flow.stage_of_cell[cell], flow.own[cell]
        cell_of, kind_of, sent_s = flow.cell_of, flow.kind_of, self.sent_s
        inputs, missing_inputs = self.inputs, self.missing_inputs
        gradients, missing_gradients = self.gradients, self.missing_gradients
        ahead, size, begin = self.warmups[stage], len(own), own.start
        ran, back = self.done[cell]
        now = self.free_s[cell]
        while back < size:
            if ran < size and ran - back <= ahead:
                item = begin + ran
                if missing_inputs[item] or (not ran and not self._join(cell, stage)):
                    break
                ready = inputs[item]
                now = (ready if ready > now else now) + self.forward_s[kind_of[item]]
                ran += 1
                for other, way in flow.after[item]:
                    arrival = now + sent_s[way]
                    if arrival > inputs[other]:
                        inputs[other] = arrival
                    missing_inputs[other] -= 1
                    if not missing_inputs[other]:
                        todo.append(cell_of[other])
            else:
                item = begin + back
                if missing_gradients[item]:
                    break
                ready = gradients[item]
                now = (ready if ready > now else now) + self.backward_s[kind_of[item]]
                back += 1
                for other, way in flow.before[item]:
                    arrival = now + sent_s[way]
                    if arrival > gradients[other]:
                        gradients[other] = arrival
                    missing_gradients[other] -= 1
                    if not missing_gradients[other]:
                        todo.append(cell_of[other])
        self.done[cell] = ran, back
        self.free_s[cell] = now
