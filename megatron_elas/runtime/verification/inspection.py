"""What a worker finds when it looks at its state before training goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_elas.runtime.verification.checksum import BLOCK, MODULUS, checksum, key_of
from megatron_elas.spec.shards import SLOTS, Piece

UNKNOWN = -1
"""In place of a number that a worker has nothing to say about."""
SLOT_KEYS = tuple(key_of("slot", name) for name in SLOTS)
_CHUNK = 256 * BLOCK
"""Elements that are cast at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceState:
    """One piece of the shard that the optimizer in use owns."""

    piece: Piece
    sums: tuple[int, ...]
    """Checksum of the piece in each slot, at its place in the flat shard; they add up to ``slot_sums``."""
    uncast: int
    """Elements of the piece whose weight is not the master, cast to the weight's type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What counts steps. Equal on all workers at the same step."""

    consumed_samples: int
    """Of all steps before the one that is run next."""
    schedule_samples: int
    """Samples that the learning-rate schedule has seen."""
    loss_scale: int
    """Of the loss scaler's state, as a checksum."""
    optimizer_steps: tuple[int, int]
    """Least and most updates that a part of the optimizer has counted; UNKNOWN twice where this worker owns nothing."""
    streams: int
    """Of the names of the random streams, as a checksum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """One worker's state as it is, by name."""

    parameters: Mapping[str, int]
    """Elements of every parameter that is found in the model itself, and that lies in a buffer."""
    weights: Mapping[str, int]
    """Checksum of every parameter that the buffers were made for."""
    pieces: Sequence[PieceState]
    """In flat order."""
    counters: Counters

    @property
    def slot_sums(self) -> tuple[int, ...]:
        """Checksum of each slot of the shard in use."""
        return tuple(sum(state.sums[slot] for state in self.pieces) % MODULUS for slot in range(len(SLOTS)))


def weight_sums(parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Checksum of each parameter. Keys go by name, so no two parameters can stand for each other."""
    return {name: checksum(value, key_of("weight", name)) for name, value in parameters.items()}


def inspect_piece(piece: Piece, offset: int, slots: Sequence[torch.Tensor | None], weights: torch.Tensor) -> PieceState:
    """Look at one piece.

    Args:
        piece: Which.
        offset: Of the piece inside a slot of the shard.
        slots: Its master and moments as the optimizer has them, flat; None for one that was not made yet (zeros).
        weights: The piece of the parameter in the model, flat.
    """
    sums = tuple(
        0 if values is None else checksum(values, key, offset) for values, key in zip(slots, SLOT_KEYS, strict=True)
    )
    master = slots[0]
    assert master is not None
    return PieceState(piece=piece, sums=sums, uncast=count_uncast(master, weights))


def count_uncast(master: torch.Tensor, weights: torch.Tensor) -> int:
    """Elements of ``weights`` that are not ``master``, cast to their type, bit for bit. Both flat, of equal length."""
    master, weights = master.detach(), weights.detach()
    if master.data_ptr() == weights.data_ptr() and master.dtype == weights.dtype:
        return 0
    bits = torch.int16 if weights.element_size() == 2 else torch.int32
    different = 0
    for kept, used in zip(master.split(_CHUNK), weights.split(_CHUNK), strict=True):
        cast = kept.to(weights.dtype).view(bits)
        if not torch.equal(cast, used.view(bits)):
            different += int((cast != used.view(bits)).sum())
    return different


def flat_sums(flat: torch.Tensor) -> tuple[int, ...]:
    """Checksum of each slot of a flat shard (fp32, 3 P + 1 elements)."""
    return range_sums(flat, 0, (flat.numel() - 1) // len(SLOTS), 0)


def range_sums(flat: torch.Tensor, offset: int, numel: int, position: int) -> tuple[int, ...]:
    """Checksum of a range of each slot of a flat shard.

    Args:
        flat: The shard it is read from, fp32, 3 P + 1 elements.
        offset: Of the range in a slot of ``flat``.
        numel: Of the range.
        position: Where the range stands in the shard that the checksum is of.
    """
    slots = flat[:-1].view(len(SLOTS), -1)
    return tuple(
        checksum(slot[offset : offset + numel], key, position) for slot, key in zip(slots, SLOT_KEYS, strict=True)
    )


def find_piece(inspection: Inspection, flat: torch.Tensor) -> str | None:
    """The first piece where the state in use is not what the flat shard holds; None if there is none."""
    offset = 0
    for state in inspection.pieces:
        if range_sums(flat, offset, state.piece.numel, offset) != state.sums:
            return state.piece.name
        offset += state.piece.numel
    return None
