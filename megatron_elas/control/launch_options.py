"""What one ``elasrun`` was asked to do, checked, and the environment its workers get."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_elas.config import ControlTimeouts
from megatron_elas.control.environment import WorkerEnvironment
from megatron_elas.control.launch import CostSource, Launch, Rebalance
from megatron_elas.control.messages import Welcome
from megatron_elas.control.run_dir import JobFile
from megatron_elas.control.starter_messages import StartWorker, Target
from megatron_elas.spec.policy import RunningPolicy

ELASTIC_FLAG = "--elastic"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Of this node."""

    nnodes: int
    node_rank: int
    workers_per_node: int
    controller_host: str
    """Node 0 as the others see it."""
    controller_port: int
    """0 lets node 0 choose, when it is the only one."""
    master_address: str
    master_port: int | None
    """None lets node 0 choose."""
    run_id: str
    """Empty in a dry run unless it was given."""
    token: str
    target: Target
    preload: str | None
    fresh: bool
    """Workers are new Python processes instead of forks."""
    log_dir: Path | None
    exit_code_file: Path | None
    """Written by node 0 when the job has ended."""
    dry_run: bool
    """Only say what would be started."""
    timeouts: ControlTimeouts
    cluster: str
    """See ``Launch``."""
    costs: CostSource
    policy: RunningPolicy = "ours"
    rebalances: tuple[Rebalance, ...] = ()

    @property
    def launch(self) -> Launch:
        """What the controller must know."""
        return Launch(
            nnodes=self.nnodes,
            workers_per_node=self.workers_per_node,
            timeouts=self.timeouts,
            elastic=says_elastic(self.target.arguments),
            cluster=self.cluster,
            costs=self.costs,
            policy=self.policy,
            rebalances=self.rebalances,
        )

    @property
    def workers(self) -> tuple[int, ...]:
        """Of this node."""
        return self.launch.workers_of(self.node_rank)


def says_elastic(arguments: Sequence[str]) -> bool:
    """Whether ``--elastic`` is among a script's arguments, or in a file that they name with ``@``, as ours may be."""
    for argument in arguments:
        if argument == ELASTIC_FLAG:
            return True
        if argument.startswith("@"):
            with contextlib.suppress(OSError, UnicodeDecodeError):  # its reader has the sentence for that
                if ELASTIC_FLAG in Path(argument[1:]).read_text(encoding="utf-8").split():
                    return True
    return False


def make_shared_environ(options: LaunchOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment, with what all workers share; also used while preloading.

    One thread per process unless said otherwise when a node runs several, as torchrun does.
    """
    shared = dict(environ)
    if options.workers_per_node > 1:
        shared.setdefault("OMP_NUM_THREADS", "1")
    shared.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    return shared


def make_requests(
    options: LaunchOptions, welcome: Welcome, controller_port: int, run_dir: Path, environ: Mapping[str, str]
) -> list[StartWorker]:
    """One per worker of this node."""
    host = options.controller_host if options.node_rank else "127.0.0.1"
    requests = []
    for local_rank, worker in enumerate(options.workers):
        own = WorkerEnvironment(
            controller=f"ws://{format_host(host)}:{controller_port}",
            token=options.token,
            worker=worker,
            # On one node what dies together is a process; of several nodes, a node.
            domain=f"node{options.node_rank}" if options.nnodes > 1 else f"worker{worker}",
            run_dir=str(run_dir),
            heartbeat_s=options.timeouts.heartbeat_interval_s,
            progress_s=options.timeouts.progress_timeout_s,
            log_dir=None if options.log_dir is None else str(options.log_dir),
        )
        requests.append(
            StartWorker(
                worker=worker,
                target=options.target,
                environ={**environ, **_torchrun_environ(options, welcome, worker, local_rank), **own.to_environ()},
                log_path=str(options.log_dir / f"worker{worker}.log") if options.log_dir is not None else None,
                fresh=options.fresh,
            )
        )
    return requests


def _torchrun_environ(options: LaunchOptions, welcome: Welcome, worker: int, local_rank: int) -> dict[str, str]:
    """The variables that torchrun sets. Source: torch.distributed.elastic's local_elastic_agent."""
    world_size, nnodes = str(options.launch.world_size), str(options.nnodes)
    return {
        "LOCAL_RANK": str(local_rank),
        "RANK": str(worker),
        "GROUP_RANK": str(options.node_rank),
        "ROLE_RANK": str(worker),
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": str(options.workers_per_node),
        "WORLD_SIZE": world_size,
        "GROUP_WORLD_SIZE": nnodes,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": welcome.master_address,
        "MASTER_PORT": str(welcome.master_port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": welcome.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def make_job_file(options: LaunchOptions, host: str, port: int) -> JobFile:
    """What ``elas`` finds on this node."""
    return JobFile(
        run_id=options.run_id,
        started_s=time.time(),
        address=f"ws://{format_host(host)}:{port}",
        token=options.token,
        command=(options.target.name, *options.target.arguments),
        log_dir=None if options.log_dir is None else str(options.log_dir),
    )


def format_host(host: str) -> str:
    """As it is written in an address: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
