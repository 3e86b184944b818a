"""Holds optimizer state up that moves beside the first step after the first loss, and kills a worker meanwhile.

ELAS_TEST_SLOW_MOVES names the worker and where it dies, ``W:PHASE:MICROBATCH``. From epoch 1 on moves wait on all
workers until their epoch ends; the worker dies in its first step of epoch 1, at that place, when all seated workers'
moves wait. In the folder ELAS_TEST_OUT it leaves ``moves.W`` for each that waited, and ``struck.W``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PATIENCE_S = 20.0


def install() -> None:
    """Hold moves up, if that is asked for."""
    if not _wanted():
        return
    from megatron_elas.runtime import restoring

    real = restoring.apply_moves

    def apply_moves(moves: Sequence[Any], me: int, sources: Any, target: Any, transport: Any, *more: Any) -> Any:
        if transport.epoch == 1:
            (_folder() / f"moves.{me}").touch()
            _wait_until(lambda: transport.cancelled, f"the end of the epoch on worker {me}, whose moves wait")
        return real(moves, me, sources, target, transport, *more)

    restoring.apply_moves = apply_moves


def step_begins(attached: Any) -> None:
    """On the worker that is to die: have it die in this step, if it is the first one of epoch 1."""
    wanted = _wanted()
    if not wanted or int(wanted[0]) != attached.worker or attached.session.plan.epoch != 1:
        return
    real, (_, phase, microbatch) = attached.counter._strike, wanted
    seated = attached.session.plan.placement.workers

    def strike(step: int, at: str, number: int | None) -> None:
        if (at, number) == (phase, int(microbatch)):
            _wait_until(lambda: all((_folder() / f"moves.{w}").exists() for w in seated), "moves that wait")
            assert attached.session._executor.remapping
            (_folder() / f"struck.{attached.worker}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        real(step, at, number)

    attached.counter._strike = strike


def _wanted() -> list[str]:
    return os.environ["ELAS_TEST_SLOW_MOVES"].split(":") if "ELAS_TEST_SLOW_MOVES" in os.environ else []


def _folder() -> Path:
    return Path(os.environ["ELAS_TEST_OUT"])


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"no sign of {what} for {PATIENCE_S:g} s"
        time.sleep(0.002)
