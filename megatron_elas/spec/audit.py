"""Audits: what workers write down of their steps, so that two runs can be compared without running them again.

Every worker has a file ``audit.WORKER.jsonl`` in its job's log folder. Its lines are JSON objects:

* ``{"audit": 2, "run": ..., "worker": ..., "every": ..., "kinds": [...]}`` begins a run;
* ``{"epoch": ..., "stages": [{"layers": [start, stop], "cells": [[worker, ...], ...]}, ...], "tied": [...]}`` begins
  what the worker ran under one plan;
* ``{"epoch": ..., "step": ..., ...}`` is a step, as ``StepLine`` has it. Written when the gradients are reduced, and
  before any worker can know their norm: so all workers' lines of a step that counts are there, also of the lost ones.

Each line ends with ``"chain"``, the digest of the line and of the chain before it; the first line of a run begins a new
chain. Of a step that was run again the run in the highest epoch counts, and what was run after it before is void.

A tensor's values are told as checksums of ranges of its elements (``range_size``) that add up, modulo 2**64, however
the ranges were cut and whoever had the parts. Beside them are sums of the values of ranges (``signed_size``) under
random signs (``runtime/verification/sketch.py``): they tell how far apart two tensors are that differ, and nothing of
equality.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

AUDIT_FORMAT = 2
RANGES = 16
"""That a tensor's elements are told in, at most."""
SMALLEST_RANGE = 64
"""Elements."""
STATES = ("parameters", "exp_avg", "exp_avg_sq")
"""Before the step: fp32 masters and moments."""
GRADIENTS = "gradients"
"""Reduced over all cells and not clipped, as the optimizer gets them."""
TENSORS = (*STATES, GRADIENTS)
"""Kinds that are told of ranges of tensors' elements, which add up; of others each is told whole."""
KINDS = ("samples", *STATES, "masks", GRADIENTS, "losses")
"""Of what is told, in the order in which a step makes them."""
ALL_LANES = "all"
_DIGITS = 16
"""Of a checksum, hexadecimal."""
CHAIN_BYTES = 16
_CHAIN_KEY = ', "chain": "'


def audit_file(worker: int) -> str:
    """Name of a worker's file."""
    return f"audit.{worker}.jsonl"


def range_size(count: int) -> int:
    """Elements of each range of a tensor of so many on one lane: a power of two, whoever has the elements."""
    size = SMALLEST_RANGE
    while size * RANGES < count:
        size *= 2
    return size


def signed_size(count: int) -> int:
    """Elements of each range that is told as a signed sum: as many ranges as there may be, however few elements."""
    size = 1
    while size * RANGES < count:
        size *= 2
    return size


def ranges_of(start: int, stop: int, size: int) -> range:
    """Numbers of the ranges of ``size`` elements that these elements are in."""
    return range(start // size, -(-stop // size))


def pack(sums: list[int]) -> str:
    """Checksums as text: 16 hexadecimal digits each."""
    return b"".join(number.to_bytes(_DIGITS // 2) for number in sums).hex()


def unpack(text: str) -> list[int]:
    """What ``pack`` was given. Raises ValueError."""
    if len(text) % _DIGITS:
        raise ValueError(f"{len(text)} digits are no whole number of checksums")
    return [int(text[at : at + _DIGITS], 16) for at in range(0, len(text), _DIGITS)]


def pack_floats(sums: list[float]) -> str:
    """Numbers as text, exact: 16 hexadecimal digits each."""
    return struct.pack(f">{len(sums)}d", *sums).hex()


def unpack_floats(text: str) -> tuple[float, ...]:
    """What ``pack_floats`` was given. Raises ValueError."""
    if len(text) % _DIGITS:
        raise ValueError(f"{len(text)} digits are no whole number of sums")
    return struct.unpack(f">{len(text) // _DIGITS}d", bytes.fromhex(text))


def mask_place(sample: int, layer: int, site: int, lane: int | None) -> str:
    """Where a mask is, as it is written; ``lane`` is None where all lanes have the same."""
    return f"{sample}/{layer}/{site}/{ALL_LANES if lane is None else lane}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSums:
    """Elements ``start`` to ``stop`` of a parameter on the worker's lane, ``count`` being all of that lane."""

    name: str
    start: int
    stop: int
    count: int
    sums: Mapping[str, str]
    """By kind: ``pack`` of the piece's share of every range that it has elements of."""
    signed: Mapping[str, str]
    """By kind: ``pack_floats`` of its share of the signed sum of every range of ``signed_size``."""

    @property
    def first_range(self) -> int:
        """Number of the first range of ``sums``."""
        return self.start // range_size(self.count)

    @property
    def signed_ranges(self) -> range:
        """Numbers of the ranges of ``signed``."""
        return ranges_of(self.start, self.stop, signed_size(self.count))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """What one worker tells of one step."""

    epoch: int
    step: int
    is_end: bool = False
    """Training has ended before this step: only the state is told."""
    ends: tuple[str, ...] = ()
    """For which ends of the pipeline it read samples: ``first``, ``last``."""
    samples: Mapping[str, str] = field(default_factory=dict)
    """Checksum of what was read, by sample id."""
    masks: Mapping[str, str] = field(default_factory=dict)
    """Checksums by ``mask_place``."""
    losses: Mapping[str, str] = field(default_factory=dict)
    """Of the step, over the whole batch, by name: exact, as ``float.hex``."""
    pieces: tuple[PieceSums, ...] = ()
    """Of the worker's shard of gradients and optimizer state."""

    def to_table(self) -> dict[str, Any]:
        """For JSON; what is empty is left out."""
        table: dict[str, Any] = {"epoch": self.epoch, "step": self.step}
        if self.is_end:
            table["end"] = True
        if self.samples:
            table |= {"ends": list(self.ends), "samples": self.samples}
        if self.masks:
            table["masks"] = self.masks
        if self.losses:
            table["losses"] = self.losses
        if self.pieces:
            table["pieces"] = [[own.name, own.start, own.stop, own.count, own.sums, own.signed] for own in self.pieces]
        return table

    @staticmethod
    def from_table(table: Mapping[str, Any]) -> StepLine:
        """What ``to_table`` gave. Raises LookupError, TypeError or ValueError."""
        return StepLine(
            epoch=int(table["epoch"]),
            step=int(table["step"]),
            is_end=bool(table.get("end")),
            ends=tuple(table.get("ends", ())),
            samples=dict(table.get("samples", {})),
            masks=dict(table.get("masks", {})),
            losses=dict(table.get("losses", {})),
            pieces=tuple(
                PieceSums(
                    name=name, start=int(start), stop=int(stop), count=int(count), sums=dict(sums), signed=dict(signed)
                )
                for name, start, stop, count, sums, signed in table.get("pieces", ())
            ),
        )


def link(table: Mapping[str, Any], before: str) -> tuple[str, str]:
    """A line, without its end, and the chain up to it.

    Args:
        table: Of the line.
        before: The chain up to the line before; empty for the first of a run.
    """
    text = json.dumps(table)
    chain = _digest(text, before)
    return f'{text[:-1]}{_CHAIN_KEY}{chain}"}}', chain


def unlink(line: str, before: str) -> tuple[dict[str, Any], str]:
    """The table of a line and the chain up to it.

    Raises:
        ValueError: It is no such line, or does not follow the line that ``before`` stands for.
    """
    text, found, end = line.rpartition(_CHAIN_KEY)
    if not found or not end.endswith('"}'):
        raise ValueError("it has no chain")
    table = json.loads(text + "}")
    begins = "audit" in table
    chain = _digest(text + "}", "" if begins else before)
    if chain != end[:-2]:
        raise ValueError("it was changed, or a line before it is missing")
    return table, chain


def _digest(text: str, before: str) -> str:
    return hashlib.blake2b(f"{before}\n{text}".encode(), digest_size=CHAIN_BYTES).hexdigest()
