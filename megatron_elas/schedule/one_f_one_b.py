"""1F1B as the running job has it: a warm-up of forward passes, then one forward and one backward in turn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, pairwise

from megatron_elas.schedule.actions import Action, CellItems, Order, Schedule, StageItems
from megatron_elas.schedule.routes import Flow
from megatron_elas.schedule.timing import Deadlock, Program


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
    return one_f_one_b_program(items, warmups, flow=flow).schedule


def one_f_one_b_program(
    items: Sequence[StageItems], warmups: Sequence[int] | None = None, *, flow: Flow | None = None
) -> Program:
    """As ``one_f_one_b``, ready to be timed."""
    flow = flow or Flow(items)
    if warmups is not None:
        return Program(_build(items, warmups), flow)
    widths = [len(cells) for cells in items]
    stock = stock_warmups(widths, [max(map(len, cells)) for cells in items])
    # Ends: once warm-ups are as long as the items are many, forward passes wait for no backward pass.
    for more in count():
        schedule = _build(items, [ahead + more * (len(widths) - 1 - s) for s, ahead in enumerate(stock)])
        try:
            return Program(schedule, flow)
        except Deadlock:
            continue
    raise AssertionError


def _build(items: Sequence[StageItems], warmups: Sequence[int]) -> Schedule:
    orders = tuple(tuple(_order(stage, own, warmups[stage]) for own in cells) for stage, cells in enumerate(items))
    return Schedule(items=tuple(items), orders=orders)


def _order(stage: int, items: CellItems, warmup: int) -> Order:
    ahead = min(warmup, len(items))
    forward = [Action(stage, "F", item.number) for item in items]
    backward = [Action(stage, "B", item.number) for item in items]
    steady = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
    return (*forward[:ahead], *steady, *backward[len(items) - ahead :])
