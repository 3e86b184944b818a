"""The real torchft on the replicas of an emulated job: steps take the time of their pipeline, losses are real.

Each replica is one process, whatever its pipeline's stages: it sleeps for as long as its micro-batches take in a 1F1B
pipeline of the emulated devices, then calls torchft's all-reduce over gloo on a small network, sleeps for the exchange
of gradients and the optimizer, and lets torchft commit. A replica that loses one of its workers cannot go on, so a loss
is the end of the replica's process. As torchft does, the batch shrinks by the micro-batches of the replica that is
gone.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from emulated_jobs import Case
from replica_loop import read_diaries
from replicas import TorchftSettings, torchft_job, wait_until
from throughput_plot import Series

START_LIMIT_S = 180.0
SETTINGS = TorchftSettings(join_timeout_ms=60_000, quorum_tick_ms=100, heartbeat_timeout_ms=5_000)
"""As ``torchft_lighthouse`` has them when nothing is said; with the shorter limit of ``LighthouseServer``, 100 ms, slow
steps let replicas that start a little apart train in turns, not together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchftRun:
    """What was measured."""

    samples_per_s: tuple[float, ...]
    """Before a loss, and after each."""
    step_s: tuple[float, ...]
    """Of a committed step, likewise."""
    recovery_s: tuple[float, ...]
    """From each loss to the next step that all survivors have committed."""
    series: Series


def measure_torchft(
    case: Case,
    folder: Path,
    python: Path,
    losses: Sequence[int],
    struck_after_s: float,
    steps: int,
) -> TorchftRun:
    """Train, lose one replica after the other, and train on.

    Args:
        case: The job.
        folder: For diaries and logs; made here.
        python: Of the environment that has torchft.
        losses: Committed steps before each loss. Replica 0 is lost first, then 1, and so on; at least one stays.
        struck_after_s: From the begin of the step to the loss.
        steps: That are committed after the last loss.

    Raises:
        JobFailed: A replica that was not struck ended, or the job did not go on.
    """
    folder.mkdir(parents=True)
    rows = case.grid.rows
    tails_s = [case.tail_s(count) for count in range(1, rows + 1)]
    step_s = case.step_s() - tails_s[-1]
    limit_s = START_LIMIT_S + 20 * case.step_s()
    struck_s: list[float] = []
    with torchft_job(
        folder, rows, python, SETTINGS, step_s=step_s, tails_s=tails_s, struck=range(len(losses))
    ) as is_alive:
        for replica, (before, count) in enumerate(zip((0, *losses), losses, strict=False)):
            wait_for_steps(folder, rows - replica, count - before, limit_s * (count - before), is_alive)
            time.sleep(struck_after_s)
            (pid,) = [
                told["pid"] for told in read_diaries(folder) if told["event"] == "start" and told["replica"] == replica
            ]
            struck_s.append(time.time())
            os.kill(pid, signal.SIGKILL)
        wait_for_steps(folder, rows - len(losses), steps, limit_s * steps, is_alive)
    return read_run(case, read_diaries(folder), struck_s)


def wait_for_steps(folder: Path, replicas: int, count: int, limit_s: float, is_alive: Callable[[], bool]) -> None:
    """Until each replica that is left has committed so many steps in which so many took part.

    Raises:
        JobFailed: It does not come to that.
    """

    def done() -> bool:
        told = [one for one in read_diaries(folder) if one["event"] == "commit" and one["replicas"] == replicas]
        counts = [sum(one["replica"] == replica for one in told) for replica in {one["replica"] for one in told}]
        return len([own for own in counts if own >= count]) >= replicas

    wait_until(done, limit_s, is_alive, f"{replicas} replicas commit {count} steps")


def read_run(case: Case, told: Sequence[dict[str, Any]], struck_s: Sequence[float]) -> TorchftRun:
    """Of a job's diaries, and when replicas 0, 1, ... were struck."""
    rows, share = case.grid.rows, case.row_batches * case.size
    commits = [one for one in told if one["event"] == "commit"]
    times, rates, recoveries = [], [], []
    bounds = [*struck_s, float("inf")]
    for lost, until_s in enumerate(bounds):
        inside = [
            one
            for one in commits
            if one["replica"] == rows - 1 and one["replicas"] == rows - lost and one["at_s"] < until_s
        ]
        ends = [one["at_s"] for one in inside]
        times.append(statistics.median(end - begin for begin, end in pairwise(ends)))
        rates.append((rows - lost) * share / times[-1])
    for lost, at_s in enumerate(struck_s, 1):
        firsts = [
            min(
                one["at_s"]
                for one in commits
                if one["replica"] == replica and one["replicas"] == rows - lost and one["at_s"] > at_s
            )
            for replica in range(lost, rows)
        ]
        recoveries.append(max(firsts) - at_s)
    last = [one for one in commits if one["replica"] == rows - 1]
    return TorchftRun(
        samples_per_s=tuple(rates),
        step_s=tuple(times),
        recovery_s=tuple(recoveries),
        series=Series(
            name="torchft (real)",
            ends_s=tuple(one["at_s"] for one in last),
            samples=tuple(one["replicas"] * share for one in last),
            losses_s=tuple(struck_s),
        ),
    )
