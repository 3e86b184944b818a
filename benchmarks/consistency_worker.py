"""Trains as ``megatron_elas.pretrain_gpt`` does, and prints the exact loss of every step and the worker's peak memory.

Started by ``consistency.py``. Lines after MEASURED_MARK: ``{"step", "loss"}`` of every step that this worker knows the
loss of, once it counts, and at the end ``{"worker", "peak_rss_mb", "parameters"}``, of its stage.

ELAS_BENCH_DRAIN=STEP:WORKER drains that worker before that step, or before the first one after it at which that can be.
ELAS_BENCH_OUT_OF_USE=STEP:ROW,... leaves data-parallel rows out from these steps on, as torchft does with replicas that
have lost a worker. Only without --elastic. A row that is out of use contributes zeros to the sums of gradients and
losses, which are divided by the number of the other rows.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import sys
from collections.abc import Collection
from typing import Any

from training_jobs import MEASURED_MARK

from megatron_elas import pretrain_gpt

NOT_NOW = "ask again when"
"""In the answer to what can be had later."""


def record_losses(*, elastic: bool) -> None:
    """Print a line for each step that counts, and one at the end."""
    from megatron.training import training

    from megatron_elas import worker
    from megatron_elas.runtime.session import Session

    if elastic:
        from megatron_elas.host.attachment import attachment

        run_step, finish = Session.run_step, worker.finish

        @functools.wraps(run_step)
        def told_step(session: Any, step: int, body: Any) -> Any:
            outcome = run_step(session, step, body)
            _tell_loss(step, outcome[0])
            return outcome

        def told_finish() -> None:
            state = attachment().session._state
            seat = state.plan.placement.find_seat(state.worker)
            finish()
            if seat is not None:
                count = state.catalogue.total_count(state.plan, seat.stage)
                _tell({"worker": state.worker, "peak_rss_mb": _peak_rss_mb(), "parameters": count})

        Session.run_step = told_step  # type: ignore[method-assign]
        worker.finish = told_finish
        return
    train_step = training.train_step

    @functools.wraps(train_step)
    def told_stock_step(*args: Any, **kwargs: Any) -> Any:
        outcome = train_step(*args, **kwargs)
        _tell_loss(kwargs["iteration"], outcome[0])
        return outcome

    training.train_step = told_stock_step


def _tell_loss(step: int, losses: dict[str, Any]) -> None:
    if losses:  # stock: only the last stage knows
        _tell({"step": step, "loss": float(losses["lm loss"])})


def _tell(what: dict[str, Any]) -> None:
    print(MEASURED_MARK + json.dumps(what), flush=True)


def _peak_rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def drain_at(step: int, leaving: int) -> None:
    """Have the first worker ask the controller that another one leaves, from that step on until it may."""
    from megatron_elas.cli.running_jobs import ask
    from megatron_elas.control.environment import WorkerEnvironment
    from megatron_elas.control.messages import DrainRequest
    from megatron_elas.host.attachment import attachment
    from megatron_elas.host.training import MegatronHost

    begin_step = MegatronHost.begin_step
    asked: list[int] = []

    @functools.wraps(begin_step)
    def asking(host: Any, now: int, data_iterator: Any) -> None:
        attached = attachment()
        seated = attached.session.plan.placement.workers
        if now >= step and not asked and leaving in seated and attached.worker == seated[0]:
            job = WorkerEnvironment.from_environ(os.environ)
            answer = ask(job.controller, job.token, DrainRequest(workers=(leaving,), wait=False), 60)
            if answer.ok:
                asked.append(now)
            elif NOT_NOW not in answer.text:
                sys.exit(f"worker {leaving} could not be drained before step {now}: {answer.text}")
        begin_step(host, now, data_iterator)

    MegatronHost.begin_step = asking  # type: ignore[method-assign]


def leave_rows_out(losses: dict[int, int]) -> None:
    """Have rows (row -> its first step without) contribute nothing, and the others' mean take their place."""
    from megatron.core import parallel_state
    from megatron.training import training

    from megatron_elas.host import gpt_step

    train_step, compute_loss = training.train_step, gpt_step.compute_loss
    current = [0]

    @functools.wraps(train_step)
    def counted_step(*args: Any, **kwargs: Any) -> Any:
        current[0] = kwargs["iteration"]
        return train_step(*args, **kwargs)

    @functools.wraps(compute_loss)
    def weighted(*args: Any) -> Any:
        loss, num_tokens, told = compute_loss(*args)
        row, rows = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        gone = {row for row, step in losses.items() if step <= current[0]}
        told = {name: value * float(row not in gone) for name, value in told.items()}
        return loss * row_weight(row, rows, gone), num_tokens, told

    training.train_step, gpt_step.compute_loss = counted_step, weighted


def row_weight(row: int, rows: int, gone: Collection[int]) -> float:
    """By which a row's loss is multiplied, so that the mean over all rows is that over those that are not gone."""
    return 0.0 if row in gone else rows / (rows - len(gone))


def _pairs(text: str) -> list[tuple[int, int]]:
    pairs = (part.split(":") for part in text.split(",") if part)
    return [(int(first), int(second)) for first, second in pairs]


if __name__ == "__main__":
    pretrain_gpt.preload()
    if gone := _pairs(os.environ.get("ELAS_BENCH_OUT_OF_USE", "")):
        leave_rows_out({row: step for step, row in gone})
    for drained in _pairs(os.environ.get("ELAS_BENCH_DRAIN", "")):
        drain_at(*drained)
    record_losses(elastic="--elastic" in sys.argv)
    sys.exit(pretrain_gpt.main())
