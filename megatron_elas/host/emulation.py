"""Megatron on emulated accelerators: what its model, its update and its messages wait for.

In force only with ``--elastic-emulate``. The substitutes belong to Megatron's classes and not to a model, so a model
that is made anew for other layers is emulated as the first one is; a layer goes by its number in the whole model.

A unit's forward pass takes its time when the function has returned, its backward pass when the gradient of its input is
there; a forward pass that is run again for recomputation takes its time again. Nothing is added to the graph of
operations: tensors get hooks, which see gradients and leave them as they are.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.training.arguments import core_transformer_config_from_args

from megatron_elas.host import patching
from megatron_elas.host.patching import Seam, wrap
from megatron_elas.host.requirements import describe_job
from megatron_elas.host.shape import describe_model, describe_training, find_uncovered, launch_layers
from megatron_elas.planner.cost_model import estimate_job
from megatron_elas.planner.plan import initial_plan
from megatron_elas.planner.time_model import Tail, find_hardware, spread_layers, stage_tails
from megatron_elas.platform.detect import detect
from megatron_elas.platform.emulated.board import Board, set_clock
from megatron_elas.platform.emulated.device import EmulatedDevice
from megatron_elas.platform.emulated.errors import describe_errors
from megatron_elas.platform.emulated.links import LinkTimes
from megatron_elas.runtime.channels import MIGRATION
from megatron_elas.spec.cluster import Cluster, Link
from megatron_elas.spec.cost import JobCost, UnitCost
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.job_profile import JobProfile, load_job
from megatron_elas.spec.plan import ElasticPlan

logger = logging.getLogger(__name__)

OPTIONS = {
    "--elastic-emulate-model": "elastic_emulate_model",
    "--elastic-emulate-speed": "elastic_emulate_speed",
    "--elastic-emulate-log": "elastic_emulate_log",
}
"""Flags that say more of an emulation -> attributes of args, which are None without them."""
BOARD = "emulation"
"""Name of the board's file in the run's folder."""
TOO_SLOW = 0.02
"""Share of a step's time by which a worker may be too slow before that is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedJob:
    """What is emulated."""

    cluster: Cluster
    cost: JobCost
    """Of as many layers as the run's model has."""
    growth: float
    """Parameters of the model whose time is taken, for one of the run's."""
    speed: float
    plan: ElasticPlan
    """At launch."""
    log: str | None
    sentence: str


def check_flags(args: Any) -> None:
    """Refuse flags that do not go together; of parsed arguments. Raises BadUsage."""
    if args.elastic_emulate is None:
        for flag, name in OPTIONS.items():
            if getattr(args, name) is not None:
                raise BadUsage(f"{flag} needs --elastic-emulate with the profile of a device or cluster")


def settle_emulation(args: Any) -> EmulatedJob | None:
    """What ``--elastic-emulate`` asks for; None without it.

    Args:
        args: Validated.

    Raises:
        BadUsage: A profile cannot be used, or the run not be emulated.
    """
    if args.elastic_emulate is None:
        return None
    if (platform := detect()) != "cpu":
        raise BadUsage(
            f"--elastic-emulate takes the time of accelerators on CPUs, and this machine has '{platform}': leave it out"
        )
    here = os.environ.get("LOCAL_WORLD_SIZE", str(args.world_size))
    if int(here) != args.world_size:
        raise BadUsage(
            f"--elastic-emulate needs all workers on one machine, and here are {here} of {args.world_size}: start the "
            f"job with one node"
        )
    if uncovered := find_uncovered(args):
        raise BadUsage(f"--elastic-emulate does not cover {uncovered[0]}: leave one of them out")
    if not args.use_distributed_optimizer:
        raise BadUsage("--elastic-emulate needs --use-distributed-optimizer: its step is what takes the update's time")
    cluster = find_hardware(args.elastic_emulate, args.world_size)
    own = _describe_run(args)
    model = own if args.elastic_emulate_model is None else load_job(args.elastic_emulate_model)
    cost = estimate_job(_without_recomputation(model) if own.training.recompute == "full" else model, cluster)
    speed = args.elastic_emulate_speed or 1.0
    return EmulatedJob(
        cluster=cluster,
        cost=spread_layers(cost, own.num_layers),
        growth=_parameters(cost) / _parameters(estimate_job(own, cluster)),
        speed=speed,
        plan=initial_plan(own.spec, {}),
        log=args.elastic_emulate_log,
        sentence=f"{args.world_size} workers emulate {cluster.device.name} of {cluster.name} with the layers' times of "
        f"{model.name}" + (f", {speed:g} times as fast" if speed != 1 else ""),
    )


def _describe_run(args: Any) -> JobProfile:
    return JobProfile(
        name="this model",
        spec=describe_job(args, launch_layers(args)),
        shape=describe_model(args, core_transformer_config_from_args(args)),
        training=describe_training(args, ("--transformer-impl",)),
    )


def _without_recomputation(model: JobProfile) -> JobProfile:
    """Its forward passes are run again by Megatron, and take their time again then."""
    return replace(model, training=replace(model.training, recompute="none"))


def _parameters(cost: JobCost) -> int:
    return cost.parameters(0, cost.num_layers)


class Emulation:
    """One worker's."""

    def __init__(self, job: EmulatedJob, worker: int, board: Board | None) -> None:
        """Idle, and not in force yet.

        Args:
            job: What is emulated.
            worker: Own id.
            board: Of the job's workers; None where messages take no time.
        """
        self.job = job
        self.worker = worker
        self.device = EmulatedDevice(worker, job.speed, board)
        self._board = board
        self._chained = board is not None
        self.follow(lambda: job.plan)
        self.optimizing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Entered while the optimizer's own time passes."""
        self._steps = 0
        self._warned = False

    # ------------------------------------------------------------ what takes time

    def run_layer(self, layer: int, entry: torch.Tensor) -> Callable[[], None]:
        """A transformer layer is about to run on ``entry``, (S, B, H). Gives what to call when it has run."""
        return self._run_from("layer", (self.job.cost.layers[layer],), entry)

    def run_head(self, entry: torch.Tensor) -> Callable[[], None]:
        """The same for the output layer and the loss."""
        return self._run_from("head", (self.job.cost.head, self.job.cost.loss), entry)

    def _run_from(self, name: str, units: tuple[UnitCost, ...], entry: torch.Tensor) -> Callable[[], None]:
        samples = entry.shape[1]
        if torch.is_grad_enabled() and entry.requires_grad:
            # Runs when the gradient is complete, which is when all operations that used the tensor are done.
            entry.register_hook(lambda gradient: self.device.run_pass(name, "backward", units, samples))
        return functools.partial(self.device.run_pass, name, "forward", units, samples)

    def embedding_ran(self, output: torch.Tensor, samples: int) -> None:
        """The embedding has made ``output`` of so many samples."""
        units = (self.job.cost.embedding,)
        self.device.run_pass("embedding", "forward", units, samples)
        if torch.is_grad_enabled() and output.grad_fn is not None:
            # After the hooks of ``output`` itself, which is the first layer's entry.
            output.grad_fn.register_hook(lambda *_: self.device.run_pass("embedding", "backward", units, samples))

    def updated(self) -> None:
        """The optimizer's own work of a step is done."""
        plan = self._plan()
        tails = self._tails(plan)
        own = tails[plan.placement.seat(self.worker).stage]
        begin_s = self.device.begin_update(plan.placement.workers)
        self.device.run("exchange", own.exchange_s)
        with self.optimizing():
            self.device.run("optimizer", own.optimizer_s)
        self.device.idle_until(begin_s, max(tail.seconds for tail in tails))
        self._steps += 1
        asked_s, slow_s = self.device.overrun()
        if self._steps == 1:  # longer than any other
            self.device.errors.clear()
        elif slow_s > TOO_SLOW * asked_s and not self._warned:
            self._warned = True
            logger.warning(
                "worker %d computed its tiny tensors %.0f ms too slowly for a step of %.0f ms: its devices are slower "
                "than they should be. Give a lower --elastic-emulate-speed, fewer workers or a smaller model",
                self.worker, 1e3 * slow_s, 1e3 * asked_s,
            )  # fmt: skip

    def _tails(self, plan: ElasticPlan) -> tuple[Tail, ...]:
        stages = plan.placement.stages
        links = [self._slowest_link([cell.workers[0] for cell in stage]) for stage in stages]
        cuts = [0, *(last for _, last in plan.layers)]
        return stage_tails(self.job.cost, cuts, links, [len(stage) for stage in stages])

    def _slowest_link(self, workers: list[int]) -> Link:
        cluster = self.job.cluster
        return cluster.inside if len({cluster.node_of(worker) for worker in workers}) == 1 else cluster.between

    # ------------------------------------------------------------ messages

    def sends(self, tag: int) -> None:
        """What a stage has made is about to be sent."""
        self.device.sends(tag)

    def receives(self, sender: int, tag: int, samples: int) -> None:
        """What another stage has made of so many samples is here; waits for the link's time."""
        link = self.job.cluster.link(sender, self.worker)
        self.device.receives(sender, tag, link.transfer_s(self.job.cost.boundary_bytes * samples))

    def time_moves(self, transport: Any) -> Any:
        """The transport with moves of state that take the links' time."""
        return LinkTimes(transport, (MIGRATION,), self.job.cluster.link, self.job.growth, self.job.speed)

    def begin_pass(self) -> None:
        """All that the next pass needs has come, at a time that is not known better."""
        self.device.begin_pass()

    # ------------------------------------------------------------ life

    def set_clock(self, clock: float) -> float:
        """Have the device run at the next setting that is no slower than this clock, after its latency. Gives it."""
        assert self._board is not None, "clocks need the board of an elastic job"
        clocks = self.job.cluster.device.clock
        return set_clock(self._board, self.worker, clock, clocks, time.monotonic(), self.job.speed)

    def follow(self, plan: Callable[[], ElasticPlan]) -> None:
        """Take layers and seats from this plan, which may change."""
        self._plan = plan
        self._epoch = -1

    def begin_step(self) -> None:
        """A step begins. The first one, and one after a recovery, begins now: what came before is real."""
        if self._epoch != self._plan().epoch:
            self._epoch = self._plan().epoch
            self.device.begin_pass()

    def attach(self) -> None:
        """Put the substitutes in force in this process. Raises WrongVersion when Megatron is not as expected."""
        _current.append(self)
        patching.apply_missing(ROWS if self._chained else (*ROWS, *STOCK_ROWS))

    def close(self) -> None:
        """Tell the errors, and let go of the board."""
        errors = self.device.errors.summarize()
        if errors:
            logger.info("worker %d: %s", self.worker, describe_errors(errors))
        if self.job.log is not None:
            path = Path(f"{self.job.log}.{self.worker}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(asdict(error)) + "\n" for error in errors))
        _current.clear()
        if self._board is not None:
            self._board.close()


_current: list[Emulation] = []


def make_emulation(args: Any, worker: int, run_dir: Path) -> Emulation | None:
    """Of an elastic worker; None without the flag. Raises BadUsage."""
    job = settle_emulation(args)
    return None if job is None else Emulation(job, worker, Board(run_dir / BOARD, args.world_size))


@contextlib.contextmanager
def emulated_stock_run(args: Any) -> Iterator[None]:
    """Inside, stock Megatron is emulated if ``args`` say so. Raises BadUsage."""
    job = settle_emulation(args)
    if job is None:
        yield
        return
    if args.rank == 0:
        print(f"megatron_elas: {job.sentence}; messages between stages take no time without --elastic", flush=True)
    emulation = Emulation(job, args.rank, None)
    emulation.attach()
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
