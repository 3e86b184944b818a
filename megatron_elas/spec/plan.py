"""The plan: one frozen value per epoch that says who does what.

The planner makes it, the controller sends it, the workers carry it out; nobody else decides.

Invariants: every sample of the global batch is run exactly once per stage; every layer is on one stage, and
stages follow one another; nobody is a backup of itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_elas.spec.items import CellItems, StageItems
from megatron_elas.spec.layout import Placement
from megatron_elas.spec.transaction import Update


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """What a worker's model is of the whole: equal parts have the same parameters, in the same order."""

    layers: tuple[int, int]
    """Transformer layers ``[start, stop)``, from 0."""
    is_first: bool
    """Has the embedding."""
    is_last: bool
    """Has the final norm and the head."""
    lane: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticPlan:
    """Who sits where, which samples each cell runs and in which items, who keeps whose copy."""

    epoch: int
    placement: Placement
    layers: tuple[tuple[int, int], ...]
    """``layers[stage]``: transformer layers ``[start, stop)`` of the stage, numbered from 0 over the whole model. The
    first stage has the embedding as well, the last one the final norm and the head."""
    items: tuple[StageItems, ...]
    """``items[stage][cell]``: what the cell runs in a step, in order, ascending by first sample."""
    backups: tuple[tuple[int, int], ...]
    """Pairs (owner, backup) by ascending owner; of one owner's backups the nearest one first."""
    warmups: tuple[int, ...] = ()
    """``warmups[stage]``: forward passes of every cell of the stage before forward and backward take turns. Empty:
    those of ``schedule.one_f_one_b.stock_warmup``."""
    orders: tuple[tuple[str, ...], ...] = ()
    """``orders[stage][cell]``: passes of the cell in the order in which it runs them, as ``F0 F1 B0 W0`` with the
    numbers of its items: forward, backward, weight gradients. An item that has a ``W`` has a split backward: its ``B``
    gives the gradient of the input only. Empty: 1F1B with ``warmups``."""
    predicted_s: float | None = None
    """Seconds that a step takes by the costs that the plan was made with; None: they were not known."""
    over_memory: bool = False
    """By these costs the plan does not fit the devices' memory, and no other one was found that does."""

    def describe(self) -> str:
        """Who is where, and with which layers, in a line for people."""
        return self.placement.describe(self.layers)

    def items_of(self, worker: int) -> CellItems:
        """What the worker's cell runs in one step."""
        seat = self.placement.seat(worker)
        return self.items[seat.stage][seat.cell]

    def layers_of(self, worker: int) -> tuple[int, int]:
        """Transformer layers ``[start, stop)`` that the worker's stage holds."""
        return self.layers[self.placement.seat(worker).stage]

    def part_of(self, worker: int) -> ModelPart:
        """What the model of a seated worker holds."""
        seat = self.placement.seat(worker)
        return ModelPart(
            layers=self.layers[seat.stage],
            is_first=seat.stage == 0,
            is_last=seat.stage == self.placement.num_stages - 1,
            lane=seat.lane,
        )

    def backups_of(self, worker: int) -> tuple[int, ...]:
        """Who keeps copies of the worker's shard, nearest first."""
        return tuple(backup for owner, backup in self.backups if owner == worker)

    def backup_of(self, worker: int) -> int | None:
        """Who keeps the first copy of the worker's shard; None when nobody does."""
        return next(iter(self.backups_of(worker)), None)

    def wards_of(self, worker: int) -> tuple[int, ...]:
        """Whose copies the worker keeps, ascending."""
        return tuple(sorted(owner for owner, backup in self.backups if backup == worker))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """Where the survivors agreed to go on."""

    base_epoch: int
    """Epoch of the plan in whose layout the state is found; its owners and backups hold it."""
    resume_step: int
    """The step that is run next, from the state before it; every survivor has that state."""
    lead_activity: int
    """The most joint activities any survivor's loop has completed. The others do not repeat those."""
    waived_activity: int = -1
    """The newest joint activity that failed somewhere and that nobody runs again; -1: none."""
    holders: tuple[tuple[int, int], ...] = ()
    """For every lost worker of the base plan, who has the copy of its shard that is used."""
    commit: Update | None = None
    """The step before ``resume_step``, if it was open: those who have not applied it yet do so."""
    checkpoint: int | None = None
    """Iteration of the checkpoint that all get the state from, laid out as the plan says; None: from themselves."""
    parameters_whole: bool = False
    """Whether all survivors with a seat in the base plan have all parameters of ``resume_step`` in their models: those
    that keep their layers can begin the step before the optimizer state is in its new places."""
