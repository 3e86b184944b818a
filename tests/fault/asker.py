"""Asks a job's controller for changes from inside the job, at steps that a test names, as ``elas`` does from outside.

ELAS_TEST_ASK is a list, with semicolons: ``STEP rebalance N,N``, ``STEP drain W W``. The worker of rank 0 asks before
that step, and waits for the answer, so all that follows does not depend on how long a step takes. What cannot be had
at the moment is asked for again before the next step. ``asked.NUMBER`` in the folder ELAS_TEST_OUT says that
something was answered and how.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from megatron_elas.cli.running_jobs import Request, ask
from megatron_elas.control.environment import WorkerEnvironment
from megatron_elas.control.messages import Answer, DrainRequest, RebalanceRequest
from megatron_elas.spec.errors import ElasticError

_NOT_NOW = "ask again when"
_PATIENCE_S = 60.0


def step_begins(attached: Any, step: int) -> None:
    """Called on all workers before each step."""
    script = os.environ.get("ELAS_TEST_ASK", "")
    if not script or attached.worker != attached.session.plan.placement.workers[0]:
        return
    folder = Path(os.environ["ELAS_TEST_OUT"])
    for number, text in enumerate(script.split(";")):
        told = folder / f"asked.{number}"
        if told.exists():
            continue
        at, what, *words = text.split()
        if step >= int(at):
            _ask(told, _read(what, words), text, step)
        return


def _read(what: str, words: list[str]) -> Request:
    if what == "drain":
        return DrainRequest(workers=tuple(map(int, words)), wait=False)  # without this worker no step ends
    assert what == "rebalance", what
    return RebalanceRequest(layers=tuple(map(int, words[0].split(","))) if words else None)


def _ask(told: Path, request: Request, text: str, step: int) -> None:
    environment = WorkerEnvironment.from_environ(os.environ)
    answer = _ask_patiently(environment, request)
    if not answer.ok and _NOT_NOW in answer.text:
        return
    told.write_text(f"{'yes' if answer.ok else 'no'}: {answer.text}")
    print(f"asked before step {step}: {text}: {answer.text}", file=sys.stderr, flush=True)


def _ask_patiently(environment: WorkerEnvironment, request: Request) -> Answer:
    """Until the controller is there: it may have been killed, and be starting again."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return ask(environment.controller, environment.token, request, _PATIENCE_S)
        except ElasticError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
