"""What the gradients of fp16 are divided by when they are summed, and not before, in the losses: rows.

It decides where a pass overflows, and how its gradients are rounded. At launch it is the number of the job's own rows,
as in Megatron (``JobSpec.summed_rows``). A run that is to keep its bits keeps that number when it goes on from a
checkpoint with other rows, so it is in the arguments of the checkpoint, as the exponents of sums are.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron_elas.host.attachment import Attachment, attachment

SAVED_ROWS = "elas_summed_rows"
"""Attribute of the arguments in a checkpoint: the number, and that of the batch's micro-batches; or None."""


def rows_to_save(attached: Attachment) -> tuple[int, int] | None:
    """For the checkpoint; None without fp16, whose losses are divided by no less than the whole batch."""
    return (attached.summed_rows, attached.job.num_microbatches) if attached.job.fp16 else None


def wrap_loaded_rows(original: Any) -> Any:
    """The check of a checkpoint's arguments, when it is loaded to go on from."""

    @functools.wraps(original)
    def check_checkpoint_args(checkpoint_args: Any, *args: Any, **kwargs: Any) -> None:
        original(checkpoint_args, *args, **kwargs)
        attached = attachment()
        rows, num_microbatches = getattr(checkpoint_args, SAVED_ROWS, None) or (0, 0)
        # A run with other batches is another one anyway, and other numbers may not divide.
        if attached.sums is None or not attached.job.fp16 or num_microbatches != attached.job.num_microbatches:
            return
        if rows != attached.summed_rows:
            from megatron.training.utils import print_rank_0

            print_rank_0(
                f"megatron_elas: losses are divided as in the run of the checkpoint, on {rows} data-parallel rows and "
                f"not {attached.summed_rows}, so that fp16 overflows in the same steps"
            )
        attached.summed_rows = rows

    return check_checkpoint_args
