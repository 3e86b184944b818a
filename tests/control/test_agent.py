"""An agent tells of a dying worker before its process is gone, and of one that is stopped; each once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megatron_elas.config import ControlTimeouts
from megatron_elas.control.agent import Agent
from megatron_elas.control.messages import WorkerExited, WorkerHung
from megatron_elas.control.starter_messages import StartWorker, Target
from tests.control.jobs import TIMEOUTS

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

PATIENCE_S = 30
LARGE_WORKER = """
import atexit, mmap, os, signal, sys
size, _, when = sys.argv[1].partition(" ")
pages = mmap.mmap(-1, int(size) << 20)
for position in range(0, len(pages), 4096):
    pages[position] = 1
if when == "at exit":
    atexit.register(os.kill, os.getpid(), signal.SIGKILL)
else:
    os.kill(os.getpid(), signal.SIGKILL)
"""
"""Kills itself. The kernel takes some time to free what it has touched."""
WAITING_WORKER = """
import os, pathlib, sys, threading
from megatron_elas.control import death_watch
death_watch.start_pulse()
pathlib.Path(sys.argv[1] + ".new").write_text(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
threading.Event().wait()
"""
"""Says its pid, and waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One report, and whether the worker's process was there when it came."""

    report: WorkerExited | WorkerHung
    process_was_there: bool


def run_worker(
    folder: Path,
    source: str,
    argument: str,
    *,
    fresh: bool = False,
    timeouts: ControlTimeouts = TIMEOUTS,
    act: Callable[[Agent, list[Told]], Awaitable[None]] | None = None,
) -> list[Told]:
    """Start the worker, let ``act`` do something, wait for the worker's end. Gives what the agent told."""
    script = folder / "worker.py"
    script.write_text(source)
    told: list[Told] = []

    async def run() -> None:
        agent = await Agent.launch(
            preload=None,
            environ=os.environ,
            timeouts=timeouts,
            report=lambda report: told.append(Told(report=report, process_was_there=report.worker in agent.running)),
        )
        try:
            target = Target(name=str(script), is_module=False, arguments=(argument,))
            agent.start([StartWorker(worker=3, target=target, environ=dict(os.environ), fresh=fresh)])
            if act is not None:
                await act(agent, told)
            await agent.wait_idle()
        finally:
            await agent.close()

    asyncio.run(run())
    return told


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def wait_pid(path: Path) -> int:
    await wait_until(path.exists)
    return int(path.read_text())


# ---------------------------------------------------------------- death

ATTEMPTS = 5
"""On a busy machine the thread that waits for a death may come late."""


@pytest.mark.parametrize("fresh", [False, True], ids=["forked", "fresh"])
@pytest.mark.parametrize(
    "how", ["300", "300 at exit", pytest.param("1000", marks=pytest.mark.slow)], ids=["300MiB", "at-exit", "1000MiB"]
)
def test_a_death_is_told_once_and_before_the_memory_is_free(tmp_path: Path, how: str, fresh: bool) -> None:
    """The agent hears of the process's end by its pidfd, in the same run."""
    for _ in range(ATTEMPTS):
        [told] = run_worker(tmp_path, LARGE_WORKER, how, fresh=fresh)
        assert isinstance(told.report, WorkerExited)
        assert (told.report.worker, told.report.status) == (3, -signal.SIGKILL)
        if told.process_was_there:
            return
    pytest.fail(f"the death of a process ({how} MiB) was never told before its end")


@pytest.mark.parametrize("fresh", [False, True], ids=["forked", "fresh"])
def test_a_worker_that_ends_in_order_is_told_once_at_its_end(tmp_path: Path, fresh: bool) -> None:
    [told] = run_worker(tmp_path, "import sys\nsys.exit(int(sys.argv[1]))\n", "7", fresh=fresh)
    assert isinstance(told.report, WorkerExited) and told.report.status == 7 and not told.process_was_there


# ---------------------------------------------------------------- stops


@pytest.mark.parametrize("fresh", [False, True], ids=["forked", "fresh"])
def test_a_worker_that_stays_stopped_is_told(tmp_path: Path, fresh: bool) -> None:
    async def stop(agent: Agent, told: list[Told]) -> None:
        os.kill(await wait_pid(tmp_path / "pid"), signal.SIGSTOP)
        await wait_until(lambda: bool(told))
        agent.kill_all()

    hung, exited = run_worker(tmp_path, WAITING_WORKER, str(tmp_path / "pid"), fresh=fresh, act=stop)
    assert isinstance(hung.report, WorkerHung) and hung.report.detail.startswith("its process is stopped, for 0.")
    assert isinstance(exited.report, WorkerExited) and exited.report.status == -signal.SIGKILL


def test_a_short_stop_is_not_told(tmp_path: Path) -> None:
    timeouts = replace(
        TIMEOUTS, hang_timeout_s=20.0, heartbeat_timeout_s=20.0, settle_timeout_s=20.0, resume_timeout_s=20.0,
        join_timeout_s=20.0,
    )  # fmt: skip

    async def stop_shortly(agent: Agent, told: list[Told]) -> None:
        pid = await wait_pid(tmp_path / "pid")
        starter = agent._starter
        assert starter is not None
        os.kill(pid, signal.SIGSTOP)
        await wait_until(lambda: any(sign.stopped for sign in starter.look().values()))
        os.kill(pid, signal.SIGCONT)
        await wait_until(lambda: not any(sign.stopped for sign in starter.look().values()))
        assert agent.running == (3,) and not told
        agent.kill_all()

    [told] = run_worker(tmp_path, WAITING_WORKER, str(tmp_path / "pid"), timeouts=timeouts, act=stop_shortly)
    assert isinstance(told.report, WorkerExited)
