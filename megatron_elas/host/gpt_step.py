"""What one micro-batch of GPT pretraining does: fetch the batch, run the model, hand on the loss.

The four functions Megatron 0.19 expects from its entry script, for plain GPT samples (no packed sequences).
"""

# b micro-batch (samples), s sequence (tokens on this context-parallel rank)

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import is_first_or_last_pipeline_stage

BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
"""Tensors of a micro-batch: int64 [b, s], int64 [b, s], float32 [b, s], bool [b, 1, s, s] or None, int64 [b, s]."""

SPIKE_FACTOR = 10
"""With --check-for-spiky-loss: a loss this many times the largest one seen is reported."""

_straggler_timer = StragglerDetector()

Loss = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def has_prediction_layers(vp_stage: int | None) -> bool:
    """Whether multi-token-prediction layers sit on this rank."""
    args = get_args()
    if args.mtp_num_layers is None:
        return False
    config = core_transformer_config_from_args(args)
    return bool(
        mtp_on_this_rank(
            layout=config.pipeline_model_parallel_layout,
            mtp_num_layers=config.mtp_num_layers,
            ignore_virtual=False,
            vp_stage=vp_stage,
        )
    )


def needs_data(vp_stage: int | None) -> bool:
    """Whether this rank's stage reads tokens or labels."""
    return is_first_or_last_pipeline_stage(vp_stage) or has_prediction_layers(vp_stage)


def get_batch(data_iterator: Iterator[dict[str, Any]] | None, vp_stage: int | None) -> dict[str, torch.Tensor | None]:
    """The next micro-batch, on the device, by BATCH_KEYS.

    A stage in the middle gets None for all, the first stage no labels, the last one no tokens. TP rank 0 reads the
    iterator and broadcasts; all ranks of a TP group must call.
    """
    if not needs_data(vp_stage):
        return dict.fromkeys(BATCH_KEYS)
    args = get_args()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    batch: dict[str, torch.Tensor | None] = {}
    if tp_rank == 0:
        assert data_iterator is not None
        read = next(data_iterator)
        batch = {key: read[key].cuda(non_blocking=True) if read.get(key) is not None else None for key in BATCH_KEYS}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_prediction_layers(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group())
    return {key: batch[key] for key in BATCH_KEYS}


def compute_loss(loss_mask: torch.Tensor, output_tensor: torch.Tensor) -> Loss:
    """Sum of a micro-batch's token losses.

    Args:
        loss_mask: float [b, s], 1 where a token counts.
        output_tensor: Loss per token, [b, s].

    Returns:
        The sum (a scalar with gradient), the number of tokens that count (int), and for the log
        ``{"lm loss": [sum, tokens]}``, which Megatron adds up over micro-batches and ranks.
    """
    token_losses = output_tensor.view(-1).float()
    counted = loss_mask.view(-1).float()
    loss = torch.sum(token_losses * counted)
    num_tokens = counted.sum().clone().detach().to(torch.int)
    _check_loss(loss)
    return loss, num_tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])}


def _check_loss(loss: torch.Tensor) -> None:
    """Let Megatron's rerun machine judge the loss of this rank, as the flags ask."""
    args = get_args()
    machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for rejects, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            machine.validate_result(
                result=loss,
                rejection_func=rejects,
                message=f"found {what} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        machine.validate_result(
            result=loss,
            rejection_func=functools.partial(machine.is_unexpectedly_large, threshold=SPIKE_FACTOR, context="loss"),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )


def forward_step(
    data_iterator: Iterator[dict[str, Any]] | None, model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[[torch.Tensor], Loss]]:
    """Run one micro-batch forward. Called by the schedules for each micro-batch.

    Returns:
        The model's output (a schedule plan when asked for one), and the function that makes the loss of it.
    """
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    with _straggler_timer(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timer.stop()
    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    targets = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
    with _straggler_timer:
        output = model.build_schedule_plan(*inputs, **targets) if return_schedule_plan else model(*inputs, **targets)
    return output, functools.partial(compute_loss, batch["loss_mask"])


def get_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Which ranks of a pipeline hold (a copy of) the word embedding."""
    args = get_args()
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        if args.mtp_num_layers is not None:
            ranks.update(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)
