"""Megatron on emulated accelerators: what its model, its update and its messages wait for.

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
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.training.arguments import core_transformer_config_from_args

from megatron_elas.host.requirements import describe_job
from megatron_elas.host.shape import describe_model, describe_training, find_uncovered, launch_layers
from megatron_elas.host.split_backward import deferred
from megatron_elas.planner.plan import initial_plan
from megatron_elas.planner.time_model import Tail, find_hardware, make_time_model, stage_tails
from megatron_elas.platform.detect import detect
from megatron_elas.platform.emulated.board import Board, set_clock
from megatron_elas.platform.emulated.device import EmulatedDevice
from megatron_elas.platform.emulated.errors import describe_errors
from megatron_elas.platform.emulated.links import LinkTimes
from megatron_elas.runtime.channels import MIGRATION
from megatron_elas.spec.cluster import Link
from megatron_elas.spec.cost import UnitCost
from megatron_elas.spec.emulation import EmulatedTime
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.job_profile import JobProfile
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


def check_flags(args: Any) -> None:
    """Refuse flags that do not go together; of parsed arguments. Raises BadUsage."""
    if args.elastic_emulate is None:
        for flag, name in OPTIONS.items():
            if getattr(args, name) is not None:
                raise BadUsage(f"{flag} needs --elastic-emulate with the profile of a device or cluster")


def settle_emulation(args: Any) -> JobProfile | None:
    """The run that ``--elastic-emulate`` asks for; None without it.

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
    find_hardware(args.elastic_emulate, args.world_size)
    own = JobProfile(
        name="this model",
        spec=describe_job(args, launch_layers(args)),
        shape=describe_model(args, core_transformer_config_from_args(args)),
        training=describe_training(args, ("--transformer-impl",)),
        emulated=EmulatedTime(
            hardware=_absolute(args.elastic_emulate),
            model=None if args.elastic_emulate_model is None else _absolute(args.elastic_emulate_model),
            speed=args.elastic_emulate_speed or 1.0,
        ),
    )
    assert own.emulated is not None
    make_time_model(own, own.emulated)
    return own


def _absolute(name: str) -> str:
    """A file's path as seen from anywhere; the name of a profile as it is."""
    return str(Path(name).absolute()) if name.endswith((".toml", ".json")) else name


class Emulation:
    """One worker's."""

    def __init__(self, own: JobProfile, log: str | None, worker: int, board: Board | None) -> None:
        """Idle, and not in force yet.

        Args:
            own: The run.
            log: Prefix of the file that the errors are written to.
            worker: Own id.
            board: Of the job's workers; None where messages take no time.
        """
        assert own.emulated is not None
        self.time = own.emulated
        self.model = make_time_model(own, own.emulated)
        self.worker = worker
        self.device = EmulatedDevice(worker, own.emulated.speed, board)
        self._log = log
        self._board = board
        plan = initial_plan(own.spec, {})
        self.follow(lambda: plan)
        self.optimizing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Entered while the optimizer's own time passes."""
        self._steps = 0
        self._warned = False

    def __str__(self) -> str:
        model, cluster, speed = self.model, self.model.cluster, self.time.speed
        faster = f", {speed:g} times as fast" if speed != 1 else ""
        return (
            f"{model.workers} workers emulate {cluster.device.name} of {cluster.name} with the layers' times of "
            f"{model.model}{faster}"
        )

    # ------------------------------------------------------------ what takes time

    def run_layer(self, layer: int, entry: torch.Tensor) -> Callable[[], None]:
        """A transformer layer is about to run on ``entry``, (S, B, H). Gives what to call when it has run."""
        return self._run_from("layer", (self.model.waits.layers[layer],), entry)

    def run_head(self, entry: torch.Tensor) -> Callable[[], None]:
        """The same for the output layer and the loss."""
        return self._run_from("head", (self.model.waits.head, self.model.waits.loss), entry)

    def _run_from(self, name: str, units: tuple[UnitCost, ...], entry: torch.Tensor) -> Callable[[], None]:
        samples = entry.shape[1]
        if torch.is_grad_enabled() and entry.requires_grad:
            # Runs when the gradient is complete, which is when all operations that used the tensor are done.
            ran = self._backward_runs(name, units, samples)
            entry.register_hook(lambda gradient: ran())
        return functools.partial(self.device.run_pass, name, "forward", units, samples)

    def _backward_runs(self, name: str, units: tuple[UnitCost, ...], samples: int) -> Callable[[], None]:
        """What to call in the backward pass of the item under way, which may be split."""
        item, run_pass = deferred(), self.device.run_pass
        if item is None:
            return functools.partial(run_pass, name, "backward", units, samples)
        later = item.later

        def ran() -> None:
            run_pass(name, "input_gradient", units, samples)
            later(functools.partial(run_pass, name, "weight_gradient", units, samples))

        return ran

    def embedding_ran(self, output: torch.Tensor, samples: int) -> None:
        """The embedding has made ``output`` of so many samples."""
        units = (self.model.waits.embedding,)
        self.device.run_pass("embedding", "forward", units, samples)
        if torch.is_grad_enabled() and output.grad_fn is not None:
            # After the hooks of ``output`` itself, which is the first layer's entry.
            ran = self._backward_runs("embedding", units, samples)
            output.grad_fn.register_hook(lambda *_: ran())

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
        return stage_tails(self.model.cost, cuts, links, [len(stage) for stage in stages])

    def _slowest_link(self, workers: list[int]) -> Link:
        cluster = self.model.cluster
        return cluster.inside if len({cluster.node_of(worker) for worker in workers}) == 1 else cluster.between

    # ------------------------------------------------------------ messages

    def sends(self, tag: int) -> None:
        """What a stage has made is about to be sent."""
        self.device.sends(tag)

    def receives(self, sender: int, tag: int, samples: int) -> None:
        """What another stage has made of so many samples is here; waits for the link's time."""
        link = self.model.cluster.link(sender, self.worker)
        self.device.receives(sender, tag, link.transfer_s(self.model.cost.boundary_bytes * samples))

    def time_moves(self, transport: Any) -> Any:
        """The transport with moves of state that take the links' time."""
        return LinkTimes(transport, (MIGRATION,), self.model.cluster.link, self.model.growth, self.time.speed)

    def begin_pass(self) -> None:
        """All that the next pass needs has come, at a time that is not known better."""
        self.device.begin_pass()

    # ------------------------------------------------------------ the run

    def set_clock(self, clock: float) -> float:
        """Have the device run at the next setting that is no slower than this clock, after its latency. Gives it."""
        assert self._board is not None, "clocks need the board of an elastic job"
        clocks = self.model.cluster.device.clock
        return set_clock(self._board, self.worker, clock, clocks, time.monotonic(), self.time.speed)

    def follow(self, plan: Callable[[], ElasticPlan]) -> None:
        """Take layers and seats from this plan, which may change."""
        self._plan = plan
        self._epoch = -1

    def begin_step(self) -> None:
        """A step begins. The first one, and one after a recovery or a save, begins now: what came before is real."""
        if self._epoch != self._plan().epoch or self.device.timeline.is_behind:
            self._epoch = self._plan().epoch
            self.device.begin_pass()

    def close(self) -> None:
        """Tell the errors, and let go of the board."""
        errors = self.device.errors.summarize()
        if errors:
            logger.info("worker %d: %s", self.worker, describe_errors(errors))
        if self._log is not None:
            path = Path(f"{self._log}.{self.worker}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(asdict(error)) + "\n" for error in errors))
        if self._board is not None:
            self._board.close()


def make_emulation(args: Any, worker: int, run_dir: Path) -> Emulation | None:
    """Of an elastic worker; None without the flag. Raises BadUsage."""
    own = settle_emulation(args)
    if own is None:
        return None
    return Emulation(own, args.elastic_emulate_log, worker, Board(run_dir / BOARD, args.world_size))
