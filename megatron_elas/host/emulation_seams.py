"""Where emulated accelerators attach to Megatron: every row is in force only with ``--elastic-emulate``.

The substitutes belong to Megatron's classes and not to a model, so a model that is made anew for other layers is
emulated as the first one is; a layer goes by its number in the whole model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from megatron_elas.host import patching
from megatron_elas.host.emulation import Emulation, settle_emulation
from megatron_elas.host.patching import Seam, wrap

_current: list[Emulation] = []


def attach(emulation: Emulation, *, elastic: bool) -> None:
    """Have this process emulate. Raises WrongVersion when Megatron is not as expected."""
    _current[:] = [emulation]
    patching.apply_missing(ROWS if elastic else (*ROWS, *STOCK_ROWS))


@contextlib.contextmanager
def emulated_stock_run(args: Any) -> Iterator[None]:
    """Inside, stock Megatron is emulated if ``args`` say so. Raises BadUsage."""
    own = settle_emulation(args)
    if own is None:
        yield
        return
    emulation = Emulation(own, args.elastic_emulate_log, args.rank, None)
    if args.rank == 0:
        print(f"megatron_elas: {emulation}; messages between stages take no time without --elastic", flush=True)
    attach(emulation, elastic=False)
    try:
        yield
    finally:
        emulation.close()


def _wrap_layer(original: Any) -> Any:
    @functools.wraps(original)
    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        ran = _current[0].run_layer(self.layer_number - 1, hidden_states)
        output = original(self, hidden_states, *args, **kwargs)
        ran()
        return output

    return forward


def _wrap_embedding(original: Any) -> Any:
    @functools.wraps(original)
    def forward(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, input_ids, *args, **kwargs)
        _current[0].embedding_ran(output, input_ids.shape[0])
        return output

    return forward


def _wrap_head(original: Any) -> Any:
    @functools.wraps(original)
    def _postprocess(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.post_process:
            return original(self, hidden_states, *args, **kwargs)
        ran = _current[0].run_head(hidden_states)
        output = original(self, hidden_states, *args, **kwargs)
        ran()
        return output

    return _postprocess


def _wrap_update(original: Any) -> Any:
    @functools.wraps(original)
    def step_with_ready_grads(self: Any) -> Any:
        outcome = original(self)
        _current[0].updated()
        return outcome

    return step_with_ready_grads


def _wrap_pass(original: Any) -> Any:
    @functools.wraps(original)
    def begin(*args: Any, **kwargs: Any) -> Any:
        _current[0].begin_pass()
        return original(*args, **kwargs)

    return begin


ROWS: tuple[Seam, ...] = (
    wrap(
        "emulation.layer",
        "megatron.core.transformer.transformer_layer:TransformerLayer.forward",
        "(self, hidden_states, attention_mask=None, context=None, context_mask=None, rotary_pos_emb=None, "
        "rotary_pos_cos=None, rotary_pos_sin=None, rotary_pos_cos_sin=None, attention_bias=None, "
        "inference_context=None, packed_seq_params=None, sequence_len_offset=None, padding_mask=None, *, "
        "inference_params=None)",
        "takes the time of an emulated accelerator, forward and backward",
        _wrap_layer,
    ),
    wrap(
        "emulation.embedding",
        "megatron.core.models.common.embeddings.language_model_embedding:LanguageModelEmbedding.forward",
        "(self, input_ids, position_ids, tokentype_ids=None)",
        "takes the time of an emulated accelerator, forward and backward",
        _wrap_embedding,
    ),
    wrap(
        "emulation.head",
        "megatron.core.models.gpt.gpt_model:GPTModel._postprocess",
        "(self, hidden_states, input_ids, position_ids, labels, rotary_pos_emb, rotary_pos_cos, rotary_pos_sin, "
        "mtp_in_postprocess=None, loss_mask=None, decoder_input=None, attention_mask=None, padding_mask=None, "
        "inference_params=None, packed_seq_params=None, sequence_len_offset=None, runtime_gather_output=None, "
        "extra_block_kwargs=None, inference_context=None, output_processor=None, output_processor_context=None)",
        "the output layer and the loss take the time of an emulated accelerator, forward and backward",
        _wrap_head,
    ),
    wrap(
        "emulation.update",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.step_with_ready_grads",
        "(self)",
        "reduction, optimizer and gather take the time of an emulated accelerator",
        _wrap_update,
    ),
)
"""Only applied with --elastic-emulate."""

STOCK_ROWS: tuple[Seam, ...] = (
    wrap(
        "emulation.stock-forward",
        "megatron.core.pipeline_parallel.schedules:forward_step",
        "(forward_step_func, data_iterator, model, num_microbatches, input_tensor, forward_data_store, config, "
        "cp_group_size, collect_non_loss_data=False, checkpoint_activations_microbatch=None, "
        "is_first_microbatch=False, current_microbatch=None, vp_stage=None, is_last_stage=True)",
        "a pass starts when its input is there",
        _wrap_pass,
    ),
    wrap(
        "emulation.stock-backward",
        "megatron.core.pipeline_parallel.schedules:backward_step",
        "(input_tensor, output_tensor, output_tensor_grad, config)",
        "a pass starts when the gradient of its output is there",
        _wrap_pass,
    ),
)
"""Only applied with --elastic-emulate and without --elastic, where messages do not say when they were sent."""
