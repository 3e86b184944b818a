"""Orders for plans of any items, as tests need them: found greedily, and so that no two cells have the same times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from megatron_elas.schedule.greedy import NO_MATTER, Limit, Taste, greedy
from megatron_elas.schedule.orders import PlanOrders, check_orders, write_orders
from megatron_elas.schedule.routes import Flow
from megatron_elas.schedule.timing import Durations
from megatron_elas.spec.cost import PassTime
from megatron_elas.spec.items import StageItems
from tests.schedule.cases import times

Kind = Literal["whole", "split", "late"]
"""No backward pass is split; all are, weight gradients filling gaps; all are, weight gradients coming last."""


def make_orders(items: Sequence[StageItems], kind: Kind) -> PlanOrders:
    """Orders that the runtime can carry out. Raises BadUsage when none are found."""
    cells = [
        [times(1 + 0.1 * cell, 1 + 0.3 * ((cell + stage) % 3), 1, fixed=0.05 * stage) for cell in range(len(own))]
        for stage, own in enumerate(items)
    ]
    durations = Durations.of(cells, items, [PassTime(sample_s=0.1)] * (len(items) - 1))
    taste = Taste(split=kind != "whole", forward_first=kind != "whole", ahead=NO_MATTER)
    schedule, _ = greedy(Flow(items), durations, [Limit(samples=1e9)] * len(items), [taste] * len(items))
    orders = write_orders(schedule)
    if kind == "late":
        orders = tuple(tuple(_weights_last(text) for text in own) for own in orders)
    check_orders(items, orders)
    return orders


def _weights_last(text: str) -> str:
    words = text.split()
    return " ".join(sorted(words, key=lambda word: word[0] == "W"))


def without_split(orders: PlanOrders) -> PlanOrders:
    """The same orders, every weight gradient where its item's backward pass is."""
    return tuple(tuple(" ".join(w for w in text.split() if w[0] != "W") for text in own) for own in orders)
