"""What every cell runs in one step, in which order: the value that all of ``schedule`` is about.

Actions are written ``2F0``: stage 2, forward, item 0. ``B`` is backward; where the cell also lists the item's ``W``,
backward is split, ``B`` gives the input's gradient only and ``W`` the weights' gradients later.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.items import StageItems

Kind = Literal["F", "B", "W"]


class Action(NamedTuple):
    """One pass of one item on its cell."""

    stage: int
    kind: Kind
    item: int
    """The item's number, unique within the stage."""

    def __str__(self) -> str:
        """As in ``2F0``."""
        return f"{self.stage}{self.kind}{self.item}"

    @staticmethod
    def parse(text: str) -> Action:
        """The action that is written so. Raises BadUsage."""
        found = re.fullmatch(r"(\d+)([FBW])(\d+)", text)
        if found is None:
            raise BadUsage(f"{text!r} is no action: write a stage, F, B or W, and an item, such as 2F0")
        return Action(int(found[1]), cast(Kind, found[2]), int(found[3]))


Order = tuple[Action, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One step of all cells."""

    items: tuple[StageItems, ...]
    """``items[stage][cell]``, in the order of their forward passes."""
    orders: tuple[tuple[Order, ...], ...]
    """``orders[stage][cell]``: what the cell runs, one after the other."""

    @property
    def num_stages(self) -> int:
        """Pipeline depth."""
        return len(self.items)

    @property
    def num_actions(self) -> int:
        """Of all cells."""
        return sum(len(order) for stage in self.orders for order in stage)

    def cells(self) -> Iterator[tuple[int, int]]:
        """Every (stage, cell), in order."""
        for stage, cells in enumerate(self.items):
            for cell in range(len(cells)):
                yield stage, cell

    def forwards_first(self, stage: int, cell: int) -> int:
        """Forward passes before the cell's first backward pass."""
        order = self.orders[stage][cell]
        return next((i for i, action in enumerate(order) if action.kind != "F"), len(order))

    def is_split(self, stage: int, cell: int) -> bool:
        """Whether any item's backward is split there."""
        return any(action.kind == "W" for action in self.orders[stage][cell])


def parse_order(text: str) -> Order:
    """The order that is written as actions with spaces between them. Raises BadUsage."""
    return tuple(Action.parse(word) for word in text.split())


def format_order(order: Order) -> str:
    """As in ``0F0 0F1 0B0 0B1``."""
    return " ".join(map(str, order))
