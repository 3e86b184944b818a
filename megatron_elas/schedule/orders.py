"""Orders as a plan writes them, ``F0 F1 B0 W0`` for each cell: read, written, and checked before they are run.

A cell runs its forward passes in the order of its items, since it reads their samples in that order. Backward passes
may come in any order: whoever receives over a link knows from the plan in which order the other end sends, and keeps
what it needs later (``host.pipeline``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import cast

from megatron_elas.schedule.actions import Action, Kind, Order, Schedule
from megatron_elas.schedule.checks import check_schedule
from megatron_elas.schedule.greedy import Limit
from megatron_elas.schedule.timing import Program
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.items import StageItems

PlanOrders = tuple[tuple[str, ...], ...]
"""``ElasticPlan.orders``."""
_PASS = re.compile(r"([FBW])(\d+)")


def read_order(text: str, stage: int) -> Order:
    """The order of a cell of that stage. Raises BadUsage."""
    return tuple(_read_pass(word, stage) for word in text.split())


def _read_pass(word: str, stage: int) -> Action:
    found = _PASS.fullmatch(word)
    if found is None:
        raise BadUsage(f"stage {stage}: {word!r} is no pass of a plan: write F, B or W, and an item, such as F0")
    return Action(stage, cast(Kind, found[1]), int(found[2]))


@lru_cache(maxsize=256)
def split_items(text: str) -> frozenset[int]:
    """Numbers of the items whose backward pass is split in a cell's order."""
    return frozenset(action.item for action in read_order(text, 0) if action.kind == "W")


def read_orders(items: Sequence[StageItems], orders: PlanOrders) -> Schedule:
    """The schedule that a plan's orders make of its items. Raises BadUsage."""
    if list(map(len, orders)) != list(map(len, items)):
        raise BadUsage(
            f"orders are given for {list(map(len, orders))} cells of the stages, which have {list(map(len, items))}: "
            f"give one for each cell"
        )
    return Schedule(
        items=tuple(items),
        orders=tuple(tuple(read_order(text, stage) for text in cells) for stage, cells in enumerate(orders)),
    )


def write_orders(schedule: Schedule) -> PlanOrders:
    """As a plan writes them."""
    return tuple(
        tuple(" ".join(f"{action.kind}{action.item}" for action in order) for order in cells)
        for cells in schedule.orders
    )


def check_orders(items: Sequence[StageItems], orders: PlanOrders, limits: Sequence[Limit] | None = None) -> None:
    """Raise BadUsage, or Deadlock, in a sentence, unless the runtime can carry a plan's orders out.

    Args:
        items: Of the plan.
        orders: Of the plan, not empty.
        limits: Memory of every stage; without it, memory is not looked at.
    """
    schedule = read_orders(items, orders)
    check_reading(schedule)
    check_schedule(schedule, limits)
    Program(schedule).check_joined()


def check_reading(schedule: Schedule) -> None:
    """Raise BadUsage, in a sentence, unless all cells run their forward passes in the order of their items."""
    for stage, cell in schedule.cells():
        _check_reading(schedule, stage, cell)


def _check_reading(schedule: Schedule, stage: int, cell: int) -> None:
    numbers = [item.number for item in schedule.items[stage][cell]]
    ran = [action.item for action in schedule.orders[stage][cell] if action.kind == "F"]
    if ran != numbers:
        place = next((i for i, pair in enumerate(zip(ran, numbers, strict=False)) if pair[0] != pair[1]), len(ran))
        raise BadUsage(
            f"stage {stage}, cell {cell}: forward passes are of items {ran[place : place + 4]} where the cell has "
            f"{numbers[place : place + 4]}: list them in the order of its items"
        )
