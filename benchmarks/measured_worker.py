"""Trains as ``megatron_elas.pretrain_gpt`` does, and prints what only a worker itself can measure.

Started by ``training_jobs.run_elastic``. After every recovery a line tells the marks of this worker's phases, the
processor time it spent from the plan to the first step, and the size of its stage. With ELAS_BENCH_COPIES=off steps
send no copies to backups: no loss can be survived then. What copies cost is the difference to a run with them.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from typing import Any

from training_jobs import MEASURED_MARK

from megatron_elas import pretrain_gpt


def measure_recoveries() -> None:
    """Print a line for each."""
    from megatron_elas.control.port import LinkPort
    from megatron_elas.host.training import MegatronHost
    from megatron_elas.runtime.executor import Executor

    seen: dict[str, Any] = {}
    apply, digest, recovered = Executor.apply, MegatronHost.digest, LinkPort.recovered

    @functools.wraps(apply)
    def measured_apply(self: Any, *args: Any) -> Any:
        before_s = time.process_time()
        report = apply(self, *args)
        seen["cpu_ms"] = (time.process_time() - before_s) * 1e3
        return report

    @functools.wraps(digest)
    def measured_digest(self: Any) -> Any:
        state = digest(self)
        seen["stage_numel"] = state.total_numel
        return state

    @functools.wraps(recovered)
    def printed_recovered(self: Any, report: Any) -> None:
        print(MEASURED_MARK + json.dumps({**seen, "worker": report.worker, "marks_s": report.marks_s}), flush=True)
        recovered(self, report)

    Executor.apply = measured_apply  # type: ignore[method-assign]
    MegatronHost.digest = measured_digest  # type: ignore[method-assign]
    LinkPort.recovered = printed_recovered  # type: ignore[method-assign]


def send_no_copies() -> None:
    """Neither read the shard at the beginning of a step nor send it."""
    from megatron_elas.host.training import MegatronHost
    from megatron_elas.runtime.replicator import Replicator

    Replicator.start = lambda self, store, version: None  # type: ignore[method-assign]
    MegatronHost.read_shard = lambda self, flat: None  # type: ignore[method-assign]


if __name__ == "__main__":
    pretrain_gpt.preload()
    measure_recoveries()
    if os.environ.get("ELAS_BENCH_COPIES") == "off":
        send_no_copies()
    sys.exit(pretrain_gpt.main())
