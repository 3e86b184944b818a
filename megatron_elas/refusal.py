"""Why the workers of a node refuse a job: what the first of them said, in a file of the job's private folder.

All workers of a job find the same wrong with it. One of them speaks, the others wait until it has; the node's agent
reads it when one of them ends. Python 3.8 must be able to read this module, see ``prerequisites``.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import dataclass

FILE = "told"


@dataclass(frozen=True)
class Refusal:
    """Of one worker."""

    worker: int
    exit_code: int
    sentence: str


def refuse(run_dir: str, refusal: Refusal, say: Callable[[], None]) -> None:
    """Say it and write it down, unless another worker of the node has done so, or is about to: then wait for that.

    The first one to exit makes elasrun end the rest, so none may exit before somebody has spoken.
    """
    with open(os.path.join(run_dir, FILE), "a", encoding="utf-8") as told:
        fcntl.flock(told, fcntl.LOCK_EX)
        if os.fstat(told.fileno()).st_size == 0:  # not told.tell(), which is where it ended before the lock was had
            say()
            told.write(json.dumps(vars(refusal)))


def read_refusal(run_dir: str) -> Refusal | None:
    """What the first one said; None when no worker of the node has refused the job, or it was killed as it did."""
    try:
        with open(os.path.join(run_dir, FILE), encoding="utf-8") as told:
            return Refusal(**json.load(told))
    except (OSError, ValueError, TypeError):
        return None
