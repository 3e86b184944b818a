"""Copies of optimizer shards in host memory, two versions each.

# P elements of one slot of a shard; a flat shard has 3 P + 1 elements, fp32, on the CPU.

Version ``v`` (the state before step ``v``) lives in buffer ``v mod 2``, so writing version ``v``
takes the place of ``v - 2``, which nobody needs once step ``v - 1`` is committed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_elas.spec.report import Holding
from megatron_elas.spec.shards import VERSIONS, ShardLayout


class Versions:
    """Two preallocated buffers for one shard, each complete with a version or not."""

    def __init__(self, numel: int) -> None:
        # Not zeroed: a recovery makes these, and memory that is never filled is then never touched.
        self._buffers = [torch.empty(numel, dtype=torch.float32) for _ in range(VERSIONS)]
        self._complete: list[int | None] = [None] * VERSIONS

    def begin(self, version: int) -> torch.Tensor:
        """The buffer to fill with ``version``; what it held is no longer complete."""
        self._complete[version % VERSIONS] = None
        return self._buffers[version % VERSIONS]

    def complete(self, version: int) -> None:
        """The buffer given by ``begin`` now holds all of ``version``."""
        self._complete[version % VERSIONS] = version

    def get(self, version: int) -> torch.Tensor:
        """The complete copy (no copy is made). Raises KeyError."""
        if self._complete[version % VERSIONS] != version:
            raise KeyError(f"version {version} is not held, only {self.held}")
        return self._buffers[version % VERSIONS]

    @property
    def num_bytes(self) -> int:
        """Host memory of both buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers)

    @property
    def held(self) -> tuple[int, ...]:
        """Complete versions, ascending."""
        return tuple(sorted(v for v in self._complete if v is not None))

    def forget_after(self, version: int) -> None:
        """Drop newer versions: they belong to steps that will be run again."""
        self._complete = [v if v is not None and v <= version else None for v in self._complete]


class ShardStore:
    """One worker's copies under one layout: its own shard, and those of the workers it backs up."""

    def __init__(self, *, layout: ShardLayout, backup: int | None, wards: Mapping[int, ShardLayout]) -> None:
        self.layout = layout
        self.backup = backup
        """Who keeps this worker's copy."""
        self.own = Versions(layout.flat_numel)
        self.wards = {worker: Versions(ward.flat_numel) for worker, ward in sorted(wards.items())}

    def copy_of(self, owner: int, me: int) -> Versions:
        """The copies of ``owner``'s shard held here."""
        return self.own if owner == me else self.wards[owner]

    def forget_after(self, version: int) -> None:
        """Drop newer versions of everything."""
        for versions in (self.own, *self.wards.values()):
            versions.forget_after(version)

    def holding(self, epoch: int, live: int | None) -> Holding:
        """What to report."""
        wards = {worker: versions.held for worker, versions in self.wards.items()}
        return Holding(epoch=epoch, live=live, kept=self.own.held, wards=wards)

    @property
    def num_bytes(self) -> int:
        """Host memory of all buffers."""
        return sum(versions.num_bytes for versions in (self.own, *self.wards.values()))
