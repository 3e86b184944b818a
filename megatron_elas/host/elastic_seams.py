"""Where elasticity attaches to Megatron: every row is in force only with ``--elastic``.

Passed as arguments, not listed here: ``pretrain(pg_collection=, p2p_communicator=)`` and the default process group,
which is made before Megatron would make it.
"""

from __future__ import annotations

from megatron_elas.host.between_steps import wrap_evaluate, wrap_execute_sync, wrap_save_checkpoint
from megatron_elas.host.bucket_layout import layer_layout
from megatron_elas.host.gradient_norm import wrap_gradient_norm
from megatron_elas.host.gradient_sum_seams import (
    wrap_finish_reduction,
    wrap_gradient_hook,
    wrap_start_reduction,
    wrap_tied_output,
    wrap_zero_gradients,
)
from megatron_elas.host.gradients import wrap_finalize_gradients, wrap_no_sync, wrap_tied_embedding_reduce
from megatron_elas.host.loaded_arguments import wrap_argument_check
from megatron_elas.host.loaders import wrap_data_loaders, wrap_dataset_builder
from megatron_elas.host.logging_seams import wrap_print_rank_last
from megatron_elas.host.loss_masks import wrap_sample
from megatron_elas.host.optimizer_layout import (
    wrap_layer_init,
    wrap_optimizer_part,
    wrap_reshardable_state,
)
from megatron_elas.host.parameter_norm import wrap_parameter_norm
from megatron_elas.host.patching import replace, use, wrap
from megatron_elas.host.random_seams import (
    wrap_dropout,
    wrap_fork,
    wrap_fused_dropout,
    wrap_get_states,
    wrap_layer_call,
    wrap_set_states,
    wrap_torch_checkpoint,
)
from megatron_elas.host.split_backward import wrap_grad_ready, wrap_linear
from megatron_elas.host.stage_layers import (
    wrap_layer_offset,
    wrap_num_layers,
    wrap_param_groups,
    wrap_setup_model,
)
from megatron_elas.host.training_step import (
    wrap_backward_step,
    wrap_finish_gather,
    wrap_forward_step,
    wrap_schedule_lookup,
    wrap_straggler_exit,
    wrap_train_step,
)
from megatron_elas.host.transaction import (
    wrap_chain_norm,
    wrap_chain_step,
    wrap_chain_update,
    wrap_chain_zeros,
    wrap_part_update,
)

ROWS = (
    use(
        "elastic.pretrain",
        "megatron.training.training:pretrain",
        "(cfg_container, train_valid_test_dataset_provider, model_type, forward_step_func, model_provider=None, "
        "process_non_loss_data_func=None, get_embedding_ranks=None, get_position_embedding_ranks=None, "
        "non_loss_data_func=None, store=None, inprocess_call_wrapper=None, p2p_communicator=None, pg_collection=None, "
        "skip_model_parallel_init=False)",
        "takes our groups and our point-to-point communicator and passes them to the schedule",
    ),
    use(
        "elastic.initialize-model-parallel",
        "megatron.core.parallel_state:initialize_model_parallel",
        "(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None, "
        "pipeline_model_parallel_comm_backend=None, use_sharp=False, context_parallel_size=1, "
        "hierarchical_context_parallel_sizes=None, hybrid_context_parallel=False, expert_model_parallel_size=1, "
        "gtp_remat_size=1, expert_gtp_remat_size=1, num_distributed_optimizer_instances=1, "
        "expert_tensor_parallel_size=None, nccl_communicator_config_path=None, distributed_timeout_minutes=30, "
        "order='tp-cp-ep-dp-pp', get_embedding_ranks=None, get_position_embedding_ranks=None, "
        "create_gloo_process_groups=True, high_priority_stream_groups=None, sharp_enabled_group=None, rank_offset=0, "
        "local_world_size=None)",
        "makes the groups before pretrain(), so that they can be passed to it",
    ),
    wrap(
        "elastic.train-step",
        "megatron.training.training:train_step",
        "(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward_func, "
        "iteration=None, pg_collection=None, p2p_communicator=None)",
        "a step is a transaction: it is committed, or run again after a recovery",
        wrap_train_step,
    ),
    wrap(
        "elastic.schedule",
        "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        "(pp_size=None, vp_size=None, schedule_pg_collection=None)",
        "the stock schedule runs the items that the plan gives this cell, with exact weights",
        wrap_schedule_lookup,
    ),
    wrap(
        "elastic.forward-step",
        "megatron.core.pipeline_parallel.schedules:forward_step",
        "(forward_step_func, data_iterator, model, num_microbatches, input_tensor, forward_data_store, config, "
        "cp_group_size, collect_non_loss_data=False, checkpoint_activations_microbatch=None, "
        "is_first_microbatch=False, current_microbatch=None, vp_stage=None, is_last_stage=True)",
        "takes the time of forward passes; losses are divided by the micro-batches of the batch, not of their cell",
        wrap_forward_step,
    ),
    wrap(
        "elastic.backward-step",
        "megatron.core.pipeline_parallel.schedules:backward_step",
        "(input_tensor, output_tensor, output_tensor_grad, config)",
        "counts backward passes for fault scripts and takes their time",
        wrap_backward_step,
    ),
    use(
        "elastic.pipelined-schedule",
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving",
        "(*, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, "
        "decoder_seq_length=None, forward_only=False, collect_non_loss_data=False, first_val_step=None, "
        "adjust_tensor_shapes_fn=None, p2p_communicator=None, pg_collection=None, force_all_reduce=False)",
        "host.orders does around passes what it does",
        "772d6b7d81825e7ae4822c9ad4f6185a4755b3f666b43c280d9575f5e5a0c61e",
    ),
    use(
        "elastic.one-stage-schedule",
        "megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining",
        "(*, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, "
        "decoder_seq_length=None, forward_only=False, collect_non_loss_data=False, first_val_step=None, "
        "adjust_tensor_shapes_fn=None, p2p_communicator=None, pg_collection=None, force_all_reduce=False)",
        "host.orders does around passes what it does",
        "b52848b05720fd6189d615e7ae6d4253a3dc3a2497e8c4b60fc3f986c02461e5",
    ),
    use(
        "elastic.pipeline-shapes",
        "megatron.core.pipeline_parallel.schedules:get_tensor_shapes",
        "(*, seq_length, micro_batch_size, decoder_seq_length, config, tp_group=None, cp_group=None)",
        "host.orders asks for the shapes of what is sent",
    ),
    use(
        "elastic.clear-embedding-buffer",
        "megatron.core.pipeline_parallel.schedules:clear_embedding_activation_buffer",
        "(config, model, is_last_stage)",
        "called by host.orders",
    ),
    use(
        "elastic.finish-embedding",
        "megatron.core.pipeline_parallel.schedules:finish_embedding_wgrad_compute",
        "(config, embedding_module, is_last_stage, tp_group)",
        "called by host.orders",
    ),
    use(
        "elastic.free-output",
        "megatron.core.pipeline_parallel.schedules:deallocate_output_tensor",
        "(out, deallocate_pipeline_outputs=False)",
        "called by host.orders",
    ),
    use(
        "elastic.first-step",
        "megatron.core.pipeline_parallel.schedules:check_first_val_step",
        "(first_val_step, forward_only, cond)",
        "called by host.orders",
    ),
    wrap(
        "elastic.linear",
        "megatron.core.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce",
        "(input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, "
        "grad_output_buffer=None, wgrad_deferral_limit=0, tp_group=None, gtp_remat_size=1)",
        "where a backward pass is split, the weight's gradient is put off",
        wrap_linear,
    ),
    use(
        "elastic.linear-forward",
        "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.forward",
        "(ctx, input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, "
        "grad_output_buffer, wgrad_deferral_limit, tp_group, gtp_remat_size)",
        "host.split_backward computes what it computes",
        "da380120aa78fb817376f00757f99949a88b622828a5eec7e752224c20aff445",
    ),
    use(
        "elastic.linear-backward",
        "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward",
        "(ctx, grad_output)",
        "host.split_backward computes what it computes, in two parts",
        "0f98c637b768ede6eab6aadef3650e2fa5cde2a4c28a891322868b2540a1da85",
    ),
    wrap(
        "elastic.gradient-hook",
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel._make_backward_post_hook",
        "(self, param)",
        "makes what accumulates a gradient, at bitwise in fixed point; called when a weight's gradient was put off",
        wrap_gradient_hook,
        "9db16cb6b15f93e077e7e0a80a0f0f0b6d33e50953f5b991e8336c69d7d34884",
    ),
    wrap(
        "elastic.zero-gradients",
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.zero_grad_buffer",
        "(self)",
        "sums in fixed point begin with zeros, too",
        wrap_zero_gradients,
    ),
    wrap(
        "elastic.start-reduction",
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync",
        "(self, force_all_reduce=False)",
        "at bitwise what is reduced are sums in fixed point",
        wrap_start_reduction,
        "5c47084df9ce2a805e04af911d44da1256c1180a94a97aeee167826a4b8e6fd5",
    ),
    wrap(
        "elastic.finish-reduction",
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.finish_grad_sync",
        "(self, force_all_reduce=False)",
        "reduced sums in fixed point become gradients",
        wrap_finish_reduction,
    ),
    use(
        "elastic.check-gradients",
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.check_grads",
        "(self, check_for_nan_or_inf, check_for_large)",
        "looks at the norms of all buckets of something; it is given the sums in fixed point",
        "772a37a468553b0ffba785e283fa31e659d1ad8299736b2fed51f8f116eee212",
    ),
    wrap(
        "elastic.tied-output",
        "megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward",
        "(self, input_, weight=None, runtime_gather_output=None)",
        "where the output layer uses the embedding's weight on one stage, autograd would add its two gradients before "
        "they are rounded; on two stages they are rounded apart",
        wrap_tied_output,
    ),
    wrap(
        "elastic.gradient-ready",
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.register_grad_ready",
        "(self, param, force_all_reduce=False)",
        "of a split backward pass, gradients are ready for the reduction when all of them are",
        wrap_grad_ready,
    ),
    wrap(
        "elastic.finish-gather",
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.finish_param_sync",
        "(self, skip_next_bucket_dispatch=False)",
        "waiting for parameters is no part of the pass that needs them first",
        wrap_finish_gather,
    ),
    wrap(
        "elastic.no-sync",
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.no_sync",
        "(self)",
        "ends when it is told to, and not when Python lets go of the frame of a schedule that did not tell it",
        wrap_no_sync,
    ),
    wrap(
        "elastic.finalize-gradients",
        "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
        "(model, num_tokens=None, pg_collection=None, force_all_reduce=False)",
        "counts the tokens of the batch on the last stage's cells; a pipeline is one worker's view after a loss",
        wrap_finalize_gradients,
    ),
    wrap(
        "elastic.tied-embedding",
        "megatron.core.distributed.finalize_model_grads:_allreduce_word_embedding_grads",
        "(model, config, embd_group=None, pp_group=None)",
        "adds both ends' gradients slice by slice: after a loss they may be cut for different numbers of cells",
        wrap_tied_embedding_reduce,
    ),
    wrap(
        "elastic.evaluate",
        "megatron.training.training:evaluate",
        "(forward_step_func, data_iterator, model, process_non_loss_data_func, config, verbose=False, "
        "non_loss_data_func=None, eval_iters=None, pg_collection=None, p2p_communicator=None)",
        "an evaluation that is cut short by a membership change is run again after the recovery",
        wrap_evaluate,
    ),
    wrap(
        "elastic.straggler",
        "megatron.core.utils:StragglerDetector.__exit__",
        "(self, ex_type, ex_val, ex_tb)",
        "formats and prints a traceback for every exception that leaves a forward pass; ours are no errors",
        wrap_straggler_exit,
    ),
    wrap(
        "elastic.print-rank-last",
        "megatron.training.utils.common_utils:print_rank_last",
        "(message)",
        "keeps the lines on every worker, for the one that becomes the last rank",
        wrap_print_rank_last,
    ),
    use(
        "elastic.tensorboard",
        "megatron.training.global_vars:get_tensorboard_writer",
        "()",
        "gives every worker the writer put in _GLOBAL_TENSORBOARD_WRITER, which keeps what it is told until its worker "
        "is the last rank",
    ),
    wrap(
        "elastic.save-checkpoint",
        "megatron.training.checkpointing:save_checkpoint",
        "(iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far, "
        "checkpointing_context=None, pipeline_rank=None, expert_rank=None, tensor_rank=None, pipeline_parallel=None, "
        "expert_parallel=None, non_persistent_ckpt=False, train_data_iterator=None, "
        "preprocess_common_state_dict_fn=None, release=False, tp_group=None, pp_group=None, dp_cp_group=None, "
        "dp_group=None, expt_dp_group=None, rng_state_key_prefix='')",
        "a save that is cut short by a membership change is run again after the recovery",
        wrap_save_checkpoint,
    ),
    wrap(
        "elastic.save-writes",
        "megatron.core.dist_checkpointing.strategies.async_utils:AsyncRequest.execute_sync",
        "(self)",
        "forgets what a save that was cut short had written; the next one would take it for its own",
        wrap_execute_sync,
    ),
    wrap(
        "elastic.data-loaders",
        "megatron.training.training:build_train_valid_test_data_loaders",
        "(build_train_valid_test_datasets_provider)",
        "reads the samples that the plan gives this cell, and can go back to the start of a step",
        wrap_data_loaders,
    ),
    wrap(
        "elastic.sample",
        "megatron.core.datasets.gpt_dataset:GPTDataset.__getitem__",
        "(self, idx)",
        "0.19.2 keeps the first sample's padding in the mask that it uses for all samples of the process, so losses "
        "depend on who reads what",
        wrap_sample,
    ),
    wrap(
        "elastic.parameter-norm",
        "megatron.training.utils.common_utils:calc_params_l2_norm",
        "(model, force_create_fp32_copy=False)",
        "sums over the model-parallel group, in which stages with more cells count more often after a loss",
        wrap_parameter_norm,
    ),
    wrap(
        "elastic.dataset-builder",
        "megatron.core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder.__init__",
        "(self, cls, sizes, is_built_on_rank, config)",
        "every worker can read samples: it may come to a stage, or a lane, that does",
        wrap_dataset_builder,
    ),
    wrap(
        "elastic.setup-model",
        "megatron.training.training:setup_model_and_optimizer",
        "(model_type, model_provider_func=None, checkpointing_context=None, *, cfg_container=None, pg_collection=None)",
        "remembers how the model was built, to build it again with other layers",
        wrap_setup_model,
    ),
    use(
        "elastic.ddp",
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
        "(self, config, ddp_config, module, disable_bucketing=False, pg_collection=None, full_param_layout=None)",
        "initialises an object a second time, for a model with other layers",
    ),
    use(
        "elastic.get-model",
        "megatron.training.training:get_model",
        "(model_provider_func, model_type=<ModelType.encoder_or_decoder: 1>, wrap_with_ddp=True, config=None, "
        "pg_collection=None)",
        "builds the model of a script's own function again, with other layers",
    ),
    use(
        "elastic.random-streams",
        "megatron.core.tensor_parallel.random:model_parallel_cuda_manual_seed",
        "(seed, te_rng_tracker=False, inference_rng_tracker=False, use_cudagraphable_rng=False, tp_rank=None, "
        "ep_rank=None, etp_rank=None, force_reset_rng=False)",
        "seeds the streams of workers that come together as a cell",
    ),
    wrap(
        "elastic.stage-layers",
        "megatron.core.transformer.transformer_block:get_num_layers_to_build",
        "(config, vp_stage=None, pp_rank=None)",
        "the plan says which layers a stage has",
        wrap_num_layers,
    ),
    wrap(
        "elastic.layer-offset",
        "megatron.core.transformer.transformer_layer:get_transformer_layer_offset",
        "(config, vp_stage=None, pp_rank=None)",
        "the plan says which layers a stage has",
        wrap_layer_offset,
    ),
    use(
        "elastic.block-layers",
        "megatron.core.transformer.spec_utils:build_module",
        "(spec_or_module, *args, **kwargs)",
        "where a block makes its layers, it gets those that the worker has or made ahead, when a model is made again",
    ),
    wrap(
        "elastic.parameter-groups",
        "megatron.core.optimizer:_get_param_groups",
        "(model_chunks, config, config_overrides)",
        "remembers how parameters were sorted, to sort those of a model with other layers",
        wrap_param_groups,
    ),
    wrap(
        "elastic.optimizer-part",
        "megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups",
        "(config, model_chunks, param_groups, per_model_buffers=None, model_parallel_group=None, "
        "data_parallel_group=None, data_parallel_group_gloo=None, data_parallel_group_idx=None, "
        "intra_dist_opt_group=None, distributed_optimizer_instance_id=0, pg_collection=None, "
        "skip_megatron_wrapping=False)",
        "remembers how the optimizer was built; get_megatron_optimizer itself gathers over the world",
        wrap_optimizer_part,
    ),
    wrap(
        "elastic.chain-step",
        "megatron.core.optimizer.optimizer:ChainedOptimizer.step",
        "(self)",
        "reduced gradients are at the backups before the norm lets anybody finish the step",
        wrap_chain_step,
    ),
    wrap(
        "elastic.chain-norm",
        "megatron.core.optimizer.optimizer:ChainedOptimizer.get_grad_norm",
        "(self)",
        "the norm is told to workers that a membership change kept from it",
        wrap_chain_norm,
    ),
    wrap(
        "elastic.gradient-norm",
        "megatron.core.optimizer.clip_grads:get_grad_norm_fp32",
        "(grads_for_norm, norm_type=2, grad_stats_parallel_group=None)",
        "at bitwise, the sum is the same for any cut of the optimizer's state and any order of workers",
        wrap_gradient_norm,
    ),
    wrap(
        "elastic.chain-zeros",
        "megatron.core.optimizer.optimizer:ChainedOptimizer.count_zeros",
        "(self)",
        "so is the number of zeros",
        wrap_chain_zeros,
    ),
    wrap(
        "elastic.chain-update",
        "megatron.core.optimizer.optimizer:ChainedOptimizer.step_with_ready_grads",
        "(self)",
        "from here on the step is finished, whoever is lost; backups begin to make the update too",
        wrap_chain_update,
    ),
    wrap(
        "elastic.part-update",
        "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer.step_with_ready_grads",
        "(self)",
        "the shard is updated, what follows only gathers parameters",
        wrap_part_update,
    ),
    wrap(
        "elastic.layer-numbers",
        "megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
        "(self, config, submodules, layer_number=1, hidden_dropout=None, pg_collection=None, vp_stage=None, "
        "is_mtp_layer=False, add_layer_offset=True, pp_layer_offset=None, name=None)",
        "marks parameters with their layer, for the bucket layout",
        wrap_layer_init,
    ),
    wrap(
        "elastic.reshardable-state",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_fully_reshardable",
        "(self, model_sharded_state_dict, is_loading=False, metadata=None)",
        "gathers state without the padding between buckets, but cuts it at offsets that count the padding: with more "
        "than one bucket it saves other parameters' numbers (upstream issue 504, said in the code there)",
        wrap_reshardable_state,
    ),
    replace(
        "elastic.bucket-layout",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._compute_per_buffer_param_layout",
        "(params, bucket_size, data_parallel_world_size, ddp_config, param_indices=None)",
        "interleaved ZeRO: a layer is a bucket, with room to be cut for fewer replicas",
        "39a707680a7777ee2fff2ca3980edc9c31a9edf37d65159cdcc9109f4e71658e",
        layer_layout,
    ),
    # Random streams: dropout and whatever draws inside of Megatron's tracker.
    wrap(
        "elastic.dropout",
        "torch.nn.functional:dropout",
        "(input, p=0.5, training=True, inplace=False)",
        "a sample's mask does not depend on who runs the sample, and beside which others",
        wrap_dropout,
    ),
    wrap(
        "elastic.fused-dropout",
        "megatron.core.fusions.fused_bias_dropout:bias_dropout_add_fused_train",
        "(x_with_bias, residual, prob)",
        "is compiled with torch's own masks",
        wrap_fused_dropout,
    ),
    wrap(
        "elastic.layer-call",
        "megatron.core.transformer.transformer_layer:TransformerLayer.__call__",
        "(self, *args, **kwargs)",
        "what a layer draws is known by the layer's number",
        wrap_layer_call,
    ),
    wrap(
        "elastic.tracker-fork",
        "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.fork",
        "(self, name='model-parallel-rng')",
        "draws inside of it are made by sample, too, and differ among lanes",
        wrap_fork,
    ),
    wrap(
        "elastic.tracker-get-states",
        "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.get_states",
        "(self)",
        "all kinds of recomputation keep what it gives; the place of the pass goes along",
        wrap_get_states,
    ),
    wrap(
        "elastic.tracker-set-states",
        "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.set_states",
        "(self, states)",
        "and come back to it",
        wrap_set_states,
    ),
    wrap(
        "elastic.torch-checkpoint",
        "torch.utils.checkpoint:checkpoint",
        "(function, *args, use_reentrant=None, context_fn=<function noop_context_fn>, determinism_check='default', "
        "debug=False, early_stop=True, **kwargs)",
        "torch's own recomputation comes back to the place, too",
        wrap_torch_checkpoint,
    ),
    wrap(
        "elastic.checkpoint-arguments",
        "megatron.training.checkpointing:check_checkpoint_args",
        "(checkpoint_args, skip_args=None)",
        "a checkpoint's random streams, and the exponents of its next step's sums, go on where it is loaded",
        wrap_argument_check,
    ),
)
