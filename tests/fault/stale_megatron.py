"""What may be stale in the objects that Megatron's training loop holds."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterator
from typing import Any

from tests.fault.stale import Check, Finding, Scene, attributes


def parallel_state(scene: Scene) -> Iterator[Finding]:
    """Its groups are ours, its lists of ranks and its numbers are those of the plan."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    lists = {}
    for name, value in vars(parallel_state).items():
        held = [value, *(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())]
        for group in held:
            if isinstance(group, dist.ProcessGroup) and not scene.knows(group):
                yield f"parallel_state.{name} holds {group}"
        if name.endswith(("_RANKS", "_RANKS_WITH_CP")) and value is not None:
            lists[name] = value
    for name, ranks in lists.items():
        group = getattr(parallel_state, _group_of_ranks(name))
        if not scene.knows(group):
            continue
        expected = [scene.rank_of.get(worker, -1) for worker in group.members]
        if list(ranks) != expected:
            yield f"parallel_state.{name} is {list(ranks)}, the ranks of its group are {expected}"
    if scene.attached.job.data_parallel != parallel_state._MPU_DATA_PARALLEL_WORLD_SIZE:
        yield (
            f"the logical data-parallel size is {parallel_state._MPU_DATA_PARALLEL_WORLD_SIZE}, the job has "
            f"{scene.attached.job.data_parallel} rows"
        )
    for name, value in vars(parallel_state).items():
        if name.startswith("_MPU_") and name != "_MPU_DATA_PARALLEL_WORLD_SIZE" and value is not None:
            yield f"parallel_state.{name} is pinned to {value}"


def _group_of_ranks(name: str) -> str:
    """The group whose global ranks the list of that name holds."""
    if name == "_PIPELINE_GLOBAL_RANKS":
        return "_PIPELINE_MODEL_PARALLEL_GROUP"
    return name.replace("_GLOBAL_RANKS", "_GROUP").replace("_RANKS", "_GROUP")


def group_collections(scene: Scene) -> Iterator[Finding]:
    """Every ProcessGroupCollection that is alive holds our groups only."""
    import torch.distributed as dist
    from megatron.core.process_groups_config import ProcessGroupCollection

    if not scene.of(ProcessGroupCollection):
        yield "the walk saw no ProcessGroupCollection: it is blind"
    for collection in scene.of(ProcessGroupCollection):
        for name, value in attributes(collection).items():
            for group in value if isinstance(value, list) else [value]:
                if isinstance(group, dist.ProcessGroup) and not scene.knows(group):
                    yield f"a ProcessGroupCollection has {group} as {name}"


def modules(scene: Scene) -> Iterator[Finding]:
    """Every module's process groups are ours, and every module belongs to the model in use."""
    import torch
    import torch.distributed as dist

    model = {id(module) for chunk in scene.host._model for module in chunk.modules()}
    for module in scene.of(torch.nn.Module):
        held = vars(module)
        for name, value in held.items():
            if isinstance(value, dist.ProcessGroup) and not scene.knows(value):
                yield f"a {type(module).__name__} has {value} as {name}"
        if id(module) not in model and any(isinstance(value, dist.ProcessGroup) for value in held.values()):
            yield f"a {type(module).__name__} that is not in the model holds process groups"


NAMES = re.compile(r"(^|_)(rank|world|world_size|group_size|(dp|tp|pp|cp|ep)_size|instance_size)$|optimizer_shards$")
"""Attributes that may hold the number of a group's members, or the own position among them."""

NOT_OF_A_GROUP = {
    ("DistributedInitConfig", "local_rank"),
    ("TransformerBlock", "num_layers_per_pipeline_rank"),
}
"""Given by the launcher, and the number of the stage's layers."""


def cached_sizes_and_ranks(scene: Scene) -> Iterator[Finding]:
    """Numbers that Megatron's objects copied from groups when they were made are those of the groups now."""
    from megatron.core.utils import StragglerDetector

    for thing in scene.of_package("megatron"):
        for name, value in attributes(thing).items():
            if not NAMES.search(name) or isinstance(value, bool) or not isinstance(value, int):
                continue
            kind = type(thing).__name__
            if isinstance(thing, StragglerDetector) or (kind, name) in NOT_OF_A_GROUP:  # see straggler_detector
                continue
            expected = EXPECTED.get((kind, name))
            if expected is None:
                yield f"{kind}.{name} is {value}, and the walk does not know what it should be"
            elif value != (right := expected(scene, thing)):
                yield f"{kind}.{name} is {value}, should be {right}"


def _tensor_parallel(scene: Scene, thing: Any) -> int:
    return scene.attached.job.tensor_parallel


def _replicas(scene: Scene, buffer: Any) -> int:
    return buffer.data_parallel_group.size()


def _sharers(scene: Scene, bucket_group: Any) -> int:
    return bucket_group.intra_distributed_optimizer_instance_group.size()


def _sharer(scene: Scene, bucket_group: Any) -> int:
    return bucket_group.intra_distributed_optimizer_instance_group.rank()


def _stage_replicas(scene: Scene, layout: Any) -> int:
    seat = scene.plan.placement.seat(scene.worker)
    return len(scene.plan.placement.replicas(seat.stage, seat.lane))


EXPECTED: dict[tuple[str, str], Callable[[Scene, Any], int]] = {
    ("SelfAttention", "world_size"): _tensor_parallel,
    ("_ParamAndGradBuffer", "data_parallel_world_size"): _replicas,
    ("_ParamAndGradBuffer", "num_optimizer_shards"): _replicas,
    ("_ParamAndGradBucketGroup", "intra_distributed_optimizer_instance_size"): _sharers,
    ("_ParamAndGradBucketGroup", "intra_distributed_optimizer_instance_rank"): _sharer,
    ("PerBufferParamLayout", "num_optimizer_shards"): _stage_replicas,
}
"""By class and attribute: what it should be."""


def buffers(scene: Scene) -> Iterator[Finding]:
    """Buffers, buckets and bucket groups are cut for the replicas of now; none is left of an earlier cut."""
    from megatron.core.distributed.param_and_grad_buffer import (
        _ParamAndGradBucket,
        _ParamAndGradBucketGroup,
        _ParamAndGradBuffer,
    )

    from megatron_elas.host.model import bucket_groups_of, buffers_of
    from megatron_elas.spec.buckets import bucket_size

    model = scene.host._model
    optimizers = scene.host._optimizer.chained_optimizers
    ours = list(buffers_of(model))
    groups = [
        *bucket_groups_of(model),
        *(group for optimizer in optimizers for part in optimizer.per_model_bucket_groups.values() for group in part),
    ]
    buckets = [bucket for buffer in ours for bucket in buffer.buckets]
    for kind, known in (
        (_ParamAndGradBuffer, ours),
        (_ParamAndGradBucketGroup, groups),
        (_ParamAndGradBucket, buckets),
    ):
        found = scene.of(kind)
        if len(found) < len(known):
            yield f"the walk saw {len(found)} objects of class {kind.__name__}, there are {len(known)}: it is blind"
        for thing in found:
            if not any(thing is other for other in known):
                yield f"a {kind.__name__} that nothing in use holds is alive"
    for buffer in ours:
        replicas = buffer.data_parallel_group.size()
        for bucket in buffer.buckets:
            name = f"bucket {bucket.bucket_id}"
            size = bucket_size(bucket.numel_unpadded, replicas)
            for what, view, whole in (
                ("parameters", bucket.param_data, buffer.param_data),
                ("gradients", bucket.grad_data, buffer.grad_data),
            ):
                if view.numel() != size:
                    yield f"{name} has {view.numel()} elements of {what}, {size} can be cut for {replicas} replicas"
                if view.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
                    yield f"the {what} of {name} are not in its buffer"
            if bucket.gradient_scaling_factor != 1.0 or buffer.gradient_scaling_factor != 1.0:
                yield f"{name} scales gradients by {bucket.gradient_scaling_factor}: losses are weighed already"
    for group in groups:
        sharers = group.intra_distributed_optimizer_instance_group.size()
        for what in ("param", "grad"):
            for views in getattr(group, f"cached_{what}_buffer_shard_list"):
                if views is not None and len(views) != sharers:
                    yield f"a bucket group caches {len(views)} slices ({what}), there are {sharers} replicas"
        if scene.interrupted:
            continue
        if group.grad_reduce_handle is not None:
            yield "a bucket group holds the handle of a gradient reduction"


def optimizers(scene: Scene) -> Iterator[Finding]:
    """The chain's optimizers are the only ones, cut for the replicas of now; everything else refers to them."""
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    host = scene.host
    chain = host._optimizer
    parts = chain.chained_optimizers
    if not scene.of(DistributedOptimizer):
        yield "the walk saw no DistributedOptimizer: it is blind"
    for thing in scene.of(MegatronOptimizer):
        if thing is not chain and not any(thing is part for part in parts):
            yield f"a {type(thing).__name__} that is not in the chain is alive"
    inner = [part.optimizer for part in parts]
    mirrors = [mirror for _, kept in scene.session._pool._mirrors.values() for mirror in kept.values()]
    following = [mirror._optimizer for mirror in mirrors]
    for thing in scene.of(torch.optim.Optimizer):
        if not any(thing is other for other in [*inner, *following]):
            yield f"a {type(thing).__name__} that no optimizer of the chain uses is alive"
    for thing in scene.of(OptimizerParamScheduler):
        if thing.optimizer is not chain:
            yield f"the schedule of learning rates steers another {type(thing.optimizer).__name__}"
    if scene.of(ChainedOptimizer) != [chain]:
        yield f"{len(scene.of(ChainedOptimizer))} chained optimizers are alive"
    masters = {id(param) for optimizer in inner for group in optimizer.param_groups for param in group["params"]}
    for optimizer in inner:
        if lost := sum(id(param) not in masters for param in optimizer.state):
            yield f"a {type(optimizer).__name__} keeps moments of {lost} tensors that it does not step"
    for chunk in host._model:
        for name, param in chunk.named_parameters():
            main = getattr(param, "main_param", None)
            if main is not None and id(main) not in masters:
                yield f"parameter {name} refers to a master copy that no optimizer steps"
    access = host._access
    if access._chained is not chain or any(not any(o is used for used in inner) for _, o, _ in access._pieces):
        yield "shards are read from and written to an optimizer that is not in the chain"
    if any(id(master) not in masters for _, _, master in access._pieces):
        yield "shards are read from and written to tensors that no optimizer steps"
    layout = scene.session._state.catalogue.layout(scene.plan, scene.worker)
    if access.layout() != layout:
        yield f"the optimizer owns {access.layout().numel} elements, the plan gives this worker {layout.numel}"
    store = scene.session._state.store
    if store.layout != layout:
        yield f"copies are laid out for {store.layout.numel} elements, the plan gives this worker {layout.numel}"


def schedules(scene: Scene) -> Iterator[Finding]:
    """Hooks of the model's configuration are bound to what is in use; routes follow the plan."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.utils import get_model_config
    from megatron.training import get_timers

    from megatron_elas.host import split_backward

    attached = scene.attached
    held = [*scene.host._model, scene.host._optimizer]
    for config in scene.of(ModelParallelConfig):
        for name in (
            "no_sync_func",
            "grad_sync_func",
            "param_sync_func",
            "finalize_model_grads_func",
            "grad_scale_func",
        ):
            hooks = getattr(config, name)
            for hook in hooks if isinstance(hooks, list) else [hooks]:
                owner = getattr(hook, "__self__", None)
                if owner is not None and not any(owner is thing for thing in held):
                    yield f"{name} is bound to a {type(owner).__name__} that is not in use"
        if config.timers is not None and config.timers is not get_timers():
            yield "a model configuration has other timers"
    if not all(chunk.training for chunk in scene.host._model) or get_model_config(scene.host._model[0]).timers is None:
        yield "an evaluation left the model as it needs it"
    for thing in scene.of(P2PCommunicator):
        yield f"a stock communicator of the pipeline is alive, with neighbours {thing.prev_rank} and {thing.next_rank}"
    if split_backward.deferred() is not None:
        yield "an item's passes are under way"
    for thing in scene.of(split_backward.Deferred):
        if len(thing):
            yield f"{len(thing)} weight gradients and the like are still put off"
    route, pipeline = attached.route, attached.pipeline
    if pipeline._early:
        yield f"the pipeline keeps what came early: {sorted(pipeline._early)}"
    if route.plan is not scene.plan:
        yield f"the route follows a plan of epoch {route.plan.epoch}"
    if route.seat != scene.plan.placement.seat(scene.worker):
        yield f"the route starts from seat {route.seat}"
    for pass_ in (route._step, route._under_way, *route._evaluations.values()):
        others = {piece.worker for pieces in (*pass_.before, *pass_.after) for piece in pieces}
        if not others <= set(scene.seated):
            yield f"samples are routed from or to workers {sorted(others - set(scene.seated))}"
    if pipeline._route is not route or pipeline._transport is not scene.transport:
        yield "the pipeline has another route or transport"
    if attached.host is not scene.host or scene.host._route is not route or scene.session._host is not scene.host:
        yield "attachment, session and host do not belong together"


LONG_RUNNING_TIMERS = frozenset({"interval-time", "train/interval"})


def timers(scene: Scene) -> Iterator[Finding]:
    """Between steps only the timer between log lines runs, and timers wait at our groups only."""
    from megatron.core.timers import Timer
    from megatron.training import get_timers

    ours = get_timers()._timers
    for name, timer in ours.items():
        if getattr(timer, "_started", False) and name not in LONG_RUNNING_TIMERS:
            yield f"timer {name} was left running"
    for timer in scene.of(Timer):
        group = timer._barrier_group
        if group is not None and not scene.knows(group):
            yield f"timer {timer.name} waits at {group}"


def rerun_machine(scene: Scene) -> Iterator[Finding]:
    """It is between two iterations, at the right one, replays nothing, and says its own rank."""
    import torch.distributed as dist
    from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, RerunState, get_rerun_state_machine

    machine = get_rerun_state_machine()
    if machine.state is not RerunState.NOT_RUNNING_YET:
        yield f"the rerun machine is in state {machine.state.name}"
    # It counts from the iteration it was made in, and the first step puts it to that.
    if machine.current_iteration != scene.session.next_step:
        yield f"the rerun machine is in iteration {machine.current_iteration}, next is {scene.session.next_step}"
    if machine.get_mode() is RerunMode.DISABLED:
        yield "an evaluation left the rerun machine disabled"
    if machine.rerun_requested or machine.checkpoint_requested or machine.restart_again_requested:
        yield "the rerun machine has a request pending"
    for caller in (*machine.validation_counts, *machine.stats):
        if caller.rank not in (0, dist.get_rank()):
            yield f"the rerun machine has counted for rank {caller.rank}"
    for iterator in scene.of(RerunDataIterator):
        if iterator.replaying:
            yield "a data iterator replays"
        saved, items = len(iterator.saved_microbatches), scene.plan.items_of(scene.worker)
        if iterator.iterable is scene.host._train_loader and saved not in (0, len(items)):
            yield f"the data iterator keeps {saved} items, this cell runs {len(items)}"


def straggler_detector(scene: Scene) -> Iterator[Finding]:
    """When it is in use (--log-straggler), its rank and world are those of the plan."""
    from megatron.core.utils import StragglerDetector

    detector = StragglerDetector._instance  # the one of the process: calling the class would reset it
    if detector.world and (detector.world, detector.rank) != (len(scene.seated), scene.rank_of[scene.worker]):
        yield f"the straggler detector says rank {detector.rank} of {detector.world}"


def global_variables(scene: Scene) -> Iterator[Finding]:
    """``args`` say the rank and world of the plan, and the writers of logs are on the last rank only."""
    from megatron.training import get_args
    from megatron.training.global_vars import get_one_logger, get_tensorboard_writer, get_wandb_writer

    from megatron_elas.host.log_handover import PLACES, LogWriter

    args = get_args()
    if (args.rank, args.world_size) != (scene.rank_of[scene.worker], len(scene.seated)):
        yield f"args.rank and args.world_size are {args.rank} and {args.world_size}"
    if args.data_parallel_size != scene.attached.job.data_parallel:
        yield f"args.data_parallel_size is {args.data_parallel_size}, there are {scene.attached.job.data_parallel} rows"
    if args.consumed_train_samples not in (
        scene.host.consumed_samples(scene.session.next_step), scene.host.consumed_samples(scene.session.next_step - 1)
    ):  # fmt: skip
        yield f"args.consumed_train_samples is {args.consumed_train_samples}"
    log = scene.attached.log
    shared = get_tensorboard_writer()
    if isinstance(shared, LogWriter) and shared._log is not log:
        yield "Megatron's TensorBoard writer belongs to another log"
    newest = scene.session._activity - 1  # the last one that has begun, and with it told all before
    if old := [mark for mark, _ in log._lines if mark // PLACES < newest]:
        yield f"the log keeps {len(old)} lines that were told long ago"
    if old := [region for region, _ in log._scalars if region < newest]:
        yield f"the log keeps {len(old)} scalars that were told long ago"
    if scene.rank_of[scene.worker] != len(scene.seated) - 1:
        for what, writer in (
            ("a TensorBoard writer", None if isinstance(shared, LogWriter) else shared),
            ("the log's TensorBoard writer", log._writer), ("a W&B run", get_wandb_writer()),
            ("a one-logger", get_one_logger()),
        ):  # fmt: skip
            if writer is not None:
                yield f"{what} is open on rank {scene.rank_of[scene.worker]}, the last is {len(scene.seated) - 1}"


def data_loaders(scene: Scene) -> Iterator[Finding]:
    """The training loader stands at the end of the step just committed; no stream of an earlier place is left."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

    from megatron_elas.host.data import SeekableLoader, _PlanSampler

    loaders = scene.of(SeekableLoader)
    train = scene.host._train_loader
    if train is not None and not any(train is loader for loader in loaders):
        yield "the walk did not see the training loader: it is blind"
    if train is not None and not scene.host._realign and train._stream is not None:
        items = scene.plan.items_of(scene.worker)
        step = scene.session.next_step - 1
        if (train._consumed, train._position) != (scene.host.consumed_samples(step), len(items)):
            yield (
                f"the training loader has handed out {train._position} items behind sample {train._consumed}, "
                f"step {step} has {len(items)} behind sample {scene.host.consumed_samples(step)}"
            )
    streams = [loader._stream for loader in loaders if loader._stream is not None]
    for iterator in scene.of(_BaseDataLoaderIter):
        if not any(iterator is stream for stream in streams):
            yield f"a {type(iterator).__name__} that no loader reads from is alive"
    if (count := len(scene.of(_PlanSampler))) > len(streams):
        yield f"{count} samplers are alive, {len(streams)} loaders read"
    workers = sum(len(iterator._workers) for iterator in scene.of(_MultiProcessingDataLoaderIter))
    if (count := len(multiprocessing.active_children())) != workers:
        yield f"{count} child processes are alive, the loaders have {workers} workers"


def checkpointing(scene: Scene) -> Iterator[Finding]:
    """Strategies kept between saves share the work over our groups, and remember no earlier cut."""
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.training import async_utils

    for strategy in scene.of(FullyParallelSaveStrategyWrapper):
        group = strategy.parallelization_group
        if group is not None and not scene.knows(group):
            yield f"a save strategy shares its work over {group}"
        if strategy.cached_distribution is not None:
            yield "a save strategy remembers who saves what"
    for strategy in scene.of(TorchDistSaveShardedStrategy):
        for name in ("cached_central_plan", "cached_local_plan"):
            # The last save's are always there; they are read only where a constant structure is assumed.
            if strategy.use_cached_ckpt_structure and getattr(strategy, name) is not None:
                yield f"a save strategy remembers its {name}"
    queue = async_utils._async_calls_queue
    if queue is not None and queue.get_num_unfinalized_calls():
        yield f"{queue.get_num_unfinalized_calls()} asynchronous saves are not finished"


CHECKS: tuple[Check, ...] = (
    parallel_state, group_collections, modules, cached_sizes_and_ranks, buffers, optimizers, schedules, timers,
    rerun_machine, straggler_detector, global_variables, data_loaders, checkpointing,
)  # fmt: skip
