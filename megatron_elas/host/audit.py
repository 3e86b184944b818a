"""Writes this worker's part of the audit: hashes of what it read, drew and computed in a step, see ``spec.audit``."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_elas.runtime.random_streams import Draw
from megatron_elas.runtime.verification.checksum import MODULUS, checksum, key_of, range_sums
from megatron_elas.runtime.verification.sketch import signed_sums
from megatron_elas.spec.audit import (
    AUDIT_FORMAT,
    GRADIENTS,
    PieceSums,
    StepLine,
    audit_file,
    link,
    mask_place,
    pack,
    pack_floats,
    range_size,
    ranges_of,
    signed_size,
)
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.line_files import append_line, open_for_lines
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.shards import Piece

logger = logging.getLogger(__name__)

ShardTensors = Iterable[tuple[Piece, int, Mapping[str, torch.Tensor | None]]]
"""Every piece of the shard: its place, the elements of the whole parameter, and its values by kind; None: zeros."""

_KEY = key_of("audit")
_NO_CHECKSUM = "-"
"""Of samples whose contents are not tensors with a row per sample."""


def check_audit(every: int, log_dir: str | None) -> None:
    """Raises BadUsage when steps are to be audited and there is no folder of logs."""
    if every and not log_dir:
        raise BadUsage(
            f"--elastic-audit {every} writes to the folder of elasrun --log-dir, which was not given: give elasrun "
            f"--log-dir DIR, or leave --elastic-audit out"
        )


class Audit:
    """Of one worker. What it cannot write is left out with one warning: training does not need it."""

    def __init__(self, folder: Path, worker: int, every: int, run: str, kinds: Iterable[str], level: str = "") -> None:
        """Nothing is written before the first step.

        Args:
            folder: Of the job's logs.
            worker: Its id.
            every: Steps from one that is told to the next.
            run: The job's id.
            kinds: That are told.
            level: Of the job's consistency, for whoever reads it.
        """
        self._path = folder / audit_file(worker)
        self._worker = worker
        self._every = every
        self._head = {
            "audit": AUDIT_FORMAT,
            "run": run,
            "worker": worker,
            "every": every,
            "kinds": list(kinds),
            "level": level,
        }
        self._descriptor: int | None = None
        self._chain = ""
        self._epoch: int | None = None
        self._failed = False
        self._due = False
        self._samples: dict[str, str] = {}
        self._masks: dict[str, str] = {}

    def begin_step(self, step: int) -> None:
        """A run of the step's passes begins: what was observed before is forgotten."""
        self._due = step % self._every == 0 and not self._failed
        self._samples, self._masks = {}, {}

    def observe_batch(self, samples: Iterable[int], batch: Any) -> None:
        """Samples of an item were read."""
        if self._due:
            samples = tuple(samples)
            sums = _row_sums(batch, len(samples))
            self._samples |= zip(map(str, samples), sums, strict=True)

    def observe_mask(self, draw: Draw, mask: torch.Tensor, recomputing: bool) -> None:
        """A mask was drawn. See ``RandomStreams.observe``."""
        if self._due and not recomputing:
            place = mask_place(draw.sample, draw.layer, draw.site, draw.lane)
            self._masks[place] = f"{checksum(mask.cpu(), _KEY):016x}"

    def write(
        self,
        plan: ElasticPlan,
        step: int,
        shard: ShardTensors,
        losses: Mapping[str, torch.Tensor],
        tied: Iterable[str],
    ) -> None:
        """The gradients of the step are reduced, and nobody knows their norm yet.

        Args:
            plan: In force.
            step: Under way.
            shard: Of this worker.
            losses: Of the step, over the whole batch.
            tied: Parameters of its model that are copies of a tied one.
        """
        if not self._due:
            return
        stage, last = plan.placement.seat(self._worker).stage, plan.placement.num_stages - 1
        line = StepLine(
            epoch=plan.epoch,
            step=step,
            ends=tuple(end for end, is_here in (("first", stage == 0), ("last", stage == last)) if is_here),
            samples=self._samples,
            masks=self._masks,
            losses={name: float(loss).hex() for name, loss in losses.items()},
            pieces=tuple(_sum_up(*entry) for entry in shard),
        )
        self._put(plan, line, tied)
        self._due = False

    def write_end(self, plan: ElasticPlan, step: int, shard: ShardTensors, tied: Iterable[str]) -> None:
        """Training has ended before the step: what it has made is told."""
        if self._failed or plan.placement.find_seat(self._worker) is None:
            return
        pieces = tuple(
            _sum_up(piece, count, {kind: value for kind, value in values.items() if kind != GRADIENTS})
            for piece, count, values in shard
        )
        self._put(plan, StepLine(epoch=plan.epoch, step=step, is_end=True, pieces=pieces), tied)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _put(self, plan: ElasticPlan, line: StepLine, tied: Iterable[str]) -> None:
        try:
            if self._descriptor is None:
                self._descriptor = open_for_lines(self._path)
                self._append(self._head | {"began_s": time.time()})
            if self._epoch != plan.epoch:
                stages = [
                    {"layers": list(layers), "cells": [list(cell.workers) for cell in cells]}
                    for layers, cells in zip(plan.layers, plan.placement.stages, strict=True)
                ]
                self._append({"epoch": plan.epoch, "stages": stages, "tied": sorted(tied)})
                self._epoch = plan.epoch
            self._append(line.to_table())
        except OSError as error:
            self._failed = True
            logger.warning(
                "the audit ends before step %d: %s cannot be written (%s)",
                line.step,
                self._path,
                error.strerror or error,
            )

    def _append(self, table: Mapping[str, Any]) -> None:
        """One line, with one write: it is whole when the worker is killed after it."""
        text, self._chain = link(table, self._chain)
        assert self._descriptor is not None
        append_line(self._descriptor, text.encode())


def _sum_up(piece: Piece, count: int, values: Mapping[str, torch.Tensor | None]) -> PieceSums:
    size, fine_size = range_size(count), signed_size(count)
    ranges, fine = (len(ranges_of(piece.start, piece.stop, each)) for each in (size, fine_size))
    return PieceSums(
        name=piece.name,
        start=piece.start,
        stop=piece.stop,
        count=count,
        sums={
            kind: pack([0] * ranges if value is None else range_sums(value, _KEY, piece.start, size))
            for kind, value in values.items()
        },
        signed={
            kind: pack_floats([0.0] * fine if value is None else signed_sums(value, _KEY, piece.start, fine_size))
            for kind, value in values.items()
        },
    )


def _row_sums(batch: Any, count: int) -> list[str]:
    """One checksum for each sample of a batch: of its tokens, labels and weights, but not of masks of its attention."""
    if not isinstance(batch, Mapping):
        return [_NO_CHECKSUM] * count
    sums = [0] * count
    known = False
    for name, values in sorted(batch.items()):
        if isinstance(values, torch.Tensor) and values.dim() == 2 and len(values) == count:
            known = True
            for row, words in enumerate(values.contiguous().cpu().view(torch.uint8)):
                sums[row] += checksum(words, key_of("sample", name))
    return [f"{total % MODULUS:016x}" if known else _NO_CHECKSUM for total in sums]
