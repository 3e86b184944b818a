"""Writes down what a worker's dropout masks were: with ELAS_TEST_MASKS, ``masks.W.pt`` at the end of training.

A record has under ``masks`` a checksum for every (step, sample, layer, site, lane), under ``again`` how many of them
were drawn again to recompute activations, and under ``conflicts`` those that were drawn twice and differently.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from typing import Any


class MaskRecorder:
    """Watches the streams of a worker from its first step on."""

    def __init__(self) -> None:
        self.masks: dict[tuple[Any, ...], int] = {}
        self.again = 0
        self.conflicts: list[tuple[Any, ...]] = []

    def watch(self, attached: Any) -> None:
        """Called before every step."""
        if "ELAS_TEST_MASKS" in os.environ and attached.streams is not None:
            attached.streams.observe = self._note

    def record(self) -> dict[str, Any]:
        """What was seen."""
        return {"masks": self.masks, "again": self.again, "conflicts": self.conflicts}

    def _note(self, draw: Any, mask: Any, recomputing: bool) -> None:
        found = zlib.crc32(mask.numpy().tobytes())
        if self.masks.setdefault(tuple(draw), found) != found:
            self.conflicts.append(tuple(draw))
        self.again += recomputing


def merge(records: Mapping[int, Mapping[str, Any]]) -> dict[tuple[Any, ...], int]:
    """The masks of all workers. Asserts that no two of them differ."""
    merged: dict[tuple[Any, ...], int] = {}
    for worker, record in records.items():
        assert record["conflicts"] == [], f"worker {worker} drew masks anew: {record['conflicts'][:5]}"
        for draw, mask in record["masks"].items():
            assert merged.setdefault(draw, mask) == mask, f"worker {worker} drew another mask for {draw}"
    return merged
