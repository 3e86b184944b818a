"""Orders of a running job's cells: written as text in plans, read again, and made fit for its transports.

``F0 F1 B0 W0`` names the items of the cell's stage. An item that has a ``W`` has a split backward.

What the running job asks of orders besides those of ``checks``: a link hands messages over in the order of sending, so
whoever receives takes them in that order; and the first forward pass of a cell may wait for all cells of its stage,
which join in an all-gather of parameters once each of them has its input (see ``schedule.warmups``).
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import cast

from megatron_elas.schedule.actions import Kind
from megatron_elas.schedule.routes import Flow
from megatron_elas.schedule.timing import Deadlock, Program, Step
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.items import StageItems

CellOrders = tuple[tuple[str, ...], ...]
"""``orders[stage][cell]``, see ``ElasticPlan``."""

_PASS = re.compile(r"([FBW])(\d+)")


def write_orders(program: Program) -> CellOrders:
    """The orders of a schedule's cells as text."""
    flow = program.flow
    texts: list[list[str]] = [[] for _ in flow.stages]
    for stage, steps in zip(flow.stage_of_cell, program.steps, strict=True):
        texts[stage].append(" ".join([f"{kind}{flow.items[item].number}" for kind, item in steps]))
    return tuple(map(tuple, texts))


def read_orders(items: Sequence[StageItems], orders: CellOrders) -> Program:
    """The schedule that is written so, ready to be timed.

    Raises:
        BadUsage: A word is no pass of an item of its cell, or passes are missing or twice.
        Deadlock: The orders cannot be carried out even when sends never block.
    """
    flow = Flow(items)
    if tuple(map(len, orders)) != tuple(map(len, items)):
        raise BadUsage(f"orders are of {list(map(len, orders))} cells, and items of {list(map(len, items))}")
    texts = [text for cells in orders for text in cells]
    return Program.of_steps(flow, [_read(flow, cell, text) for cell, text in enumerate(texts)])


def _read(flow: Flow, cell: int, text: str) -> list[Step]:
    stage, place = flow.find(cell)
    index, own = flow.index[stage], flow.own[cell]
    steps: list[Step] = []
    done: dict[Kind, set[int]] = {"F": set(), "B": set(), "W": set()}
    for word in text.split():
        found = _PASS.fullmatch(word)
        item = index.get(int(found[2]), -1) if found else -1
        if found is None or item not in own:
            raise BadUsage(f"{word!r} in the order of cell {place} of stage {stage} is no pass of one of its items")
        kind = cast(Kind, found[1])
        early = (kind == "B" and item not in done["F"]) or (kind == "W" and item not in done["B"])
        if early or item in done[kind]:
            raise BadUsage(f"{word!r} in the order of cell {place} of stage {stage} comes twice, or too early")
        done[kind].add(item)
        steps.append((kind, item))
    if len(done["F"]) < len(own) or len(done["B"]) < len(own):
        raise BadUsage(f"the order of cell {place} of stage {stage} lacks passes: list F and B of every item")
    return steps


def fit_orders(program: Program) -> Program | None:
    """The schedule, or one as near to it as can be, that links and joining cells allow; None where there is none.

    Where a cell's backward passes would take gradients in another order than they are sent in, they change places.
    """
    flow, steps = program.flow, list(program.steps)
    # From the last stage up: what a stage sends follows from its own order.
    for cell in reversed(range(flow.num_cells)):
        order = _backwards_as_sent(flow, steps, cell)
        if order is None:
            return None
        if order != [item for kind, item in steps[cell] if kind == "B"]:
            steps[cell] = _reordered(steps[cell], order)
    if not all(_takes_forwards_as_sent(flow, steps, cell) for cell in range(flow.num_cells)):
        return None
    try:
        fitted = program if steps == list(program.steps) else Program.of_steps(flow, steps)
    except Deadlock:
        return None
    return fitted if fitted.runs_joined() else None


def _sent(flow: Flow, steps: Sequence[Sequence[Step]], cell: int, kind: Kind) -> list[list[int]] | None:
    """From every sender of the cell: own items in the order in which something of them is sent; None: in turns."""
    sources, targets = (flow.before, flow.after) if kind == "F" else (flow.after, flow.before)
    senders = sorted({flow.cell_of[other] for item in flow.own[cell] for other, _ in sources[item]})
    queues = []
    for sender in senders:
        sent = [
            own
            for other_kind, item in steps[sender]
            if other_kind == kind
            for own, _ in targets[item]
            if flow.cell_of[own] == cell
        ]
        queue = [own for own, _ in groupby(sent)]
        if len(set(queue)) < len(queue):
            return None
        queues.append(queue)
    return queues


def _is_taken_as_sent(wanted: Sequence[int], queue: Sequence[int]) -> bool:
    members = set(queue)
    return [item for item in wanted if item in members] == queue


def _backwards_as_sent(flow: Flow, steps: Sequence[Sequence[Step]], cell: int) -> list[int] | None:
    """Items of the cell's backward passes, as near to their order as links allow; None: these wait in a circle."""
    wanted = [item for kind, item in steps[cell] if kind == "B"]
    queues = _sent(flow, steps, cell, "B")
    if queues is None:
        return None
    if all(_is_taken_as_sent(wanted, queue) for queue in queues):
        return wanted
    place = {item: at for at, item in enumerate(wanted)}
    missing = dict.fromkeys(wanted, 0)
    followers: dict[int, list[int]] = {item: [] for item in wanted}
    for queue in queues:
        for earlier, later in pairwise(queue):
            missing[later] += 1
            followers[earlier].append(later)
    ready = [place[item] for item in wanted if not missing[item]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        item = wanted[heapq.heappop(ready)]
        order.append(item)
        for later in followers[item]:
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(ready, place[later])
    return order if len(order) == len(wanted) else None


def _reordered(steps: Sequence[Step], order: Sequence[int]) -> list[Step]:
    """The same kinds of passes, backward ones of the items in this order, weight gradients after them."""
    backward = iter(order)
    whole = {item for _, item in steps} - {item for kind, item in steps if kind == "W"}
    weights = iter([item for item in order if item not in whole])
    return [(kind, item if kind == "F" else next(backward) if kind == "B" else next(weights)) for kind, item in steps]


def _takes_forwards_as_sent(flow: Flow, steps: Sequence[Sequence[Step]], cell: int) -> bool:
    """Whether the cell's forward passes come in the order of what is sent to it."""
    wanted = [item for kind, item in steps[cell] if kind == "F"]
    queues = _sent(flow, steps, cell, "F")
    return queues is not None and all(_is_taken_as_sent(wanted, queue) for queue in queues)
