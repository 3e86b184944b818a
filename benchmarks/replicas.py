"""A data-parallel loop loses one of its replicas: how long until all others have committed the next step.

The same loop (replica_loop.py: a small network, 50 ms of sleep for the computation of a larger one, one flat gradient)
runs as an elastic job under elasrun and under torchft with its lighthouse, in turns. Replica 1 is struck in the middle
of a step's computation by SIGKILL or SIGSTOP. The time ends when every survivor has committed a step in which one
replica less took part.

Settings: *default* is what elasrun, and torchft's LighthouseServer and Manager, do when nothing is said, but for the
limit of torchft's operations, which is 10 s instead of 60: gloo's ring lets those who are not next to the dead one wait
for it, and with 8 replicas the others' own limit of 60 s then ends the job. *tuned* has short heartbeats on both sides,
and for torchft short ticks and a limit of operations that the undisturbed loop just keeps on two busy cores.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from replica_loop import read_diaries
from results import format_all, print_result, print_table
from torchft_venv import NotAvailable, prepare_torchft
from training_jobs import ENVIRONMENT, REPO, ended_gently

from megatron_elas.testing.ranks import PR_SET_PDEATHSIG

STEP_S = 0.05
STRUCK = 1
STEPS_BEFORE = 10
"""That all replicas have committed before one is struck."""
START_LIMIT_S = 120.0
RECOVERY_LIMIT_S = 150.0
HERE = Path(__file__).resolve().parent
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchftSettings:
    """None leaves a value to torchft."""

    heartbeat_interval_ms: int | None = None
    heartbeat_timeout_ms: int | None = None
    join_timeout_ms: int | None = None
    quorum_tick_ms: int | None = None
    timeout_s: float | None = None
    """Of operations of the process group and of the manager."""


ELASTIC_SETTINGS: dict[str, list[str]] = {
    "default": [],
    "tuned": ["--heartbeat-interval-s", "0.05", "--heartbeat-timeout-s", "0.5"],
}
TORCHFT_SETTINGS = {
    "default": TorchftSettings(timeout_s=10.0),
    "tuned": TorchftSettings(
        heartbeat_interval_ms=50, heartbeat_timeout_ms=500, join_timeout_ms=100, quorum_tick_ms=10, timeout_s=1.0
    ),
}


class JobFailed(RuntimeError):
    """A job ended, or did not come to where it should."""


def measure_replicas(folder: Path, sizes: Sequence[int], turns: int, quick: bool) -> None:
    """All faults and settings for each number of replicas; default settings, whose timeouts are long, once each."""
    try:
        python: Path | None = prepare_torchft()
    except NotAvailable as error:
        print(f"torchft cannot be had, so only ours is measured: {error}")
        python = None
    for replicas in sizes:
        for fault in ("kill",) if quick else ("kill", "stop"):
            taken: dict[tuple[str, str], list[float]] = {}
            for settings in ("tuned", "default"):
                for turn in range(turns if settings == "tuned" else 1):
                    systems = ["ours", "torchft"] if python is not None else ["ours"]
                    for system in systems if turn % 2 else reversed(systems):
                        where = folder / f"{system}-{settings}-{fault}-{replicas}-{turn}"
                        where.mkdir()
                        job = (
                            elastic_job(where, replicas, ELASTIC_SETTINGS[settings])
                            if system == "ours"
                            else torchft_job(where, replicas, python, TORCHFT_SETTINGS[settings])
                        )
                        times = taken.setdefault((settings, system), [])
                        try:
                            with job as is_alive:
                                times.append(time_recovery(where, replicas, SIGNALS[fault], is_alive))
                        except JobFailed as error:
                            if system == "ours":
                                raise
                            print(f"torchft, {settings}, {replicas} replicas, SIG{fault.upper()}: {error}", flush=True)
            report(replicas, fault, taken)


def report(replicas: int, fault: str, taken: Mapping[tuple[str, str], Sequence[float]]) -> None:
    """A table of all times and the RESULT lines."""
    print_table(
        f"{replicas} replicas, {STEP_S * 1e3:.0f} ms steps, SIG{fault.upper()} of one to the next commit of all, in s",
        ("",),
        {
            f"{system}, {settings}": [format_all(times, 3) or "did not recover"]
            for (settings, system), times in taken.items()
        },
    )
    suffix = "" if fault == "kill" else f"_{fault}"
    for settings in ("default", "tuned"):
        ours = statistics.median(taken[settings, "ours"])
        print_result(f"recovery{suffix}_ours_{settings}_s@{replicas}", ours, "s")
        if taken.get((settings, "torchft")):
            theirs = statistics.median(taken[settings, "torchft"])
            print_result(f"recovery{suffix}_vs_torchft_{settings}@{replicas}", theirs / ours, "ratio")


def time_recovery(folder: Path, replicas: int, fault: signal.Signals, is_alive: Callable[[], bool]) -> float:
    """Strike, and wait for the others' next step; seconds."""

    def commits(told: Sequence[dict[str, Any]], took_part: int, after_s: float = 0) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {replica: [] for replica in range(replicas)}
        for one in told:
            if one["event"] == "commit" and one["replicas"] == took_part and one["at_s"] > after_s:
                found[one["replica"]].append(one["at_s"])
        return found

    def ready() -> bool:
        return all(len(times) >= STEPS_BEFORE for times in commits(read_diaries(folder), replicas).values())

    wait_until(ready, START_LIMIT_S, is_alive, f"{replicas} replicas train together")
    (pid,) = [one["pid"] for one in read_diaries(folder) if one["event"] == "start" and one["replica"] == STRUCK]
    before = len(commits(read_diaries(folder), replicas)[STRUCK])
    wait_until(
        lambda: len(commits(read_diaries(folder), replicas)[STRUCK]) > before, START_LIMIT_S, is_alive, "another step"
    )
    time.sleep(0.5 * STEP_S)
    struck_s = time.time()
    os.kill(pid, fault)

    def recovered() -> bool:
        found = commits(read_diaries(folder), replicas - 1, struck_s)
        return all(times for replica, times in found.items() if replica != STRUCK)

    wait_until(recovered, RECOVERY_LIMIT_S, is_alive, f"{replicas - 1} replicas go on")
    found = commits(read_diaries(folder), replicas - 1, struck_s)
    return max(times[0] for replica, times in found.items() if replica != STRUCK) - struck_s


def wait_until(condition: Callable[[], bool], limit_s: float, is_alive: Callable[[], bool], what: str) -> None:
    """Look at the diaries until the condition holds; they are written by other processes."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline or not is_alive():
            raise JobFailed(f"waited for: {what}; the job {'ran on' if is_alive() else 'ended'} without it")
        time.sleep(0.02)


# ---------------------------------------------------------------- jobs


@contextmanager
def elastic_job(folder: Path, replicas: int, flags: Sequence[str]) -> Iterator[Callable[[], bool]]:
    """Ours; gives a function that tells whether it still runs."""
    command = [
        sys.executable, "-m", "megatron_elas.cli.elasrun", "--nproc-per-node", str(replicas), "--grace-s", "2", *flags,
        "--preload", "replica_elastic:preload", str(HERE / "replica_elastic.py"), str(folder), str(STEP_S),
    ]  # fmt: skip
    environ = {**ENVIRONMENT, "PYTHONPATH": f"{REPO}{os.pathsep}{HERE}"}
    with process(command, environ, folder / "elasrun.log") as launcher:
        yield lambda: launcher.poll() is None


@contextmanager
def torchft_job(
    folder: Path,
    replicas: int,
    python: Path | None,
    settings: TorchftSettings,
    *,
    step_s: float = STEP_S,
    tails_s: Sequence[float] = (),
    struck: Collection[int] = (STRUCK,),
) -> Iterator[Callable[[], bool]]:
    """torchft's; gives a function that tells whether all replicas but the struck ones still run.

    Args:
        folder: For diaries and logs.
        replicas: At the begin.
        python: Of the environment that has torchft.
        settings: Of torchft.
        step_s: That a step computes.
        tails_s: That it takes after its all-reduce, by the number of replicas in it, from one on; empty: nothing.
        struck: Replicas that may end.
    """
    text = json.dumps(asdict(settings))
    base = [str(python), str(HERE / "replica_torchft.py")]
    environ = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo", "TORCHFT_USE_OTEL": "false"}
    with ExitStack() as started:
        lighthouse = started.enter_context(
            process([*base, "lighthouse", str(folder), text], environ, folder / "lighthouse.log")
        )
        wait_until(
            (folder / "lighthouse").exists, START_LIMIT_S, lambda: lighthouse.poll() is None, "the lighthouse is there"
        )
        workers = [
            started.enter_context(
                process(
                    [*base, "replica", str(folder), text, str(replica), str(step_s), *map(str, tails_s)],
                    environ,
                    folder / f"{replica}.log",
                )
            )
            for replica in range(replicas)
        ]
        yield lambda: all(worker.poll() is None for at, worker in enumerate(workers) if at not in struck)


@contextmanager
def process(command: Sequence[str], environ: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ended at the end, gently if it can be; after a failure its output is shown."""
    parent = os.getpid()
    with log.open("wb") as output:
        started = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: end_with_parent(parent),
        )
    with ended_gently(started):
        try:
            yield started
        except JobFailed:
            print(f"--- end of {log.name}\n{log.read_text()[-1500:]}", file=sys.stderr)
            raise


def end_with_parent(parent: int) -> None:
    """Be asked to end when the parent dies, also if it is killed. Called in the child before it runs its program."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
