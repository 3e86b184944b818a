"""A worker that is killed when its optimizer has changed the shard and nobody has been told.

No scripted fault strikes there: it is inside of torch's own optimizer. ``ELAS_TEST_KILL_IN_UPDATE=WORKER@STEP``.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any


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
            if (attached.worker, attached.counter.step) == (worker, step):
                (out / "killed_in_update").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return outcome

    torch.optim.AdamW.step = struck  # type: ignore[method-assign]
