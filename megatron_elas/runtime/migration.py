"""Carries out the moves of optimizer state between workers, straight into place.

# P_old, P_new elements of one slot of the old and the new shard; flat shards are 3 P + 1, fp32, CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_elas.runtime.channels import MIGRATION
from megatron_elas.runtime.communicator.buffers import as_bytes
from megatron_elas.runtime.transport.base import Part, Transport
from megatron_elas.spec.moves import Move
from megatron_elas.spec.shards import SLOTS


def apply_moves(
    moves: Sequence[Move],
    me: int,
    sources: dict[int, torch.Tensor],
    target: torch.Tensor | None,
    transport: Transport,
) -> int:
    """Fill this worker's new shard, and send others what is held here for them. Called by every holder and owner.

    Args:
        moves: All moves of the stage and lane, in the same order on every worker.
        me: Own worker id.
        sources: Flat old shard of every owner whose copy is held here, by owner.
        target: Own new flat shard, filled in place; None for a worker that gets none.
        transport: Links to the others.

    Returns:
        Bytes sent to other workers.

    Raises:
        EpochChanged: Another membership change struck; ``target`` is part-filled.
    """
    sends: list[Part] = []
    receives: list[Part] = []
    for move in moves:
        if move.source == me and move.target == me:
            assert target is not None
            for old, new in zip(_slots(sources[move.owner]), _slots(target), strict=True):
                new[move.new_offset :][: move.numel].copy_(old[move.old_offset :][: move.numel])
        elif move.source == me:
            for old in _slots(sources[move.owner]):
                sends.append(Part(move.target, as_bytes(old[move.old_offset :][: move.numel])))
        elif move.target == me:
            assert target is not None
            for new in _slots(target):
                receives.append(Part(move.source, as_bytes(new[move.new_offset :][: move.numel])))
    transport.exchange(MIGRATION, 0, sends, receives)
    return sum(part.buffer.nbytes for part in sends)


def _slots(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of the slots of a flat shard, without the step at its end."""
    return flat[:-1].view(len(SLOTS), -1).unbind(0)
