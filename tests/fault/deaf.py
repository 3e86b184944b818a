"""A worker that the answer of an agreement does not reach, while another one that has it is killed.

Both agreements of a step are told to all workers at once, so no scripted fault makes some know and others not. Here one
takes part, and its answer is withheld until the membership ends. ``ELAS_TEST_DEAF=DEAF,VICTIM@STEP,WHAT``; WHAT is
``found-inf`` (whether a gradient is infinite) or ``norm``.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_S = 30


def wait_until(there: Callable[[], bool], what: str) -> None:
    """Until then; a sentence if it never comes."""
    deadline = time.monotonic() + PATIENCE_S
    while not there():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def install(out: Path) -> None:
    """Have this happen, if the environment asks for it; ``deaf`` and ``victim`` are left in the folder."""
    asked = os.environ.get("ELAS_TEST_DEAF")
    if not asked:
        return
    who, where = asked.split("@")
    deaf, victim = map(int, who.split(","))
    step, what = int(where.split(",")[0]), where.split(",")[1]
    from megatron.core.optimizer.optimizer import MegatronOptimizer, MixedPrecisionOptimizer

    from megatron_elas.host.attachment import attachment
    from megatron_elas.runtime.session import Session
    from megatron_elas.spec.errors import EpochChanged

    def withheld(agree: Any) -> Any:
        @functools.wraps(agree)
        def agreed(self: Any) -> Any:
            answer = agree(self)
            attached = attachment()
            if attached.worker == deaf and attached.counter.step == step and not (out / "deaf").exists():
                (out / "deaf").touch()
                wait_until(lambda: attached.transport.cancelled, "the membership did not end")
                raise EpochChanged("the answer was withheld")
            return answer

        return agreed

    def watched(prepare: Any) -> Any:
        def prepared(self: Any, update: Any) -> None:
            prepare(self, update)
            attached = attachment()
            if attached.counter.step == step:
                (out / f"prepared.{attached.worker}").touch()
                if attached.worker == victim:
                    others = attached.job.world_size - 1
                    wait_until(lambda: len(list(out.glob("prepared.*"))) == others, "not all others know it")
                    wait_until((out / "deaf").exists, "nobody is deaf")
                    (out / "victim").touch()
                    os.kill(os.getpid(), signal.SIGKILL)

        return prepared

    if what == "norm":
        MegatronOptimizer.get_grad_norm = withheld(MegatronOptimizer.get_grad_norm)
    else:
        found = MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan
        MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan = withheld(found)
    Session.prepare = watched(Session.prepare)  # type: ignore[method-assign]
