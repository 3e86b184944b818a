"""Which slices of which parameters a worker's optimizer shard holds, by name.

A shard is kept as one flat fp32 buffer, slot by slot::

    master of all pieces | exp_avg of all pieces | exp_avg_sq of all pieces | step

so with ``n`` elements in the pieces, slot ``k`` of a piece at offset ``o`` starts at ``k * n + o``.
"""

from __future__ import annotations

from dataclasses import dataclass

SLOTS = ("master", "exp_avg", "exp_avg_sq")
VERSIONS = 2
"""Of each copy that are kept: the newest, and the one before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements ``start`` to ``stop`` of a parameter, flattened row by row."""

    name: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements in the piece."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """The pieces of one worker, in the order of its flat buffer."""

    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        """Elements of one slot."""
        return sum(piece.numel for piece in self.pieces)

    @property
    def flat_numel(self) -> int:
        """Elements of the flat buffer."""
        return len(SLOTS) * self.numel + 1

    def offsets(self) -> tuple[int, ...]:
        """Offset of every piece inside a slot."""
        offsets = []
        position = 0
        for piece in self.pieces:
            offsets.append(position)
            position += piece.numel
        return tuple(offsets)
