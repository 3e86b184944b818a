"""Node 0 of a job: the controller, and the agent of the node's own workers, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from megatron_elas.control.agent import Agent
from megatron_elas.control.commands import EndJob, ShowRecovery
from megatron_elas.control.events import Terminate
from megatron_elas.control.launch_options import LaunchOptions, make_job_file, make_requests, make_shared_environ
from megatron_elas.control.messages import AgentHello, ToAgent, Welcome
from megatron_elas.control.run_dir import make_run_dir, write_job_file
from megatron_elas.control.service import ControlService
from megatron_elas.control.signals import handling_signals
from megatron_elas.spec.errors import BadUsage

logger = logging.getLogger(__name__)


async def run_first_node(options: LaunchOptions) -> EndJob:
    """Run the job to its end.

    Raises:
        BadUsage: A port is in use, or preloading failed. Nothing runs any more then.
    """
    node = FirstNode(options)
    with handling_signals(node.terminate), make_run_dir() as run_dir:
        return await node.run(run_dir)


class FirstNode:
    """Connects controller and agent, which know nothing of each other."""

    def __init__(self, options: LaunchOptions) -> None:
        """Prepare; raises BadUsage when the master port is in use."""
        self._options = options
        self._agent: Agent | None = None
        self._start_workers: Callable[[], None] | None = None
        self._welcome = Welcome(
            master_address=options.master_address,
            master_port=_find_port() if options.master_port is None else _check_port(options.master_port),
            run_id=options.run_id,
        )
        self._service = ControlService(
            launch=options.launch,
            token=options.token,
            welcome=self._welcome,
            local_agent=self._order_agent,
            show=self._show,
        )

    def terminate(self, signum: int) -> None:
        """A signal came. The second one is not as patient as the first."""
        if self._agent is not None and self._agent.order_to_stop.done():
            self._agent.stop(signum)
        else:
            self._service.apply(Terminate(signum=signum))

    async def run(self, run_dir: Path) -> EndJob:
        """From listening to the end of the last worker."""
        options = self._options
        host = "127.0.0.1" if options.nnodes == 1 else "0.0.0.0"
        async with contextlib.AsyncExitStack() as stack:
            try:
                port = await stack.enter_async_context(self._service.serve(host, options.controller_port))
            except OSError as error:
                raise BadUsage(_explain_no_port(options, host, error)) from error
            write_job_file(run_dir, make_job_file(options, "127.0.0.1", port))
            agent = await self._launch_agent()
            if agent is not None:
                stack.push_async_callback(agent.close)
                environ = make_shared_environ(options, os.environ)
                requests = make_requests(options, self._welcome, port, run_dir, environ)
                self._agent = agent
                self._start_workers = functools.partial(agent.start, requests)
                self._service.apply(AgentHello(node=0, host=socket.gethostname(), workers=options.workers))
                await stack.enter_async_context(self._vouching(agent))
            return await asyncio.shield(self._service.ended)

    @contextlib.asynccontextmanager
    async def _vouching(self, agent: Agent) -> AsyncIterator[None]:
        """Tell the controller whose pulses beat, as the agents of other nodes do with their heartbeats."""

        async def vouch() -> None:
            while True:
                self._service.vouch(agent.take_beating())
                await asyncio.sleep(self._options.timeouts.heartbeat_interval_s)

        task = asyncio.create_task(vouch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _launch_agent(self) -> Agent | None:
        """The agent, or None when the job was ended while it preloaded."""
        options = self._options
        launching = asyncio.create_task(
            Agent.launch(
                preload=options.preload,
                environ=make_shared_environ(options, os.environ),
                timeouts=options.timeouts,
                report=self._service.hear_of_worker,
            )
        )
        either: set[asyncio.Future[Any]] = {launching, self._service.ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not launching.done():
            launching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await launching
            return None
        return launching.result()

    def _order_agent(self, order: ToAgent) -> None:
        if isinstance(order, Welcome) and self._start_workers is not None:
            self._start_workers()
        elif self._agent is not None:
            self._agent.obey(order)

    def _show(self, recovery: ShowRecovery) -> None:
        """Tell of a recovery. A full disk or a terminal that is gone must not end the job that has just recovered."""
        for write in (_print_recovery, self._log_recovery):
            try:
                write(recovery)
            except OSError as error:
                logger.warning("the recovery of epoch %d could not be written down: %s", recovery.epoch, error)

    def _log_recovery(self, recovery: ShowRecovery) -> None:
        if self._options.log_dir is not None:
            head = {"event": "recovery", "epoch": recovery.epoch, "time_s": time.time()}
            with (self._options.log_dir / "events.jsonl").open("a") as file:
                file.write(json.dumps({**head, **recovery.facts, **recovery.phases_ms}) + "\n")


def _print_recovery(recovery: ShowRecovery) -> None:
    print(recovery.text, flush=True)


def _explain_no_port(options: LaunchOptions, host: str, error: OSError) -> str:
    # asyncio's own text repeats the address.
    reason = os.strerror(error.errno) if error.errno else str(error)
    problem = f"cannot listen on {host}:{options.controller_port} ({reason}): end the job that uses the port, or "
    if options.nnodes == 1:
        return f"{problem}choose another with --controller-port"
    return (
        f"{problem}choose another with --rdzv-endpoint on all nodes; where node 0 of this job runs here already, give "
        f"this node its own --node-rank"
    )


def _find_port() -> int:
    """A free port for the workers' own store."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _check_port(port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise BadUsage(
                f"--master-port {port} cannot be used ({error.strerror}): choose another, or leave it out"
            ) from error
    return port
