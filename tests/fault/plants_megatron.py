"""Stale objects of Megatron's training loop; see plants."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace

from tests.fault.plants import Plant, alive, blank, entry, member, setting, strange_group
from tests.fault.stale import Scene


class _Child:
    """What multiprocessing keeps of a child that runs."""

    _popen = SimpleNamespace(poll=lambda: None)


def megatron_plants(scene: Scene) -> dict[str, Plant]:
    """By name. Needs a worker that is not on the last rank, in an epoch that began with a loss."""
    import multiprocessing.process

    import torch
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.core.distributed.param_and_grad_buffer import (
        _ParamAndGradBucket,
        _ParamAndGradBucketGroup,
        _ParamAndGradBuffer,
    )
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.rerun_state_machine import (
        Caller,
        RerunDataIterator,
        RerunMode,
        RerunState,
        get_rerun_state_machine,
    )
    from megatron.core.timers import Timers
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.utils import StragglerDetector
    from megatron.training import async_utils, get_args, get_timers, global_vars

    from megatron_elas.host.data import _PlanSampler
    from megatron_elas.host.log_handover import Log, LogWriter
    from megatron_elas.host.model import bucket_groups_of, buffers_of
    from megatron_elas.host.pipeline import Piece
    from megatron_elas.host.split_backward import Deferred, deferring

    attached, host, args, machine = scene.attached, scene.host, get_args(), get_rerun_state_machine()
    model, chain = host._model, host._optimizer
    part = chain.chained_optimizers[0]
    buffer = next(buffers_of(model))
    bucket = buffer.buckets[0]
    bucket_group = next(bucket_groups_of(model))
    own_group = next(iter(part.per_model_bucket_groups.values()))[0]
    attention = scene.of(SelfAttention)[0]
    collection = scene.of(ProcessGroupCollection)[0]
    config = model[0].config
    layout = next(iter(model[0].full_param_layout.layouts.values()))
    timer = get_timers()._timers["interval-time"]
    iterator = scene.of(RerunDataIterator)[0]
    loader = host._train_loader
    route, pipeline, store, access = attached.route, attached.pipeline, scene.session._state.store, host._access
    param = next(model[0].parameters())
    dead = min(scene.dead)
    first = dataclasses.replace(scene.plan, epoch=scene.epoch, placement=attached.initial)

    class Sharer(torch.nn.Module):
        """A module that outlived its model."""

    @contextlib.contextmanager
    def left_running() -> Iterator[None]:
        planted = get_timers()("forward-planted", log_level=0)
        planted.start()
        try:
            yield
        finally:
            planted.stop()
            del get_timers()._timers["forward-planted"]

    def stray_module() -> Sharer:
        module = Sharer()
        module.tp_group = scene.groups[0]
        return module

    def put_off() -> Deferred:
        item = Deferred(print)
        item.later(print)
        return item

    return {
        "a group of parallel_state": Plant(
            "parallel_state",
            "_MODEL_PARALLEL_GROUP holds",
            lambda: setting(_MODEL_PARALLEL_GROUP=(parallel_state, strange_group())),
        ),
        "a group in a table of parallel_state": Plant(
            "parallel_state",
            "_HYBRID_DP_CP_GROUPS holds",
            lambda: entry(parallel_state._HYBRID_DP_CP_GROUPS, 2, strange_group()),
        ),
        "a list of ranks": Plant(
            "parallel_state",
            "_DATA_PARALLEL_GLOBAL_RANKS is",
            lambda: setting(_DATA_PARALLEL_GLOBAL_RANKS=(parallel_state, [0, 1, 2])),
        ),
        "the list of ranks with another name": Plant(
            "parallel_state",
            "_EXPERT_MODEL_PARALLEL_RANKS is",
            lambda: setting(_EXPERT_MODEL_PARALLEL_RANKS=(parallel_state, [77])),
        ),
        "the logical data-parallel size": Plant(
            "parallel_state",
            "the logical data-parallel size is 9",
            lambda: setting(_MPU_DATA_PARALLEL_WORLD_SIZE=(parallel_state, 9)),
        ),
        "a pinned rank": Plant(
            "parallel_state", "is pinned to 1", lambda: setting(_MPU_DATA_PARALLEL_RANK=(parallel_state, 1))
        ),
        "a group of a collection": Plant(
            "group_collections", "as dp", lambda: setting(dp=(collection, strange_group()))
        ),
        "a group of a module": Plant(
            "modules", "as tp_group_planted", lambda: setting(tp_group_planted=(attention, strange_group()))
        ),
        "a group of DDP": Plant(
            "modules", "a DistributedDataParallel has", lambda: setting(dp_group=(model[0], strange_group()))
        ),
        "a module that was let go": Plant(
            "modules", "a Sharer that is not in the model", lambda: alive(stray_module())
        ),
        "a module's cached size": Plant(
            "cached_sizes_and_ranks", "SelfAttention.world_size is 7", lambda: setting(world_size=(attention, 7))
        ),
        "a cached rank that nobody knows of": Plant(
            "cached_sizes_and_ranks",
            "SelfAttention.dp_rank is 1, and the walk does not know",
            lambda: setting(dp_rank=(attention, 1)),
        ),
        "a buffer's replicas": Plant(
            "cached_sizes_and_ranks",
            "data_parallel_world_size is 9",
            lambda: setting(data_parallel_world_size=(buffer, 9)),
        ),
        "a buffer's shards": Plant(
            "cached_sizes_and_ranks",
            "_ParamAndGradBuffer.num_optimizer_shards is 9",
            lambda: setting(num_optimizer_shards=(buffer, 9)),
        ),
        "a layout's shards": Plant(
            "cached_sizes_and_ranks",
            "PerBufferParamLayout.num_optimizer_shards is 9",
            lambda: setting(num_optimizer_shards=(layout, 9)),
        ),
        "a bucket group's replicas": Plant(
            "cached_sizes_and_ranks",
            "instance_size is 9",
            lambda: setting(intra_distributed_optimizer_instance_size=(bucket_group, 9)),
        ),
        "a bucket group's rank, in the optimizer": Plant(
            "cached_sizes_and_ranks",
            "instance_rank is 9",
            lambda: setting(intra_distributed_optimizer_instance_rank=(own_group, 9)),
        ),
        "a bucket group that was let go": Plant(
            "buffers",
            "a _ParamAndGradBucketGroup that nothing in use holds",
            lambda: alive(blank(_ParamAndGradBucketGroup)),
        ),
        "a bucket that was let go": Plant(
            "buffers", "a _ParamAndGradBucket that nothing in use holds", lambda: alive(blank(_ParamAndGradBucket))
        ),
        "a buffer that was let go": Plant(
            "buffers", "a _ParamAndGradBuffer that nothing in use holds", lambda: alive(blank(_ParamAndGradBuffer))
        ),
        "a bucket cut for others": Plant(
            "buffers", "elements of parameters", lambda: setting(param_data=(bucket, bucket.param_data[:-1]))
        ),
        "a bucket outside its buffer": Plant(
            "buffers",
            "the gradients of bucket 0 are not in its buffer",
            lambda: setting(grad_data=(bucket, bucket.grad_data.clone())),
        ),
        "a gradient scale": Plant(
            "buffers", "scales gradients by 0.5", lambda: setting(gradient_scaling_factor=(bucket, 0.5))
        ),
        "cached slices": Plant(
            "buffers",
            "caches 9 slices (grad)",
            lambda: entry(bucket_group.cached_grad_buffer_shard_list, 0, [None] * 9),
        ),
        "a handle of a reduction": Plant(
            "buffers", "handle of a gradient reduction", lambda: setting(grad_reduce_handle=(bucket_group, object()))
        ),
        "an optimizer that was let go": Plant(
            "optimizers", "a DistributedOptimizer that is not in the chain", lambda: alive(blank(DistributedOptimizer))
        ),
        "a chain that was let go": Plant(
            "optimizers", "2 chained optimizers are alive", lambda: alive(blank(ChainedOptimizer))
        ),
        "an inner optimizer that was let go": Plant(
            "optimizers", "a SGD that no optimizer of the chain uses", lambda: alive(torch.optim.SGD([param]))
        ),
        "the schedule's optimizer": Plant(
            "optimizers",
            "the schedule of learning rates steers another",
            lambda: setting(optimizer=(scene.of(OptimizerParamScheduler)[0], part)),
        ),
        "moments of an old master": Plant(
            "optimizers", "keeps moments of 1 tensors", lambda: entry(part.optimizer.state, torch.zeros(1), {})
        ),
        "a parameter's old master": Plant(
            "optimizers", "refers to a master copy", lambda: setting(main_param=(param, torch.zeros(1)))
        ),
        "shards of another chain": Plant(
            "optimizers", "an optimizer that is not in the chain", lambda: setting(_chained=(access, part))
        ),
        "shards of old tensors": Plant(
            "optimizers",
            "tensors that no optimizer steps",
            lambda: setting(_pieces=(access, tuple((p, o, main.clone()) for p, o, main in access._pieces))),
        ),
        "an optimizer cut for others": Plant(
            "optimizers", "the optimizer owns", lambda: setting(_pieces=(access, access._pieces[1:]))
        ),
        "copies cut for others": Plant(
            "optimizers",
            "copies are laid out for",
            lambda: setting(layout=(store, dataclasses.replace(store.layout, pieces=store.layout.pieces[1:]))),
        ),
        "a hook of an old optimizer": Plant(
            "schedules",
            "grad_scale_func is bound to a SGD",
            lambda: setting(grad_scale_func=(config, torch.optim.SGD([param]).step)),
        ),
        "a hook in a list": Plant(
            "schedules",
            "no_sync_func is bound to a Sharer",
            lambda: setting(no_sync_func=(config, [Sharer().zero_grad])),
        ),
        "other timers": Plant("schedules", "other timers", lambda: setting(timers=(config, Timers(0, "minmax")))),
        "a model that evaluates": Plant(
            "schedules", "left the model as it needs it", lambda: setting(training=(host._model[0], False))
        ),
        "a stock communicator": Plant(
            "schedules", f"neighbours {dead} and 0", lambda: alive(blank(P2PCommunicator, prev_rank=dead, next_rank=0))
        ),
        "an item under way": Plant("schedules", "passes are under way", lambda: deferring(Deferred(print))),
        "a weight gradient": Plant("schedules", "1 weight gradients and the like", lambda: alive(put_off())),
        "an early gradient": Plant(
            "schedules", "keeps what came early: [(0, 3)]", lambda: entry(pipeline._early, (0, 3), torch.ones(1))
        ),
        "the route's plan": Plant("schedules", "the route follows a plan", lambda: setting(plan=(route, first))),
        "the route's neighbours": Plant(
            "schedules",
            f"are routed from or to workers [{dead}]",
            lambda: setting(_step=(route, route._step._replace(before=((Piece(dead, 0, 1, 0),),)))),
        ),
        "the route's seat": Plant(
            "schedules", "the route starts from", lambda: setting(seat=(route, dataclasses.replace(route.seat, cell=9)))
        ),
        "the pipeline's route": Plant("schedules", "has another route", lambda: setting(_route=(pipeline, None))),
        "the session's host": Plant(
            "schedules", "do not belong together", lambda: setting(_host=(scene.session, None))
        ),
        "a timer left running": Plant("timers", "timer forward-planted was left running", left_running),
        "a timer's group": Plant(
            "timers", "timer interval-time waits at", lambda: setting(_barrier_group=(timer, strange_group()))
        ),
        "the rerun machine's state": Plant(
            "rerun_machine", "is in state INITIAL_RUN", lambda: setting(state=(machine, RerunState.INITIAL_RUN))
        ),
        "the rerun machine's iteration": Plant(
            "rerun_machine", "is in iteration 77", lambda: setting(current_iteration=(machine, 77))
        ),
        "the rerun machine's mode": Plant(
            "rerun_machine", "rerun machine disabled", lambda: setting(mode=(machine, RerunMode.DISABLED))
        ),
        "the rerun machine's request": Plant(
            "rerun_machine", "a request pending", lambda: setting(rerun_requested=(machine, True))
        ),
        "the rerun machine's rank": Plant(
            "rerun_machine", "counted for rank 77", lambda: entry(machine.stats, Caller(message="loss", rank=77), None)
        ),
        "an iterator that replays": Plant("rerun_machine", "replays", lambda: setting(replaying=(iterator, True))),
        "an iterator's saved batches": Plant(
            "rerun_machine", "keeps 1 items", lambda: setting(saved_microbatches=(iterator, [None]))
        ),
        "the straggler detector's world": Plant(
            "straggler_detector", "of 9", lambda: setting(world=(StragglerDetector._instance, 9))
        ),
        "args.rank": Plant("global_variables", "args.rank and args.world_size", lambda: setting(rank=(args, 77))),
        "args.data_parallel_size": Plant(
            "global_variables", "args.data_parallel_size is 77", lambda: setting(data_parallel_size=(args, 77))
        ),
        "consumed samples": Plant(
            "global_variables", "args.consumed_train_samples is 77", lambda: setting(consumed_train_samples=(args, 77))
        ),
        "a TensorBoard writer": Plant(
            "global_variables",
            "a TensorBoard writer is open",
            lambda: setting(_GLOBAL_TENSORBOARD_WRITER=(global_vars, object())),
        ),
        "the log's TensorBoard writer": Plant(
            "global_variables",
            "the log's TensorBoard writer is open",
            lambda: setting(_writer=(attached.log, object())),
        ),
        "another log's writer": Plant(
            "global_variables",
            "belongs to another log",
            lambda: setting(_GLOBAL_TENSORBOARD_WRITER=(global_vars, LogWriter(blank(Log)))),
        ),
        "a line told long ago": Plant(
            "global_variables", "1 lines that were told", lambda: setting(_lines=(attached.log, [(1, "old")]))
        ),
        "a scalar told long ago": Plant(
            "global_variables", "1 scalars that were told", lambda: setting(_scalars=(attached.log, [(0, print)]))
        ),
        "a W&B run": Plant(
            "global_variables", "a W&B run is open", lambda: setting(_GLOBAL_WANDB_WRITER=(global_vars, object()))
        ),
        "a one-logger": Plant(
            "global_variables", "a one-logger is open", lambda: setting(_GLOBAL_ONE_LOGGER=(global_vars, object()))
        ),
        "the loader's place": Plant("data_loaders", "has handed out 1 items", lambda: setting(_position=(loader, 1))),
        "a stream that was let go": Plant(
            "data_loaders",
            "that no loader reads from",
            lambda: alive(iter(torch.utils.data.DataLoader([0]))),
        ),
        "a sampler that was let go": Plant("data_loaders", "samplers are alive", lambda: alive(blank(_PlanSampler))),
        "a loader's worker process": Plant(
            "data_loaders", "1 child processes", lambda: member(multiprocessing.process._children, _Child())
        ),
        "a save strategy's group": Plant(
            "checkpointing",
            "shares its work over",
            lambda: alive(
                blank(FullyParallelSaveStrategyWrapper, parallelization_group=strange_group(), cached_distribution=None)
            ),
        ),
        "a save strategy's distribution": Plant(
            "checkpointing",
            "remembers who saves what",
            lambda: alive(
                blank(FullyParallelSaveStrategyWrapper, parallelization_group=None, cached_distribution=object())
            ),
        ),
        "a save strategy's plan": Plant(
            "checkpointing",
            "remembers its cached_local_plan",
            lambda: alive(
                blank(
                    TorchDistSaveShardedStrategy,
                    use_cached_ckpt_structure=True,
                    cached_central_plan=None,
                    cached_local_plan=object(),
                )
            ),
        ),
        "an asynchronous save": Plant(
            "checkpointing",
            "1 asynchronous saves",
            lambda: setting(_async_calls_queue=(async_utils, SimpleNamespace(get_num_unfinalized_calls=lambda: 1))),
        ),
    }
