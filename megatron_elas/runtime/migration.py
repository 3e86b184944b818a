"""Carries out the moves of optimizer state between workers, straight into place.

# P_old, P_new elements of one slot of the old and the new shard; flat shards are 3 P + 1, fp32, CPU.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from megatron_elas.runtime.channels import MIGRATION
from megatron_elas.runtime.communicator.buffers import as_bytes
from megatron_elas.runtime.streaming import Arrivals
from megatron_elas.runtime.transport.base import Part, Transport
from megatron_elas.runtime.verification.checksum import MODULUS
from megatron_elas.runtime.verification.inspection import range_sums
from megatron_elas.spec.moves import Move
from megatron_elas.spec.shards import SLOTS

_SUMS = struct.Struct(f"<{len(SLOTS)}Q")
_NOTHING = (0,) * len(SLOTS)


def apply_moves(
    moves: Sequence[Move],
    me: int,
    sources: dict[int, torch.Tensor],
    target: torch.Tensor | None,
    transport: Transport,
    arrivals: Arrivals | None = None,
) -> tuple[int, tuple[int, ...]]:
    """Fill this worker's new shard, and send others what is held here for them. Called by every holder and owner.

    With its first move a target gets the step count too.

    Args:
        moves: All moves, in the same order on every worker.
        me: Own worker id.
        sources: Flat old shard of every owner whose copy is held here, by owner.
        target: Own new flat shard, filled in place; None for a worker that gets none.
        transport: Links to the others.
        arrivals: What was streamed to this worker before; all other workers have theirs then, and checksums are all
            that is sent.

    Returns:
        Bytes sent to other workers, and the checksum of each slot of the new shard as the sources have it: what
        others send comes with theirs.

    Raises:
        EpochChanged: Another membership change struck; ``target`` is part-filled.
    """
    sends: list[Part] = []
    receives: list[Part] = []
    begun: set[int] = set()
    told: dict[int, list[int]] = {}
    """Checksums of what goes to each target, by slot."""
    heard: dict[int, bytearray] = {}
    """Those that come from each source."""
    for move in moves:
        is_first = move.target not in begun
        begun.add(move.target)
        read = _cut(sources[move.owner], move.old_offset, move.numel, is_first) if move.source == me else []
        if move.source == me:
            sums = range_sums(sources[move.owner], move.old_offset, move.numel, move.new_offset)
            told[move.target] = [(a + b) % MODULUS for a, b in zip(told.get(move.target, _NOTHING), sums, strict=True)]
        elif move.target == me:
            heard.setdefault(move.source, bytearray(_SUMS.size))
        written: list[torch.Tensor] = []
        if move.target == me:
            assert target is not None
            written = _cut(target, move.new_offset, move.numel, is_first)
        if move.source == me and move.target == me:
            for old, new in zip(read, written, strict=True):
                new.copy_(old)
        elif arrivals is not None:
            if move.target == me:
                assert target is not None
                arrivals.write(move, target, with_step=is_first)
        else:
            sends += [Part(move.target, as_bytes(old)) for old in read]
            receives += [Part(move.source, as_bytes(new)) for new in written]
    moved_bytes = sum(part.buffer.nbytes for part in sends)
    sends += [Part(peer, memoryview(_SUMS.pack(*sums))) for peer, sums in told.items() if peer != me]
    receives += [Part(peer, memoryview(buffer)) for peer, buffer in heard.items()]
    transport.exchange(MIGRATION, 0, sends, receives)
    total = list(told.get(me, _NOTHING))
    for buffer in heard.values():
        total = [(a + b) % MODULUS for a, b in zip(total, _SUMS.unpack(buffer), strict=True)]
    return moved_bytes, tuple(total)


def _cut(flat: torch.Tensor, offset: int, numel: int, with_step: bool) -> list[torch.Tensor]:
    """Views of a range of every slot of a flat shard, and of the step at its end if asked for."""
    slots = [slot[offset : offset + numel] for slot in flat[:-1].view(len(SLOTS), -1).unbind(0)]
    return [*slots, flat[-1:]] if with_step else slots
