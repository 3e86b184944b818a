"""Symbols of Megatron that the entry calls or reads; none is changed."""

from __future__ import annotations

from megatron_elas.host.patching import Seam, use

ROWS: tuple[Seam, ...] = (
    use(
        id="entry.pretrain",
        symbol="megatron.training.training:pretrain",
        signature="(cfg_container, train_valid_test_dataset_provider, model_type, forward_step_func, "
        "model_provider=None, process_non_loss_data_func=None, get_embedding_ranks=None, "
        "get_position_embedding_ranks=None, non_loss_data_func=None, store=None, inprocess_call_wrapper=None, "
        "p2p_communicator=None, pg_collection=None, skip_model_parallel_init=False)",
        reason="runs the training",
    ),
    use(
        id="entry.parse-args",
        symbol="megatron.training.arguments:parse_args",
        signature="(extra_args_provider=None, ignore_unknown_args=False)",
        reason="reads the flags once for the checks that come before Megatron's own",
    ),
    use(
        id="entry.parse-and-validate-args",
        symbol="megatron.training.arguments:parse_and_validate_args",
        signature="(extra_args_provider=None, ignore_unknown_args=False, args_defaults={})",
        reason="reads and completes the flags",
    ),
    use(
        id="entry.model-config",
        symbol="megatron.training.argument_utils:gpt_config_from_args",
        signature="(args, config=None, model_config_cls=<class 'megatron.training.models.gpt.GPTModelConfig'>)",
        reason="describes the model to pretrain",
    ),
    use(
        id="entry.config-container",
        symbol="megatron.training.argument_utils:pretrain_cfg_container_from_args",
        signature="(args, model_cfg=None)",
        reason="describes the run to pretrain",
    ),
    use(
        id="entry.batch-on-tp-rank",
        symbol="megatron.core.utils:get_batch_on_this_tp_rank",
        signature="(batch, has_cu_seqlens, is_hybrid_cp, create_attention_mask_in_dataloader, broadcast_src_rank, "
        "broadcast_group, cp_size, tp_rank, micro_batch_size, seq_length, mtp_on_this_rank, "
        "pipeline_model_parallel_size=1, is_pipeline_first_stage=False, is_pipeline_last_stage=False)",
        reason="shares a micro-batch inside a TP group",
    ),
    use(
        id="entry.batch-on-cp-rank",
        symbol="megatron.core.utils:get_batch_on_this_cp_rank",
        signature="(batch, is_hybrid_cp, cp_group=None, hybrid_cp_group_func=None, use_per_sequence_balancing=False)",
        reason="cuts a micro-batch for context parallelism",
    ),
    use(
        id="entry.rerun-validate",
        symbol="megatron.core.rerun_state_machine:RerunStateMachine.validate_result",
        signature="(self, result, rejection_func, message, comparison_func=None, tolerance=0.0, fatal=True)",
        reason="judges each rank's loss",
    ),
    use(
        id="entry.dataset-builder",
        symbol="megatron.core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder",
        signature="(cls, sizes, is_built_on_rank, config)",
        reason="builds the datasets",
    ),
    use(
        id="entry.build-tokenizer",
        symbol="megatron.core.tokenizers.utils.build_tokenizer:build_tokenizer",
        signature="(args, **kwargs)",
        reason="the datasets need the tokenizer's special tokens",
    ),
    use(
        id="entry.blend",
        symbol="megatron.training.utils.common_utils:get_blend_and_blend_per_split",
        signature="(args)",
        reason="reads the flags that name data files",
    ),
    use(
        id="entry.prediction-layers",
        symbol="megatron.core.transformer.multi_token_prediction:mtp_on_this_rank",
        signature="(layout=None, mtp_num_layers=None, ignore_virtual=True, vp_stage=None)",
        reason="stages with multi-token-prediction layers read data too",
    ),
)
"""Read or called by pretrain_gpt, gpt_run, gpt_step and gpt_data."""
