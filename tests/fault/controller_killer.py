"""Kills the controller from inside a job, at moments that a test names.

ELAS_TEST_KILL_CONTROLLER is a list, with commas: ``W@S``: worker W, before step S; ``settling``: worker 0, about to
report its position; ``resuming``: worker 0, with the order to recover in its hands. Each strikes once, and says so.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import psutil

from megatron_elas.control.port import LinkPort

_left = [moment for moment in os.environ.get("ELAS_TEST_KILL_CONTROLLER", "").split(",") if moment]


def install() -> None:
    """In every worker, before it joins."""
    settled, wait_recover = LinkPort.settled, LinkPort.wait_recover

    def settled_after(port: Any, report: Any) -> None:
        _strike("settling", report.worker == 0)
        settled(port, report)

    def wait_recover_before(port: Any, epoch: int) -> Any:
        order = wait_recover(port, epoch)
        _strike("resuming", port._worker == 0)
        return order

    LinkPort.settled = settled_after  # type: ignore[method-assign]
    LinkPort.wait_recover = wait_recover_before  # type: ignore[method-assign]


def step_begins(worker: int, step: int) -> None:
    """Called on all workers before each step."""
    _strike(f"{worker}@{step}", True)


def _strike(moment: str, mine: bool) -> None:
    if not mine or moment not in _left:
        return
    _left.remove(moment)
    starter = psutil.Process(os.getppid())
    launcher = psutil.Process(starter.ppid())
    controllers = [p for p in launcher.children() if "megatron_elas.control.controller_process" in p.cmdline()]
    assert len(controllers) == 1, controllers
    os.kill(controllers[0].pid, signal.SIGKILL)
    print(f"controller killed: {moment}", file=sys.stderr, flush=True)
