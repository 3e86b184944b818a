"""A worker that falls asleep, is taken for lost, cannot be killed, and wakes up when the others have gone on.

ELAS_TEST_SLEEPER is ``HOW:WORKER@STEP``. HOW ``thread``: its main thread waits, and its other threads live; ``stop``:
the process is stopped. What could kill it is kept from doing so until a survivor has come to its end: the process that
workers are forked from, which would send it SIGKILL, is stopped, and what the controller tells it is only printed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from megatron_elas.control import link

PATIENCE_S = 60.0


def _read() -> tuple[str, int, int] | None:
    text = os.environ.get("ELAS_TEST_SLEEPER")
    if not text:
        return None
    how, _, where = text.partition(":")
    worker, step = map(int, where.split("@"))
    return how, worker, step


def fall_asleep(worker: int, step: int) -> None:
    """Called on all workers before each step."""
    script = _read()
    folder = Path(os.environ["ELAS_TEST_OUT"])
    if script is None or (worker, step) != script[1:] or (folder / "sleeper").exists():
        return
    link._end_process = lambda own, end: _say(f"the sleeper is told to end: {end.sentence}")  # type: ignore[assignment]
    os.kill(os.getppid(), signal.SIGSTOP)
    (folder / "sleeper").write_text(str(os.getpid()))
    _say(f"worker {worker} falls asleep in step {step}")
    if script[0] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        deadline = time.monotonic() + PATIENCE_S
        while not (folder / "wake").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    _say(f"worker {worker} wakes up")


def wake_up(worker: int, epoch: int) -> None:
    """Called on survivors after their first step in each epoch."""
    script = _read()
    if script is None or epoch == 0:
        return
    folder = Path(os.environ["ELAS_TEST_OUT"])
    (folder / "wake").touch()
    if script[0] == "stop":
        os.kill(int((folder / "sleeper").read_text()), signal.SIGCONT)
    time.sleep(0.5)  # it runs its step now, with what is left of its links


def let_it_be_killed() -> None:
    """Called on survivors at their end."""
    if _read() is not None:
        os.kill(os.getppid(), signal.SIGCONT)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
