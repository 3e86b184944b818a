"""Copies of optimizer shards in host memory.

# P elements of one slot of a shard; a flat shard has 3 P + 1 elements, fp32, on the CPU.

Version ``v`` (the state before step ``v``) lives in buffer ``v mod n`` of ``n``. With two buffers, writing version
``v`` takes the place of ``v - 2``, which nobody needs once step ``v - 1`` is committed. A copy that follows its
owner's updates (see ``snapshots``) has one buffer, in which one version turns into the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron_elas.spec.report import Holding
from megatron_elas.spec.shards import VERSIONS, ShardLayout
from megatron_elas.spec.transaction import Update


class Versions:
    """Buffers for one shard, each complete with a version or not; allocated when first used."""

    def __init__(self, numel: int, count: int = VERSIONS) -> None:
        self._numel = numel
        self._count = count
        self._buffers: list[torch.Tensor | None] = [None] * count
        self._complete: list[int | None] = [None] * count

    def begin(self, version: int) -> torch.Tensor:
        """The buffer to fill with ``version``; what it held is no longer complete."""
        self._complete[version % self._count] = None
        buffer = self._buffers[version % self._count]
        if buffer is None:
            # Not zeroed: memory that is never filled is then never touched.
            buffer = self._buffers[version % self._count] = torch.empty(self._numel, dtype=torch.float32)
        return buffer

    def complete(self, version: int) -> None:
        """The buffer given by ``begin`` now holds all of ``version``."""
        self._complete[version % self._count] = version

    def get(self, version: int) -> torch.Tensor:
        """The complete copy (no copy is made). Raises KeyError."""
        buffer = self._buffers[version % self._count]
        if self._complete[version % self._count] != version or buffer is None:
            raise KeyError(f"version {version} is not held, only {self.held}")
        return buffer

    def release(self) -> None:
        """Hold nothing, and give the memory back."""
        self._buffers = [None] * self._count
        self._complete = [None] * self._count

    @property
    def num_bytes(self) -> int:
        """Host memory of all buffers, whether in use yet or not."""
        return self._count * self._numel * torch.float32.itemsize

    @property
    def held(self) -> tuple[int, ...]:
        """Complete versions, ascending."""
        return tuple(sorted(v for v in self._complete if v is not None))

    def forget_after(self, version: int) -> None:
        """Drop newer versions: they belong to steps that will be run again."""
        self._complete = [v if v is not None and v <= version else None for v in self._complete]


class ShardStore:
    """One worker's copies under one layout: its own shard, and those of the workers it backs up."""

    def __init__(
        self,
        *,
        layout: ShardLayout,
        backups: Sequence[int],
        wards: Mapping[int, ShardLayout],
        versions: int = VERSIONS,
    ) -> None:
        self.layout = layout
        self.backups = tuple(backups)
        """Who keep this worker's copy."""
        self.ward_layouts = dict(sorted(wards.items()))
        self.own = Versions(layout.flat_numel, versions)
        self.wards = {worker: Versions(ward.flat_numel, versions) for worker, ward in sorted(wards.items())}
        self.ready: int | None = None
        """The step whose reduced gradients are in ``gradients``, of the own shard and of all wards."""
        self.update: Update | None = None
        """Of the newest step that this worker was PREPARED for in this layout."""
        self._gradients: dict[int | None, torch.Tensor] = {}

    def gradients(self, ward: int | None = None) -> torch.Tensor:
        """(P,) fp32: room for the reduced gradients of the own shard, or of a ward's; always the same tensor."""
        if ward not in self._gradients:
            layout = self.layout if ward is None else self.ward_layouts[ward]
            self._gradients[ward] = torch.empty(layout.numel, dtype=torch.float32)
        return self._gradients[ward]

    def copy_of(self, owner: int, me: int) -> Versions:
        """The copies of ``owner``'s shard held here."""
        return self.own if owner == me else self.wards[owner]

    def forget_after(self, version: int) -> None:
        """Drop newer versions of everything, and what is known of steps that will be run again."""
        for versions in (self.own, *self.wards.values()):
            versions.forget_after(version)
        if self.update is not None and self.update.step >= version:
            self.update = None
        self.ready = None

    def holding(self, epoch: int, live: int | None) -> Holding:
        """What to report."""
        wards = {worker: versions.held for worker, versions in self.wards.items()}
        return Holding(epoch=epoch, live=live, kept=self.own.held, wards=wards, ready=self.ready, update=self.update)

    @property
    def num_bytes(self) -> int:
        """Host memory of all copies, without gradients on their way."""
        return sum(versions.num_bytes for versions in (self.own, *self.wards.values()))
