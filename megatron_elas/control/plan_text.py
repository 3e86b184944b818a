"""Plans as they are in messages: what several stages are dealt alike is said once.

At 100,000 workers the items of all stages make tens of megabytes, for which most stages have the same. What is read has
one object for these as well, so that a worker holds and looks at few items, too.
"""

from __future__ import annotations

import msgspec

from megatron_elas.spec.items import StageItems
from megatron_elas.spec.layout import Placement
from megatron_elas.spec.plan import ElasticPlan


class PlanText(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields are those of ``ElasticPlan``, but for items and orders."""

    epoch: int
    placement: Placement
    layers: tuple[tuple[int, int], ...]
    deals: tuple[StageItems, ...]
    """All different: ``deals[deal][cell]``."""
    items: tuple[int, ...]
    """Which deal every stage has."""
    backups: tuple[tuple[int, int], ...]
    warmups: tuple[int, ...] = ()
    cells: tuple[str, ...] = ()
    """Orders of cells, all different."""
    orders: tuple[tuple[int, ...], ...] = ()
    """Which of them every cell of every stage has."""
    predicted_s: float | None = None
    over_memory: bool = False


def pack_plan(plan: ElasticPlan) -> PlanText:
    """The plan as it is sent."""
    deals: list[StageItems] = []
    items = []
    for own in plan.items:
        if own not in deals:
            deals.append(own)
        items.append(deals.index(own))
    texts = dict.fromkeys(text for own in plan.orders for text in own)
    number = {text: at for at, text in enumerate(texts)}
    return PlanText(
        epoch=plan.epoch,
        placement=plan.placement,
        layers=plan.layers,
        deals=tuple(deals),
        items=tuple(items),
        backups=plan.backups,
        warmups=plan.warmups,
        cells=tuple(texts),
        orders=tuple([tuple([number[text] for text in own]) for own in plan.orders]),
        predicted_s=plan.predicted_s,
        over_memory=plan.over_memory,
    )


def unpack_plan(text: PlanText) -> ElasticPlan:
    """The plan that was sent. Raises ValueError when a stage has a deal, or a cell an order, that is not there."""
    if not all(0 <= deal < len(text.deals) for deal in text.items):
        raise ValueError(f"stages have the deals {list(text.items)}, and there are {len(text.deals)}")
    if not all(0 <= order < len(text.cells) for own in text.orders for order in own):
        raise ValueError(f"cells have the orders {list(map(list, text.orders))}, and there are {len(text.cells)}")
    return ElasticPlan(
        epoch=text.epoch,
        placement=text.placement,
        layers=text.layers,
        items=tuple([text.deals[deal] for deal in text.items]),
        backups=text.backups,
        warmups=text.warmups,
        orders=tuple([tuple([text.cells[order] for order in own]) for own in text.orders]),
        predicted_s=text.predicted_s,
        over_memory=text.over_memory,
    )
