"""Layers move ten times in one process tree, and what it costs does not grow."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fault.migrations import (
    Job,
    assert_layers_once,
    assert_nothing_stale,
    assert_same_bits,
    assert_same_training,
    events,
    splits,
)
from tests.fault.runs import Run
from tests.fault.warm_launcher import WarmLauncher

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]

GRID = Job(layers=(4, 3), data=2, steps=100)
CHAIN = Job(layers=(3, 2, 2), steps=100)
TEN = {
    "two-stages-of-two": (GRID, ((3, 4), (4, 3)) * 5),
    "three-stages": (CHAIN, ((2, 3, 2), (3, 2, 2)) * 5),
}
RSS_TOLERANCE_BYTES = 8 << 20
"""From a migration to the next but one, which has the same layers: the allocator's, for copies on their way."""
RSS_TOTAL_BYTES = 12 << 20
"""From the second migration to the last."""


def assert_flat(run: Run, epochs: int) -> None:
    """Every second epoch has the same layers, so each worker costs what it cost two epochs before."""
    walks = [run.records(f"walk.{epoch}") for epoch in range(epochs + 1)]
    for worker in walks[0]:
        own = [walk[worker] for walk in walks]
        for before, now in zip(own[1:], own[3:], strict=False):
            assert_no_growth(before, now, f"worker {worker}, epoch {now['epoch']}")
        growth = own[-1]["rss"] - own[2]["rss"]
        assert growth <= RSS_TOTAL_BYTES, f"worker {worker}: {growth / 2**20:.1f} MiB more at the end"
        for old, new in zip(own[1]["ancestors"], own[-1]["ancestors"], strict=True):
            assert (old["pid"], old["threads"]) == (new["pid"], new["threads"])
            assert new["fds"] <= old["fds"] and new["rss"] <= old["rss"] + (4 << 20), (old, new)


def assert_no_growth(before: dict[str, Any], now: dict[str, Any], where: str) -> None:
    """Compare a worker's costs under two plans with the same layers."""
    for same in ("pid", "groups", "c10d", "children", "threads", "os_threads"):
        assert now[same] == before[same], (where, same)
    assert now["fds"] - now["links"] == before["fds"] - before["links"], (where, "descriptors that are no links")
    assert now["links"] <= now["most_links"], where
    for kind, count in now["objects"].items():
        if kind not in ("all", "Link", "socket", "frame", "traceback"):
            assert count <= before["objects"][kind], (where, kind, before["objects"][kind], count)
    assert now["objects"]["all"] <= before["objects"]["all"] * 1.02 + 200, where
    assert now["tensor_bytes"] <= before["tensor_bytes"] * 1.02, where
    growth = now["rss"] - before["rss"]
    assert growth <= RSS_TOLERANCE_BYTES, f"{where}: {growth / 2**20:.1f} MiB more"


def assert_flat_within_epochs(run: Run) -> None:
    """Steps between a migration's end and the next one's begin open and keep nothing."""
    for worker, record in run.records("final").items():
        last = [list(steps)[-1] for _, steps in itertools.groupby(record["footprints"], lambda step: step["epoch"])]
        for before, now in zip(last[1:], last[3:], strict=False):
            for what in ("groups", "c10d", "threads", "os_threads", "children"):
                assert now[what] == before[what], f"worker {worker}, step {now['step']}: {what}"
            assert now["fds"] - now["links"] == before["fds"] - before["links"], f"worker {worker}, step {now['step']}"


@pytest.mark.parametrize("mode", ["async", "blocking"])
@pytest.mark.parametrize("name", TEN)
def test_ten_migrations_leave_nothing_behind(
    name: str, mode: str, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    job, sequence = TEN[name]
    asked = [f"1 rebalance {','.join(map(str, layers))}" for layers in sequence]
    run = job.run(tmp_path / "run", warm, *asked, mode=mode, timeout_s=300)
    assert splits(run) == list(sequence)
    assert_layers_once(run, sequence[-1])
    assert_same_bits(run, undisturbed(job))
    assert [event["epoch"] for event in events(run, "migration")] == list(range(1, 11))
    assert_nothing_stale(run)
    assert_flat(run, 10)
    assert_flat_within_epochs(run)


def test_migrations_and_losses_in_turn(undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path) -> None:
    job = replace(GRID, data=3, steps=60, clip=1.0)
    faults = [f"kill:worker={worker}@step={step},phase=optimizer" for worker, step in ((5, 12), (0, 26), (1, 40))]
    asked = ["2 rebalance 3,4", "16 rebalance 4,3", "30 rebalance 2,5", "45 rebalance 6,1"]
    run = job.run(tmp_path / "run", warm, *asked, faults=faults, timeout_s=300)
    assert sorted(run.fired) == sorted(faults), run.output[-8000:]
    assert_same_training(run, undisturbed(job))
    assert_nothing_stale(run)
