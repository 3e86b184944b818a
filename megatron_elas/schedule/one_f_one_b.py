"""1F1B as the running job has it: a warm-up of forward passes, then one forward and one backward in turn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, pairwise

from megatron_elas.schedule.actions import Schedule
from megatron_elas.schedule.routes import Flow
from megatron_elas.schedule.timing import Deadlock, Program, Step
from megatron_elas.spec.items import StageItems


def stock_warmup(stage: int, widths: Sequence[int]) -> int:
    """Forward passes before forward and backward take turns, on stages of ``widths`` cells.

    With equal widths this is the stock one: as many as stages follow. In general a stage has, before its first backward
    pass, run more items than the stage that it feeds, all cells of both counted. Otherwise that one would wait for an
    item that this one only runs after a backward pass.
    """
    ahead = 0
    for narrow, wide in pairwise(reversed(widths[stage:])):
        ahead = -(-(ahead + 1) * narrow // wide)
    return ahead


def stock_warmups(widths: Sequence[int], counts: Sequence[int]) -> list[int]:
    """``stock_warmup`` of every stage.

    Where all cells have as many items, whatever their sizes, micro-steps go through like through a single pipeline, and
    a stage runs as many forward passes ahead as stages follow.

    Args:
        widths: Cells of every stage.
        counts: Most items of a cell of every stage.
    """
    if len(set(counts)) == 1:
        widths = [1] * len(widths)
    return [stock_warmup(stage, widths) for stage in range(len(widths))]


def one_f_one_b(
    items: Sequence[StageItems], warmups: Sequence[int] | None = None, *, flow: Flow | None = None
) -> Schedule:
    """1F1B over any items.

    Args:
        items: Of every stage and cell; every cell runs its own in the order in which they are listed.
        warmups: Forward passes of every stage before the two take turns; without them, those of the stock
            schedule, and more where items of unequal cells would wait for each other in a circle.
        flow: Of the items, when there is one already.

    Raises:
        Deadlock: The warm-ups that were given cannot be carried out.
    """
    return one_f_one_b_program(flow or Flow(items), warmups).schedule


def one_f_one_b_program(flow: Flow, warmups: Sequence[int] | None = None) -> Program:
    """As ``one_f_one_b``, ready to be timed."""
    if warmups is not None:
        return Program.of_steps(flow, _build(flow, warmups))
    widths = [len(cells) for cells in flow.stages]
    stock = stock_warmups(widths, [max(map(len, cells)) for cells in flow.stages])
    # Ends: once warm-ups are as long as the items are many, forward passes wait for no backward pass.
    for more in count():
        longer = [ahead + more * (len(widths) - 1 - s) for s, ahead in enumerate(stock)]
        try:
            return Program.of_steps(flow, _build(flow, longer))
        except Deadlock:
            continue
    raise AssertionError


def _build(flow: Flow, warmups: Sequence[int]) -> list[list[Step]]:
    return [_order(own, warmups[stage]) for stage, own in zip(flow.stage_of_cell, flow.own, strict=True)]


def _order(items: range, warmup: int) -> list[Step]:
    ahead = min(warmup, len(items))
    order: list[Step] = [("F", item) for item in items[:ahead]]
    for forward, backward in zip(items[ahead:], items, strict=False):
        order += (("F", forward), ("B", backward))
    order += [("B", item) for item in items[len(items) - ahead :]]
    return order
