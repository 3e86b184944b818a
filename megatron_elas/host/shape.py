"""What Megatron's validated arguments say about the size of a run, in our own words."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from megatron_elas.spec.consistency import sum_bytes
from megatron_elas.spec.shape import ModelShape, TrainingShape

DENSE = {
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "num_experts": None,
    "virtual_pipeline_model_parallel_size": None,
    "num_distributed_optimizer_instances": 1,
    "gtp_weight_remat_size": 1,
    "use_megatron_fsdp": False,
    "use_torch_fsdp2": False,
    "use_tp_pp_dp_mapping": False,
    "multi_latent_attention": False,
    "experimental_attention_variant": None,
    "attention_output_gate": False,
    "hybrid_layer_pattern": None,
    "heterogeneous_layers_config_path": None,
    "mtp_num_layers": None,
    "spec": None,
    "fp8": None,
    "fp4": None,
    "rampup_batch_size": None,
    "step_batch_size_schedule": None,
    "decrease_batch_size_if_needed": False,
    "optimizer": "adam",
    "optimizer_cpu_offload": False,
    "use_precision_aware_optimizer": False,
}
"""Attribute of args -> the only value for which a grid and the memory can be told (planner.memory)."""


def find_uncovered(args: Any) -> tuple[str, ...]:
    """Flags that the description of a run does not cover."""
    return tuple("--" + name.replace("_", "-") for name, value in DENSE.items() if getattr(args, name, value) != value)


def describe_model(args: Any, config: Any) -> ModelShape:
    """The model.

    Args:
        args: Validated, with the vocabulary's padded size.
        config: The TransformerConfig made of them.
    """
    return ModelShape(
        layers=layers_of_stages(args, config),
        hidden=args.hidden_size,
        ffn=args.ffn_hidden_size,
        heads=args.num_attention_heads,
        kv_heads=config.num_query_groups,
        head_size=args.kv_channels,
        vocab=args.padded_vocab_size,
        positions=args.max_position_embeddings if args.position_embedding_type == "learned_absolute" else 0,
        sequence=args.seq_length,
        norm_vectors=1 if args.normalization == "RMSNorm" else 2,
        qk_norm=bool(args.qk_layernorm),
        gated=bool(config.gated_linear_unit),
        linear_bias=args.add_bias_linear,
        qkv_bias=args.add_qkv_bias,
        tied=not args.untie_embeddings_and_output_weights,
    )


def describe_training(args: Any, added_flags: Collection[str]) -> TrainingShape:
    """How it is trained.

    Args:
        args: Validated.
        added_flags: What the entry added for want of an accelerator. If that is the unfused attention, the
            description is that of the accelerator that the run is meant for.
    """
    half = args.bf16 or args.fp16
    return TrainingShape(
        weight_bytes=2 if half else 4,
        gradient_bytes=4 if args.accumulate_allreduce_grads_in_fp32 or not half else 2,
        sharded_optimizer=args.use_distributed_optimizer,
        sequence_parallel=args.sequence_parallel,
        recompute=_name_recompute(args),
        hidden_dropout=args.hidden_dropout > 0,
        attention_dropout=args.attention_dropout > 0,
        keeps_scores=args.transformer_impl == "local" and "--transformer-impl" not in added_flags,
        sum_bytes=sum_bytes(args.elastic_consistency) if args.elastic else 0,
    )


def describe_run(args: Any) -> tuple[ModelShape, TrainingShape] | None:
    """Of validated arguments alone; None with flags that the description does not cover."""
    if find_uncovered(args):
        return None
    from megatron.training.arguments import core_transformer_config_from_args

    return describe_model(args, core_transformer_config_from_args(args)), describe_training(args, ())


def layers_of_stages(args: Any, config: Any) -> tuple[int, ...]:
    """Transformer layers of every stage."""
    return tuple(_layers_of(config, stage) for stage in range(args.pipeline_model_parallel_size))


def launch_layers(args: Any) -> tuple[int, ...]:
    """Transformer layers of every stage, of validated arguments alone."""
    from megatron.training.arguments import core_transformer_config_from_args

    return layers_of_stages(args, core_transformer_config_from_args(args))


def _layers_of(config: Any, stage: int) -> int:
    layout = config.pipeline_model_parallel_layout
    if layout is not None:  # Megatron's function would ask for the rank in a group that is not there
        return sum(kind is LayerType.decoder for kind in layout.layout[stage][0])
    return int(get_num_layers_to_build(config, pp_rank=stage))


def _name_recompute(args: Any) -> str:
    if args.recompute_granularity == "full":
        return "full"
    scores = args.recompute_granularity == "selective" and "core_attn" in (args.recompute_modules or ("core_attn",))
    return "selective" if scores else "none"
