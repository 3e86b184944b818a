"""One worker's part in taking the optimizer state from one plan's layout into another's.

``prepare`` says which copies can stay; ``run`` brings the rest, on the main thread or beside a step: it reads what the
old layout has and fills what only the new one uses, so the old layout stays whole, however it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_elas.runtime.migration import apply_moves
from megatron_elas.runtime.store import ShardStore
from megatron_elas.runtime.streaming import Arrivals
from megatron_elas.runtime.transport.base import Transport
from megatron_elas.runtime.verification.rows import Sums
from megatron_elas.spec.catalogue import Catalogue
from megatron_elas.spec.moves import Move
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.remap import keeps_shard, plan_remap


@dataclass(slots=True, kw_only=True)
class Restoring:
    """Of the state before step ``version``."""

    worker: int
    version: int
    catalogue: Catalogue
    base_plan: ElasticPlan
    base: ShardStore | None
    """Copies in the base plan's layout; None for a worker that was a spare."""
    plan: ElasticPlan
    store: ShardStore | None
    """Copies in the new layout; may share some with ``base``, or be it. None for a worker that is a spare."""
    holders: Mapping[int, int]
    """For each owner of the base plan, who has its shard now."""
    reader: Callable[[torch.Tensor], None] | None
    """Copies the own shard, which is of ``version``; None when it is kept already."""
    transport: Transport
    arrivals: Arrivals | None = None
    """What was streamed here before, in a migration that does so; checksums are all that is sent then."""
    moves: Sequence[Move] | None = None
    """All that lead from one layout to the other, where that is known already."""
    moved_bytes: int = 0
    """Sent to others."""
    sent: Sums | None = None
    """Checksums of what came, from those who sent it; None when nothing was to come."""

    def run(self) -> None:
        """Complete the own shard in ``store``, and send others what is held here for them. Called by all workers.

        Raises:
            EpochChanged, PeerLost: Cut short; ``store`` may be part-filled.
        """
        base, store, version = self.base, self.store, self.version
        if self.reader is not None:  # first: a second loss may need it
            assert base is not None
            self.reader(base.own.begin(version))
            base.own.complete(version)
            self.reader = None  # it holds the optimizer that was in use
        moves = self.moves
        if moves is None:
            moves = plan_remap(self.catalogue, self.base_plan, self.plan, self.holders)
        sources = {}
        if base is not None:
            held = (owner for owner, holder in self.holders.items() if holder == self.worker)
            sources = {owner: base.copy_of(owner, self.worker).get(version) for owner in held}
        target = None
        if store is not None and version not in store.own.held:
            target = store.own.begin(version)
            target[-1] = 0  # stays where there is nothing to own but padding
        self.moved_bytes, sent = apply_moves(moves, self.worker, sources, target, self.transport, self.arrivals)
        if target is not None:
            self.sent = sent
        if store is not None:
            store.own.complete(version)


def make_store(catalogue: Catalogue, plan: ElasticPlan, worker: int, versions: int) -> ShardStore:
    """Empty copies for a seated worker's own shard and its wards' under the plan."""
    return ShardStore(
        layout=catalogue.layout(plan, worker),
        backups=plan.backups_of(worker),
        wards={ward: catalogue.layout(plan, ward) for ward in plan.wards_of(worker)},
        versions=versions,
    )


def take_over(
    catalogue: Catalogue,
    base_plan: ElasticPlan,
    base: ShardStore | None,
    plan: ElasticPlan,
    worker: int,
    versions: int,
) -> ShardStore | None:
    """The store under the new plan, with those copies that are the same as under the old one; the old one itself
    if all are; None for a spare.
    """
    if plan.placement.find_seat(worker) is None:
        return None
    store = make_store(catalogue, plan, worker, versions)
    if base is None:
        return store
    kept = [owner for owner in (worker, *store.wards) if keeps_shard(catalogue, base_plan, plan, owner)]
    if worker in kept and kept[1:] == list(base.wards) == list(store.wards) and base.backups == store.backups:
        return base
    for owner in kept:
        if owner == worker:
            store.own = base.own
        elif owner in base.wards:
            store.wards[owner] = base.wards[owner]
    return store
