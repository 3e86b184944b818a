"""Kills workers together, or the whole job, from inside, at moments that a test names.

ELAS_TEST_KILL_JOB is a list, with semicolons: ``STEP workers W,W`` kills these workers at once before that step, and
``STEP launcher SIGNAL`` ends the launcher by that signal; ``STEP save launcher SIGNAL`` does so in the save behind that
step, when the files are about to be written. The first worker with a seat strikes; after the launcher's end it does
nothing more, so what was about to happen has not. Each strikes once, and says so.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil


def install(attachment: Any) -> None:
    """In every worker, before it joins; ``attachment`` gives that of this process."""
    if not _script():
        return
    from megatron_elas.worker import Worker

    strike = Worker._strike

    def strike_after(worker: Any, step: int, phase: str, microbatch: int | None) -> None:
        if (phase, microbatch) == ("save", 0):
            _strike(attachment(), step, ["save"])
        strike(worker, step, phase, microbatch)

    Worker._strike = strike_after  # type: ignore[method-assign]


def step_begins(attached: Any, step: int) -> None:
    """Called on all workers before each step."""
    if _script():
        pid = _folder() / f"pid.{attached.worker}"
        if not pid.exists():  # once: another worker may be reading it
            pid.write_text(str(os.getpid()))
        _strike(attached, step, [])


def _wait_until_told(epoch: int) -> None:
    """Until the controller has noted how the epoch began; not of a migration whose first step would be the next one."""
    path, deadline = _folder() / "logs" / "events.jsonl", time.monotonic() + 3
    while epoch and time.monotonic() < deadline:
        told = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if any(event.get("epoch") == epoch for event in told if event["event"] in ("recovery", "migration")):
            return
        time.sleep(0.02)


def _script() -> list[str]:
    return [text for text in os.environ.get("ELAS_TEST_KILL_JOB", "").split(";") if text]


def _folder() -> Path:
    return Path(os.environ["ELAS_TEST_OUT"])


def _strike(attached: Any, step: int, place: list[str]) -> None:
    if attached.worker != attached.session.plan.placement.workers[0]:
        return
    for number, text in enumerate(_script()):
        done = _folder() / f"killed.{number}"
        at, *words = text.split()
        if step != int(at) or words[:-2] != place or done.exists():
            continue
        done.touch()
        _wait_until_told(attached.session.plan.epoch)
        print(f"killed before step {step}: {text}", file=sys.stderr, flush=True)
        kind, whom = words[-2:]
        if kind == "workers":
            pids = [int((_folder() / f"pid.{worker}").read_text()) for worker in whom.split(",")]
            siblings = {child.pid for child in psutil.Process(os.getppid()).children()}  # a drained one may have left
            for pid in sorted(siblings.intersection(pids), key=lambda pid: pid == os.getpid()):
                os.kill(pid, signal.SIGKILL)
        else:
            assert kind == "launcher", text
            os.kill(psutil.Process(os.getppid()).ppid(), signal.Signals[whom])
            while True:
                time.sleep(1)
