"""Wrappers around Megatron's log: the lines of the last rank, and TensorBoard."""

from __future__ import annotations

import functools
from typing import Any

from megatron_elas.host.attachment import attachment
from megatron_elas.host.log_handover import Log


def wrap_print_rank_last(original: Any) -> Any:
    """``print_rank_last`` whose lines are kept on the other ranks."""

    @functools.wraps(original)
    def print_rank_last(message: Any) -> None:
        attachment().log.tell(str(message))

    return print_rank_last


def share_tensorboard(args: Any, log: Log) -> None:
    """Give every worker a TensorBoard writer in Megatron's place for it; Megatron has made one on the last rank."""
    from megatron.training import global_vars

    if not args.tensorboard_dir:
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError:  # Megatron has said so on the last rank
        return
    global_vars._GLOBAL_TENSORBOARD_WRITER = log.take_writer(
        global_vars._GLOBAL_TENSORBOARD_WRITER,
        lambda: SummaryWriter(log_dir=args.tensorboard_dir, max_queue=args.tensorboard_queue_size),
    )
