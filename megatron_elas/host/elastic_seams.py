"""Where elasticity attaches to Megatron: every row is in force only with ``--elastic``.

Passed as arguments, not listed here: ``pretrain(pg_collection=, p2p_communicator=)`` and the default process group,
which is made before Megatron would make it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from megatron_elas.host.attachment import Attachment, attachment
from megatron_elas.host.buckets import LAYER_ATTRIBUTE, compact_index, layer_buckets
from megatron_elas.host.data import SeekableLoader
from megatron_elas.host.optimizer import OptimizerFactory
from megatron_elas.host.patching import replace, use, wrap
from megatron_elas.host.schedule import route_schedule
from megatron_elas.host.training import MegatronHost
from megatron_elas.planner.plan import share_items
from megatron_elas.spec.errors import EpochChanged


def _wrap_train_step(original: Any) -> Any:
    @functools.wraps(original)
    def train_step(
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        config: Any,
        forward_backward_func: Any,
        iteration: int,
        **kwargs: Any,
    ) -> Any:
        attached = attachment()
        if attached.host is None:
            attached.host = _make_host(attached, model, optimizer, opt_param_scheduler, iteration)
            attached.session.attach(attached.host, iteration)
        host = attached.host
        host.check_counters(iteration)

        def body(step: int) -> Any:
            host.begin_step(step, data_iterator)
            attached.samples.clear()
            attached.counter.begin(step)
            outcome = original(
                forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config,
                forward_backward_func, iteration=step, **kwargs,
            )  # fmt: skip
            attached.counter.begin(-1)
            host.end_step()
            if attached.sample_log is not None:
                plan, seat = attached.route.plan, attached.route.seat
                attached.sample_log.write(plan.epoch, step, seat.stage, attached.samples)
            return outcome

        outcome = attached.session.run_step(iteration, body)
        attached.next_step = iteration + 1
        return outcome

    return train_step


def _make_host(attached: Attachment, model: Any, optimizer: Any, scheduler: Any, first_step: int) -> MegatronHost:
    assert attached.factory is not None, "Megatron has built no distributed optimizer"
    return MegatronHost(
        worker=attached.worker,
        initial=attached.initial,
        communicator=attached.communicator,
        route=attached.route,
        pipeline=attached.pipeline,
        factory=attached.factory,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        train_loader=lambda: attached.loaders.get("train"),
        first_step=first_step,
    )


def _wrap_schedule_lookup(original: Any) -> Any:
    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        attached = attachment()
        return route_schedule(
            original(*args, **kwargs),
            attached.route,
            attached.pipeline,
            attached.counter,
            attached.job.data_parallel,
            bool(get_args().calculate_per_token_loss),
        )

    return get_forward_backward_func


def _wrap_backward_step(original: Any) -> Any:
    @functools.wraps(original)
    def backward_step(*args: Any, **kwargs: Any) -> Any:
        attachment().counter.backward()
        return original(*args, **kwargs)

    return backward_step


def _wrap_evaluate(original: Any) -> Any:
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
            attached.strike(attached.next_step - 1, "evaluate", None)
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

        outcome = attached.session.run_between(body)
        if loader is not None:
            loader.mark += margs.consumed_valid_samples - consumed
        return outcome

    return evaluate


def _wrap_straggler_exit(original: Any) -> Any:
    @functools.wraps(original)
    def __exit__(self: Any, ex_type: Any, ex_val: Any, ex_tb: Any) -> Any:
        if ex_type is not None and issubclass(ex_type, EpochChanged):
            return original(self, None, None, None)
        return original(self, ex_type, ex_val, ex_tb)

    return __exit__


def _wrap_save_checkpoint(original: Any) -> Any:
    @functools.wraps(original)
    def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
        attached = attachment()

        def body() -> Any:
            attached.strike(iteration - 1, "save", None)
            return original(iteration, *args, **kwargs)

        return attached.session.run_between(body)

    return save_checkpoint


def _wrap_data_loaders(original: Any) -> Any:
    @functools.wraps(original)
    def build_train_valid_test_data_loaders(build_train_valid_test_datasets_provider: Any) -> Any:
        from megatron.training import get_args

        attached, args = attachment(), get_args()
        train, valid, test = original(build_train_valid_test_datasets_provider)
        train_sizes = args.micro_batch_size, args.global_batch_size
        eval_sizes = args.eval_micro_batch_size, args.eval_global_batch_size
        train = _make_seekable(attached, "train", train, *train_sizes, args.consumed_train_samples)
        if valid is not None:
            valid = [_make_seekable(attached, "valid", v, *eval_sizes, args.consumed_valid_samples) for v in valid]
        test = _make_seekable(attached, "test", test, *eval_sizes, 0)
        return train, valid, test

    return build_train_valid_test_data_loaders


def _make_seekable(
    attached: Attachment, split: str, stock: Any, micro_batch_size: int, batch_size: int, consumed: int
) -> Any:
    """A loader over the same dataset that follows the plan; None for None."""
    if stock is None:
        return None
    num_items = batch_size // micro_batch_size

    def items() -> tuple[int, ...]:
        plan, seat = attached.route.plan, attached.route.seat
        if split == "train":
            return plan.items[seat.stage][seat.cell]
        return share_items(num_items, len(plan.placement.stages[seat.stage]))[seat.cell]

    def observe(ids: tuple[int, ...]) -> None:
        attached.samples.extend(ids)

    attached.loaders[split] = SeekableLoader(
        dataset=stock.dataset,
        micro_batch_size=micro_batch_size,
        batch_size=batch_size,
        consumed=consumed,
        items=items,
        make_loader=functools.partial(_like, stock),
        observe=observe if split == "train" else None,
    )
    return attached.loaders[split]


def _like(stock: Any, batch_sampler: Any) -> Any:
    """A torch data loader with the stock one's settings and another sampler."""
    return torch.utils.data.DataLoader(
        stock.dataset,
        batch_sampler=batch_sampler,
        num_workers=stock.num_workers,
        collate_fn=stock.collate_fn,
        pin_memory=stock.pin_memory,
        worker_init_fn=stock.worker_init_fn,
        generator=stock.generator,
    )


def _wrap_optimizer_part(original: Any) -> Any:
    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> Any:
        attached = attachment()
        if attached.factory is None:
            attached.factory = OptimizerFactory(original)
        return attached.factory.record(*args, **kwargs)

    return build


def _wrap_optimizer_step(original: Any) -> Any:
    @functools.wraps(original)
    def step_with_ready_grads(self: Any) -> Any:
        attached = attachment()
        if attached.counter.step >= 0:
            attached.strike(attached.counter.step, "optimizer", None)
        attached.session.mark_dirty()
        return original(self)

    return step_with_ready_grads


def _wrap_layer_init(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for param in self.parameters():
            setattr(param, LAYER_ATTRIBUTE, self.layer_number)

    return __init__


def _wrap_reshardable_state(original: Any) -> Any:
    @functools.wraps(original)
    def sharded_param_state_fully_reshardable(self: Any, *args: Any, **kwargs: Any) -> Any:
        laid_out = [buffer.param_index_map for buffer in self.buffers]
        for buffer in self.buffers:
            starts = [bucket.offset for bucket in buffer.buckets]
            unpadded = [bucket.numel_unpadded for bucket in buffer.buckets]
            buffer.param_index_map = compact_index(buffer.param_index_map, starts, unpadded)
        try:
            return original(self, *args, **kwargs)
        finally:
            for buffer, index in zip(self.buffers, laid_out, strict=True):
                buffer.param_index_map = index

    return sharded_param_state_fully_reshardable


def _layer_layout(
    params: Any, bucket_size: Any, data_parallel_world_size: int, ddp_config: Any, param_indices: Any = None
) -> Any:
    from megatron.core.optimizer.param_layout import PerBufferParamLayout

    layout = layer_buckets(params, data_parallel_world_size)
    # Megatron makes buckets as parameters name them and takes the end of the last range as the size of the buffer:
    # the extra range makes room, and no bucket.
    room = (layout.buckets[-1][1], layout.numel)
    return PerBufferParamLayout(
        param_index_map=layout.index,
        bucket_indices=[*layout.buckets, room],
        per_bucket_numel_unpadded=layout.unpadded,
        param_indices=param_indices if param_indices is not None else [],
        num_optimizer_shards=data_parallel_world_size,
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
        _wrap_train_step,
    ),
    wrap(
        "elastic.schedule",
        "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        "(pp_size=None, vp_size=None, schedule_pg_collection=None)",
        "the stock schedule runs the micro-batches that the plan gives this cell, with exact weights",
        _wrap_schedule_lookup,
    ),
    wrap(
        "elastic.backward-step",
        "megatron.core.pipeline_parallel.schedules:backward_step",
        "(input_tensor, output_tensor, output_tensor_grad, config)",
        "counts backward passes for fault scripts",
        _wrap_backward_step,
    ),
    wrap(
        "elastic.evaluate",
        "megatron.training.training:evaluate",
        "(forward_step_func, data_iterator, model, process_non_loss_data_func, config, verbose=False, "
        "non_loss_data_func=None, eval_iters=None, pg_collection=None, p2p_communicator=None)",
        "an evaluation that is cut short by a membership change is run again after the recovery",
        _wrap_evaluate,
    ),
    wrap(
        "elastic.straggler",
        "megatron.core.utils:StragglerDetector.__exit__",
        "(self, ex_type, ex_val, ex_tb)",
        "formats and prints a traceback for every exception that leaves a forward pass; ours are no errors",
        _wrap_straggler_exit,
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
        _wrap_save_checkpoint,
    ),
    wrap(
        "elastic.data-loaders",
        "megatron.training.training:build_train_valid_test_data_loaders",
        "(build_train_valid_test_datasets_provider)",
        "reads the samples that the plan gives this cell, and can go back to the start of a step",
        _wrap_data_loaders,
    ),
    wrap(
        "elastic.optimizer-part",
        "megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups",
        "(config, model_chunks, param_groups, per_model_buffers=None, model_parallel_group=None, "
        "data_parallel_group=None, data_parallel_group_gloo=None, data_parallel_group_idx=None, "
        "intra_dist_opt_group=None, distributed_optimizer_instance_id=0, pg_collection=None, "
        "skip_megatron_wrapping=False)",
        "remembers how the optimizer was built; get_megatron_optimizer itself gathers over the world",
        _wrap_optimizer_part,
    ),
    wrap(
        "elastic.optimizer-step",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.step_with_ready_grads",
        "(self)",
        "from here to the end of the step the state in use is no complete version",
        _wrap_optimizer_step,
    ),
    wrap(
        "elastic.layer-numbers",
        "megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
        "(self, config, submodules, layer_number=1, hidden_dropout=None, pg_collection=None, vp_stage=None, "
        "is_mtp_layer=False, add_layer_offset=True, pp_layer_offset=None, name=None)",
        "marks parameters with their layer, for the bucket layout",
        _wrap_layer_init,
    ),
    wrap(
        "elastic.reshardable-state",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_fully_reshardable",
        "(self, model_sharded_state_dict, is_loading=False, metadata=None)",
        "gathers state without the padding between buckets, but cuts it at offsets that count the padding: with more "
        "than one bucket it saves other parameters' numbers (upstream issue 504, said in the code there)",
        _wrap_reshardable_state,
    ),
    replace(
        "elastic.bucket-layout",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._compute_per_buffer_param_layout",
        "(params, bucket_size, data_parallel_world_size, ddp_config, param_indices=None)",
        "interleaved ZeRO: a layer is a bucket, with room to be cut for fewer replicas",
        "39a707680a7777ee2fff2ca3980edc9c31a9edf37d65159cdcc9109f4e71658e",
        _layer_layout,
    ),
)
