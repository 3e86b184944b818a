"""What one worker holds of the job's state, and under which layouts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megatron_elas.runtime.store import ShardStore
from megatron_elas.spec.catalogue import Catalogue
from megatron_elas.spec.plan import ElasticPlan, ModelPart
from megatron_elas.spec.report import Holding


class Fit(NamedTuple):
    """What model, parameter buffers and optimizer of a worker are built for."""

    part: ModelPart
    replicas: tuple[int, ...]

    @staticmethod
    def of(plan: ElasticPlan, worker: int) -> Fit:
        """What the plan asks of a seated worker."""
        seat = plan.placement.seat(worker)
        return Fit(part=plan.part_of(worker), replicas=plan.placement.replicas(seat.stage, seat.lane))


@dataclass(slots=True)
class WorkerState:
    """Mutable; owned by the session, changed by the executor during a recovery."""

    worker: int
    plan: ElasticPlan
    """The plan in force."""
    live: int | None
    """Version of the parameters and the optimizer in use; None while they are being changed."""
    catalogue: Catalogue
    fitted: Fit | None
    """What is built now; None while being rebuilt, and for a spare."""
    stores: dict[int, tuple[ElasticPlan, ShardStore | None]] = field(default_factory=dict)
    """By epoch, newest last: a plan and the copies in its layout (None for a spare)."""
    captures: dict[int, object] = field(default_factory=dict)
    """By version: what the host needs to rewind to it."""
    gathered: int | None = None
    """The version of all parameters in the model, as of the last recovery; None when they may be of several."""

    @property
    def store(self) -> ShardStore:
        """Copies under the plan in force. Raises for a spare."""
        store = self.stores[self.plan.epoch][1]
        assert store is not None, f"worker {self.worker} is a spare in epoch {self.plan.epoch}"
        return store

    def holdings(self) -> tuple[Holding, ...]:
        """Newest layout first. Only the newest complete layout can be the one in use."""
        result = []
        for epoch in sorted(self.stores, reverse=True):
            plan, store = self.stores[epoch]
            if store is None:
                result.append(Holding(epoch=epoch, live=None, kept=(), wards={}))
            else:
                live = self.live if epoch == max(self.stores) else None
                fits = self.fitted is not None and self.fitted.part == plan.part_of(self.worker)
                result.append(replace(store.holding(epoch, live), parameters=self.gathered if fits else None))
        return tuple(result)

    def retire_old_layouts(self) -> None:
        """A step was committed under the plan in force: older layouts are of no use any more."""
        for epoch in [e for e in self.stores if e < self.plan.epoch]:
            del self.stores[epoch]
