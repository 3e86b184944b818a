"""A worker that is killed in the middle of the weight gradients of an item, which ``W`` computes apart from ``B``.

No scripted fault strikes there. ELAS_TEST_KILL_IN_WEIGHTS is ``WORKER@STEP,NUMBER``: from that step on, in the pass of
that number (from 0) of the first step that has one, when half of its weights have their gradient. It leaves
``killed_in_weights`` in the folder ELAS_TEST_OUT.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any


def install(out: Path) -> None:
    """Have the worker kill itself there, if the environment asks for it."""
    asked = os.environ.get("ELAS_TEST_KILL_IN_WEIGHTS")
    if not asked:
        return
    from megatron_elas.host.attachment import attachment
    from megatron_elas.host.split_backward import Deferred

    worker, _, where = asked.partition("@")
    first, number = map(int, where.split(","))
    passes: dict[int, int] = {}
    run = Deferred.run

    def struck(self: Any) -> None:
        attached = attachment()
        step = attached.counter.step
        passes[step] = passes.get(step, -1) + 1
        if attached.worker == int(worker) and step >= first and passes[step] == number:
            tasks = len(self)
            assert tasks > 1
            for _ in range(tasks // 2):
                self._tasks.popleft()()
            (out / "killed_in_weights").write_text(f"{step} {tasks}")
            os.kill(os.getpid(), signal.SIGKILL)
        run(self)

    Deferred.run = struck  # type: ignore[method-assign]
