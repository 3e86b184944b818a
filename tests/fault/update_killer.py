"""A worker that is killed when its optimizer has changed the shard and nobody has been told.

No scripted fault strikes there: it is inside of torch's own optimizer. ``ELAS_TEST_KILL_IN_UPDATE=WORKER@STEP``.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any


def wait_for_all(out: Path, workers: int) -> None:
    """Until each of them has changed its shard."""
    deadline = time.monotonic() + 20
    while len(list(out.glob("updated.*"))) < workers:
        assert time.monotonic() < deadline, "not all workers came to their update"
        time.sleep(0.005)


def install(out: Path) -> None:
    """Have the worker kill itself there, if the environment asks for it; it leaves ``killed_in_update`` behind."""
    asked = os.environ.get("ELAS_TEST_KILL_IN_UPDATE")
    if not asked:
        return
    import torch

    from megatron_elas.host.attachment import attachment

    worker, step = map(int, asked.split("@"))
    update = torch.optim.AdamW.step

    def struck(self: Any, *args: Any, **kwargs: Any) -> Any:
        outcome = update(self, *args, **kwargs)
        if threading.current_thread() is threading.main_thread():  # not where copies of other workers follow
            attached = attachment()
            if attached.counter.step == step:
                (out / f"updated.{attached.worker}").touch()
                if attached.worker == worker:
                    wait_for_all(out, attached.job.world_size)  # so they are prepared, and the step is finished
                    (out / "killed_in_update").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
        return outcome

    torch.optim.AdamW.step = struck  # type: ignore[method-assign]
