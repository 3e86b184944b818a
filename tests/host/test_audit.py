"""What a worker writes for an audit, and what it does when it cannot."""

from __future__ import annotations

import json
import logging
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_elas.host.audit import Audit
from megatron_elas.runtime.random_streams import Draw
from megatron_elas.spec.audit import KINDS
from megatron_elas.spec.layout import Cell, Placement
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.shards import Piece

ALONE = ElasticPlan(
    epoch=0,
    placement=Placement(stages=((Cell(row=0, workers=(0,)),),), spares=(1,)),
    layers=((0, 1),),
    items=(),
    backups=(),
)


def lines_of(folder: Path, worker: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"audit.{worker}.jsonl").read_text().splitlines()]


def test_a_line_says_what_the_last_run_of_the_passes_read_and_drew(tmp_path: Path) -> None:
    audit = Audit(tmp_path, 0, 2, "job", KINDS)
    mask = torch.tensor([True, False])
    for step in (0, 1, 2):
        for tokens in (torch.ones(2, 4), torch.full((2, 4), step)):  # the passes are run again
            audit.begin_step(step)
            audit.observe_batch([2 * step, 2 * step + 1], {"tokens": tokens, "attention_mask": torch.ones(2, 1, 4, 4)})
            audit.observe_mask(Draw(step, 2 * step, 1, 0, None), mask, False)
            audit.observe_mask(Draw(step, 2 * step, 1, 0, None), ~mask, True)
        shard = [(Piece(name="w", start=0, stop=3), 3, {"parameters": torch.ones(3), "exp_avg": None})]
        audit.write(ALONE, step, shard, {"lm loss": torch.tensor(0.5)}, [])
        audit.write(ALONE, step, shard, {}, [])  # told already
    audit.close()
    head, epoch, first, last = lines_of(tmp_path)
    assert (head["run"], head["every"], epoch["stages"]) == ("job", 2, [{"layers": [0, 1], "cells": [[0]]}])
    assert (first["step"], last["step"], first["ends"]) == (0, 2, ["first", "last"])
    assert list(last["samples"]) == ["4", "5"] and last["samples"]["4"] == last["samples"]["5"]
    assert last["samples"]["4"] != first["samples"]["0"] == "0" * 16
    assert first["masks"].keys() == {"0/1/0/all"} and first["masks"]["0/1/0/all"] == last["masks"]["4/1/0/all"]
    assert first["losses"] == {"lm loss": (0.5).hex()}
    [[name, start, stop, count, sums, signed]] = first["pieces"]
    assert [abs(value) for value in struct.unpack(">3d", bytes.fromhex(signed["parameters"]))] == [1.0, 1.0, 1.0]
    assert signed["exp_avg"] == "0" * 48
    assert (name, start, stop, count) == ("w", 0, 3, 3) and sums["exp_avg"] == "0" * 16 != sums["parameters"]


def test_samples_that_are_no_table_of_tensors_are_told_by_their_ids(tmp_path: Path) -> None:
    audit = Audit(tmp_path, 0, 1, "job", KINDS)
    audit.begin_step(0)
    audit.observe_batch([0], [torch.ones(1, 4)])
    audit.observe_batch([1], {"tokens": "text"})
    audit.write(ALONE, 0, [], {}, [])
    assert lines_of(tmp_path)[-1]["samples"] == {"0": "-", "1": "-"}


def test_an_audit_that_cannot_be_written_ends_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    audit = Audit(tmp_path / "gone", 0, 1, "job", KINDS)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            audit.begin_step(step)
            audit.write(ALONE, step, [], {}, [])
        audit.write_end(ALONE, 3, [], [])
    file = tmp_path / "gone" / "audit.0.jsonl"
    assert [record.message for record in caplog.records] == [
        f"the audit ends before step 0: {file} cannot be written (No such file or directory)"
    ]


def test_a_spare_does_not_tell_the_end(tmp_path: Path) -> None:
    Audit(tmp_path, 1, 1, "job", KINDS).write_end(ALONE, 3, [], [])
    assert not list(tmp_path.iterdir())
