"""An agent tells of a dying worker before its process is gone, and once."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from megatron_elas.control.agent import Agent
from megatron_elas.control.messages import WorkerExited
from megatron_elas.control.starter_messages import StartWorker, Target

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]

LARGE_WORKER = """
import mmap, os, pathlib, signal, sys
pages = mmap.mmap(-1, 400 << 20)
for position in range(0, len(pages), 4096):
    pages[position] = 1
os.kill(os.getpid(), signal.SIGKILL)
"""
"""The kernel takes some time to free what it has touched."""


ATTEMPTS = 3
"""On a busy machine the thread that waits for a death may come late."""


def kill_worker(script: Path, *, fresh: bool) -> bool:
    """Start the worker and wait for its end. Gives whether its process was there when its death was reported."""
    reports: list[tuple[WorkerExited, bool]] = []

    async def run() -> None:
        agent = await Agent.launch(
            preload=None,
            environ=os.environ,
            grace_s=1.0,
            report=lambda exited: reports.append((exited, exited.worker in agent.running)),
        )
        try:
            target = Target(name=str(script), is_module=False)
            agent.start([StartWorker(worker=3, target=target, environ=dict(os.environ), fresh=fresh)])
            await agent.wait_idle()
        finally:
            await agent.close()

    asyncio.run(run())
    [(exited, process_was_there)] = reports
    assert (exited.worker, exited.status) == (3, -signal.SIGKILL)
    return process_was_there


def test_a_forked_worker_is_reported_once_and_before_its_memory_is_free(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(LARGE_WORKER)
    assert any(kill_worker(script, fresh=False) for _ in range(ATTEMPTS))


def test_a_fresh_worker_is_reported_once_at_its_end(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(LARGE_WORKER)
    assert not kill_worker(script, fresh=True)  # exec gives a mutex up
