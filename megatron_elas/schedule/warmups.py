"""1F1B of whole micro-batches, as the running job has it: warm-ups that cannot get stuck, and the seconds of a step.

The same as ``one_f_one_b_program`` and ``Program.run`` for items that all are whole micro-batches and cells of a stage
that are equally fast, in a tenth of their time: nothing is built, every cell goes through its order as far as it gets.

Besides its input, a stage's first forward pass may wait for all cells of the stage: they join in an all-gather of
parameters (Megatron's ``--overlap-param-gather``) once each of them has its input. An order that gets stuck then,
though it would not without, is no order for the running job.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from megatron_elas.schedule.one_f_one_b import stock_warmups
from megatron_elas.schedule.routes import Flow
from megatron_elas.spec.items import StageItems

Numbers = Sequence[Sequence[Sequence[int]]]
"""``numbers[stage][cell]``: micro-batches in the order in which the cell runs them; of every stage all of them."""


class StagePasses(NamedTuple):
    """Seconds of one micro-batch on a stage."""

    forward_s: float
    backward_s: float
    sent_s: float
    """From the end of a pass to its result's arrival at the next stage, or its gradient's from there."""


def find_item_warmups(items: Sequence[StageItems], size: int) -> tuple[int, ...]:
    """As ``find_warmups``, for items of any samples; ``size``: of a whole micro-batch."""
    if all(item.is_whole(size) for cells in items for own in cells for item in own):
        return find_warmups([[[item.number for item in own] for own in cells] for cells in items])
    flow = Flow(items)
    stages = len(items)
    stock = stock_warmups([len(cells) for cells in items], [max(map(len, cells)) for cells in items])
    for more in count():
        warmups = [ahead + more * (stages - 1 - stage) for stage, ahead in enumerate(stock)]
        if _ends(flow, warmups):
            return tuple(warmups)
    raise AssertionError


def _ends(flow: Flow, warmups: Sequence[int]) -> bool:
    """Whether 1F1B with these warm-ups ends, also where the cells of a stage join before their first pass."""
    stages = len(flow.stages)
    done_forward, done_backward = ([False] * len(flow.items) for _ in range(2))
    passes = [(0, 0)] * flow.num_cells
    waiting = [len(cells) for cells in flow.stages]
    ready = [False] * flow.num_cells
    moved = True
    while moved:
        moved = False
        for cell in range(flow.num_cells):
            stage, own = flow.stage_of_cell[cell], flow.own[cell]
            ran, back = passes[cell]
            while back < len(own):
                if ran < len(own) and ran - back <= warmups[stage]:
                    item = own[ran]
                    if not all(done_forward[other] for other, _ in flow.before[item]):
                        break
                    if not ready[cell]:
                        ready[cell], moved = True, True
                        waiting[stage] -= 1
                    if waiting[stage]:
                        break
                    done_forward[item] = moved = True
                    ran += 1
                else:
                    item = own[back]
                    if stage < stages - 1 and not all(done_backward[other] for other, _ in flow.after[item]):
                        break
                    done_backward[item] = moved = True
                    back += 1
            passes[cell] = ran, back
    return all(back == len(flow.own[cell]) for cell, (_, back) in enumerate(passes))


def find_warmups(numbers: Numbers) -> tuple[int, ...]:
    """Forward passes of every stage before forward and backward take turns, whether cells join or not.

    Those of the stock schedule, and more where cells would wait for each other in a circle.
    """
    stages = len(numbers)
    stock = stock_warmups([len(cells) for cells in numbers], [max(map(len, cells)) for cells in numbers])
    # Ends: once warm-ups are as long as the micro-batches are many, forward passes wait for no backward pass.
    for more in count():
        warmups = [ahead + more * (stages - 1 - stage) for stage, ahead in enumerate(stock)]
        if run_1f1b(numbers, warmups, joined=True) is not None:
            return tuple(warmups)
    raise AssertionError


def run_1f1b(
    numbers: Numbers, warmups: Sequence[int], times: Sequence[StagePasses] = (), *, joined: bool = False
) -> float | None:
    """Seconds from the first forward pass to the last gradient; None where cells wait for each other in a circle.

    Args:
        numbers: Of every stage and cell.
        warmups: Forward passes of every stage before forward and backward take turns.
        times: Of every stage; empty: nothing takes time.
        joined: The first forward pass of a cell waits until all cells of its stage have their first input.
    """
    run = _Run(numbers, warmups, times or [StagePasses(0.0, 0.0, 0.0)] * len(numbers), joined=joined)
    return run.go()


_MISSING = -1.0


class _Run:
    def __init__(self, numbers: Numbers, warmups: Sequence[int], times: Sequence[StagePasses], *, joined: bool) -> None:
        total = sum(map(len, numbers[0]))
        self.numbers, self.warmups, self.times = numbers, warmups, times
        self.cells = [(stage, own) for stage, cells in enumerate(numbers) for own in cells]
        # When the input of a pass is there: stages without one before (after) them have it at once.
        self.inputs = [[0.0 if stage == 0 else _MISSING] * total for stage in range(len(numbers))]
        self.gradients = [[_MISSING] * total for _ in numbers]
        self.forward_waits = [[-1] * total for _ in numbers]
        self.backward_waits = [[-1] * total for _ in numbers]
        """The cell that waits for it."""
        self.absent = [len(cells) if joined else 0 for cells in numbers]
        """Cells of the stage that have not joined."""
        self.first_cell = [0]
        for cells in numbers:
            self.first_cell.append(self.first_cell[-1] + len(cells))
        self.joined = [not joined] * len(self.cells)
        self.done = [(0, 0)] * len(self.cells)
        """Forward and backward passes."""
        self.free_s = [0.0] * len(self.cells)
        self.todo = list(range(len(self.cells) - 1, -1, -1))

    def go(self) -> float | None:
        while self.todo:
            self._advance(self.todo.pop())
        if any(back < len(own) for (_, own), (_, back) in zip(self.cells, self.done, strict=True)):
            return None
        return max(self.free_s)

    def _join(self, cell: int, stage: int) -> bool:
        """Whether the cell, whose first input is there, may go on."""
        if not self.joined[cell]:
            self.joined[cell] = True
            self.absent[stage] -= 1
            if not self.absent[stage]:
                self.todo += range(self.first_cell[stage], self.first_cell[stage + 1])
        return not self.absent[stage]

    def _advance(self, cell: int) -> None:
        """Run passes until one has to wait."""
        stage, own = self.cells[cell]
        forward_s, backward_s, sent_s = self.times[stage]
        returned_s = self.times[stage - 1].sent_s if stage else 0.0
        is_last = stage == len(self.numbers) - 1
        inputs, gradients = self.inputs[stage], self.gradients[stage]
        next_inputs = [] if is_last else self.inputs[stage + 1]
        next_waits = [] if is_last else self.forward_waits[stage + 1]
        before_gradients = self.gradients[stage - 1] if stage else []
        before_waits = self.backward_waits[stage - 1] if stage else []
        todo, ahead, size = self.todo, self.warmups[stage], len(own)
        ran, back = self.done[cell]
        now = self.free_s[cell]
        while back < size:
            if ran < size and ran - back <= ahead:
                item = own[ran]
                ready = inputs[item]
                if ready < 0:
                    self.forward_waits[stage][item] = cell
                    break
                if not ran and not self._join(cell, stage):
                    break
                now = (ready if ready > now else now) + forward_s
                ran += 1
                if is_last:
                    gradients[item] = now
                else:
                    next_inputs[item] = now + sent_s
                    if next_waits[item] >= 0:
                        todo.append(next_waits[item])
            else:
                item = own[back]
                ready = gradients[item]
                if ready < 0:
                    self.backward_waits[stage][item] = cell
                    break
                now = (ready if ready > now else now) + backward_s
                back += 1
                if stage:
                    before_gradients[item] = now + returned_s
                    if before_waits[item] >= 0:
                        todo.append(before_waits[item])
        self.done[cell] = ran, back
        self.free_s[cell] = now
