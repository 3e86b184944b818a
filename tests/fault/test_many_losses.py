"""One process tree loses worker after worker and goes on each time; what it costs does not grow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_elas.runtime.channels import PIPELINE
from megatron_elas.runtime.communicator.channels import FIRST_FREE
from tests.fault.runs import Run, assert_nothing_stale, assert_same_training, run_job

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

FLAGS = ("--pipeline-model-parallel-size=2", "--num-layers=2")
PATIENCE = ("--heartbeat-timeout-s=20", "--settle-timeout-s=60")
"""Up to twelve workers on two cores: one that waits for its turn is not a lost one."""
PHASES = ("forward,microbatch=1", "backward,microbatch=0", "optimizer", "commit", "between", "snapshot")
RSS_TOLERANCE_BYTES = 8 << 20
"""Per recovery, beyond the tensors' growth: the allocator keeps what the exchange of shards needed for a moment, and
what passes of more samples do, where a plan joins micro-batches."""
RSS_TOTAL_BYTES = 12 << 20
"""Over all recoveries: what is kept once is used again."""


def script(order: Sequence[int]) -> list[str]:
    """Kill these workers, one every two steps, in a phase after the other."""
    return [
        f"kill:worker={worker}@step={2 + 2 * number},phase={PHASES[number % len(PHASES)]}"
        for number, worker in enumerate(order)
    ]


def run_both(tmp_path: Path, workers: int, order: Sequence[int]) -> tuple[Run, Run]:
    """With and without the losses."""
    steps, faults = 2 * len(order) + 4, script(order)
    calm, run = (
        run_job(
            tmp_path / name, FLAGS, workers=workers, steps=steps, batch=12, timeout_s=180, faults=struck,
            launcher_flags=PATIENCE,
        )
        for name, struck in (("calm", []), ("run", faults))
    )  # fmt: skip
    assert run.fired == faults, run.output[-6000:]
    return run, calm


def assert_flat(run: Run, workers: int, losses: int) -> None:
    """From one recovery to the next nothing grows on any survivor but what fewer workers must share."""
    walks = [run.records(f"walk.{epoch}") for epoch in range(losses + 1)]
    assert [len(walk) for walk in walks] == list(range(workers, workers - losses - 1, -1))
    for before, after in itertools.pairwise(walks):
        for worker, now in after.items():
            assert_no_growth(before[worker], now, f"worker {worker}, epoch {now['epoch']}")
        # The launcher and the starter hold a link and a handle per worker.
        for old, new in zip(*(next(iter(walk.values()))["ancestors"] for walk in (before, after)), strict=True):
            assert old["pid"] == new["pid"] and new["fds"] < old["fds"], (old, new)
            assert new["threads"] <= old["threads"] and new["rss"] <= old["rss"] + (1 << 20), (old, new)
    for worker, last in walks[-1].items():
        first = walks[1][worker]
        grown = (last["rss"] - first["rss"]) - (last["tensor_bytes"] - first["tensor_bytes"])
        assert grown <= RSS_TOTAL_BYTES, f"worker {worker}: {grown / 2**20:.1f} MiB"
        assert last["objects"]["all"] <= first["objects"]["all"] * 1.05


def assert_no_growth(before: dict[str, Any], now: dict[str, Any], where: str) -> None:
    """Compare a survivor's costs after two recoveries that follow each other."""
    for same in ("pid", "groups", "c10d", "children"):
        assert now[same] == before[same], (where, same)
    assert now["threads"] <= before["threads"] and now["os_threads"] <= before["os_threads"], where
    assert now["fds"] - now["links"] == before["fds"] - before["links"], (where, "descriptors that are no links")
    # Not: fewer than before. In a tree of members others become neighbours, and small groups use no tree.
    assert all(count <= now["others"] for channel, count in now["links_by_channel"].items() if channel < FIRST_FREE), (
        where
    )
    assert now["links_by_channel"].get(PIPELINE, 0) <= now["others"], where
    assert now["links"] <= now["most_links"], where
    for kind, count in now["objects"].items():
        if kind == "Versions":  # of its own shard, and of those it backs up: in a narrow pipeline also of other stages
            assert count == 1 + now["wards"], (where, kind)
        elif kind not in ("all", "Link", "socket", "Placement", "frame", "traceback"):
            assert count <= before["objects"][kind], (where, kind)
    assert now["objects"]["socket"] - now["links"] == before["objects"]["socket"] - before["links"], where
    growth = (now["rss"] - before["rss"]) - max(0, now["tensor_bytes"] - before["tensor_bytes"])
    if before["epoch"]:  # the first walk imports what it looks at
        assert growth <= RSS_TOLERANCE_BYTES, f"{where}: {growth / 2**20:.1f} MiB more than its tensors"


def assert_flat_within_epochs(run: Run) -> None:
    """Steps without a loss between them open and keep nothing."""
    for worker, record in run.records("final").items():
        steps = record["footprints"]
        assert len({step["pid"] for step in steps}) == 1
        for before, now in itertools.pairwise(steps[1:]):
            if now["epoch"] == before["epoch"]:
                for what in ("groups", "c10d", "links_by_channel", "fds", "threads", "os_threads", "children"):
                    assert now[what] == before[what], f"worker {worker}, step {now['step']}: {what}"


def assert_all(run: Run, calm: Run, workers: int, order: Sequence[int]) -> None:
    assert_same_training(run, calm)
    assert list(run.recoveries) == list(range(1, len(order) + 1))
    assert run.records("final").keys() == set(range(workers)) - set(order)
    assert_nothing_stale(run)
    assert_flat(run, workers, len(order))
    assert_flat_within_epochs(run)


def test_four_losses_in_one_process_tree_leave_nothing_behind(tmp_path: Path) -> None:
    order = (0, 5, 2, 3)
    run, calm = run_both(tmp_path, 6, order)
    assert_all(run, calm, 6, order)


@pytest.mark.slow
def test_ten_losses_in_one_process_tree_leave_nothing_behind(tmp_path: Path) -> None:
    order = (0, 11, 2, 7, 4, 9, 1, 10, 3, 8)
    run, calm = run_both(tmp_path, 12, order)
    assert_all(run, calm, 12, order)
