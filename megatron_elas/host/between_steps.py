"""Wrappers around what all workers do together between steps: evaluation and saving."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from megatron_elas.host.attachment import attachment
from megatron_elas.host.gradient_sum_seams import SAVED_EXPONENTS
from megatron_elas.host.summed_rows import SAVED_ROWS, rows_to_save
from megatron_elas.runtime.session import Dispensable, FailedElsewhere, ToldElsewhere
from megatron_elas.spec.errors import EpochChanged


def wrap_evaluate(original: Any) -> Any:
    """``evaluate`` that all workers do together, again if it was cut short."""

    @functools.wraps(original)
    def evaluate(
        forward_step_func: Any, data_iterator: Any, model: Any, process_non_loss_data_func: Any, config: Any,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        from megatron.core.rerun_state_machine import get_rerun_state_machine
        from megatron.training import get_args, get_timers

        attached, margs = attachment(), get_args()
        consumed = margs.consumed_valid_samples
        mode = get_rerun_state_machine().get_mode()
        loader = getattr(data_iterator, "iterable", None)

        def body() -> Any:
            step = attached.session.next_step - 1
            attached.strike(step, "evaluate", None)
            attached.counter.begin_evaluation(step)
            margs.consumed_valid_samples = consumed
            if loader is not None:
                loader.seek(loader.mark)
            try:
                return original(
                    forward_step_func, data_iterator, model, process_non_loss_data_func, config, *args, **kwargs
                )
            except EpochChanged:  # Megatron restores these only at the end
                get_rerun_state_machine().set_mode(mode)
                config.timers = get_timers()
                for chunk in model:
                    chunk.train()
                raise

        def missed() -> Any:
            margs.consumed_valid_samples = consumed + margs.eval_iters * margs.eval_global_batch_size
            return {}, None, False  # no losses, no other data, no end of time

        outcome = attached.session.run_between(body, missed=missed)
        if loader is not None:
            loader.mark += margs.consumed_valid_samples - consumed
        return outcome

    return evaluate


def _explain(error: CheckpointException, workers: Sequence[int]) -> Exception:
    """The same for people. torch tells the reasons to one worker only, by rank among ``workers``."""
    if not error.failures:
        return ToldElsewhere("a checkpoint could not be saved by another worker")
    rank, (reason, _) = min(error.failures.items())
    more = f" (and {len(error.failures) - 1} more workers)" if len(error.failures) > 1 else ""
    return FailedElsewhere(workers[rank], f"{type(reason).__name__}: {reason}{more}")


def wrap_save_checkpoint(original: Any) -> Any:
    """``save_checkpoint`` that all workers do together, again if it was cut short.

    When it fails on one of them, training goes on without that checkpoint.
    """
    from megatron.training import get_args

    @functools.wraps(original)
    def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
        attached = attachment()

        def body() -> Any:
            attached.strike(iteration - 1, "save", None)
            attached.unsaved = None
            if attached.sums is not None:
                setattr(get_args(), SAVED_EXPONENTS, attached.sums.to_save(iteration))
                setattr(get_args(), SAVED_ROWS, rows_to_save(attached))
            try:
                return original(iteration, *args, **kwargs)
            except CheckpointException as error:  # derived from BaseException, and raised on every worker
                workers = attached.route.plan.placement.workers
                raise _explain(error, workers) from error

        def go_without() -> None:
            attached.unsaved = iteration

        def have_missed() -> None:  # a worker that was away does not know how the others' save went
            missed.append(iteration)

        missed: list[int] = []

        purpose = f"save the checkpoint of iteration {iteration} in --save {get_args().save}"
        outcome = attached.session.run_between(
            body, Dispensable(purpose=purpose, instead=go_without), missed=have_missed
        )
        if attached.host is not None and not missed and attached.unsaved != iteration:
            attached.host.checkpoints.note(iteration)
        return outcome

    return save_checkpoint


def wrap_execute_sync(original: Any) -> Any:
    """The writing of a checkpoint's files, which begins with an empty queue of results.

    A save that was cut short between its writing and its last collectives leaves its results there; the next save
    would take them for its own, and write metadata that do not fit the files.
    """

    @functools.wraps(original)
    def execute_sync(self: Any) -> Any:
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        attached, results = attachment(), filesystem_async.get_write_results_queue()
        while not results.empty():
            results.get_nowait()
        attached.strike(attached.session.next_step - 1, "save", 0)
        return original(self)

    return execute_sync
