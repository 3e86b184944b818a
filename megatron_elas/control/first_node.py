"""Node 0 of a job: the agent of the node's own workers, and the process that the controller runs in."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec

from megatron_elas.control.agent import Agent
from megatron_elas.control.commands import EndJob
from megatron_elas.control.controller_keeper import ControllerKeeper
from megatron_elas.control.launch_options import LaunchOptions, make_job_file, make_requests, make_shared_environ
from megatron_elas.control.messages import (
    AgentHeartbeat,
    AgentHello,
    Setup,
    Show,
    Terminate,
    ToAgent,
    Welcome,
    WorkerExited,
    WorkerHung,
)
from megatron_elas.control.run_dir import make_run_dir, write_job_file
from megatron_elas.control.signals import handling_signals
from megatron_elas.control.step_log import STEPS_FILE
from megatron_elas.control.wire import BACKLOG
from megatron_elas.spec.errors import BadUsage

logger = logging.getLogger(__name__)

JOURNAL_FILE = "journal"
"""The controller's, in the job's private folder."""
LEAST_SILENCE_S = 5.0
"""A controller is not killed for a shorter silence; the machine may be busy."""


async def run_first_node(options: LaunchOptions) -> EndJob:
    """Run the job to its end.

    Raises:
        BadUsage: A port is in use, or preloading failed. Nothing runs any more then.
    """
    node = FirstNode(options)
    with make_run_dir() as run_dir:
        return await node.run(run_dir)


class FirstNode:
    """Connects controller and agent, which know nothing of each other."""

    def __init__(self, options: LaunchOptions) -> None:
        """Prepare; raises BadUsage when the master port is in use."""
        self._options = options
        self._agent: Agent | None = None
        self._keeper: ControllerKeeper | None = None
        self._start_workers: Callable[[], None] | None = None
        self._shown: set[tuple[str, int, int]] = set()
        self._welcome = Welcome(
            master_address=options.master_address,
            master_port=_find_port() if options.master_port is None else _check_port(options.master_port),
            run_id=options.run_id,
        )

    def terminate(self, signum: int) -> None:
        """A signal came. The second one is not as patient as the first."""
        assert self._keeper is not None, "signals are handled from then on"
        if self._agent is not None and (self._agent.order_to_stop.done() or self._keeper.ended.done()):
            self._agent.stop(signum)
        else:
            self._keeper.say(Terminate(signum=signum))

    async def run(self, run_dir: Path) -> EndJob:
        """From listening to the end of the last worker."""
        options = self._options
        async with contextlib.AsyncExitStack() as stack:
            listener = stack.enter_context(_listen(options))
            port = int(listener.getsockname()[1])
            self._keeper = keeper = self._make_keeper(listener, run_dir)
            stack.push_async_callback(keeper.close)
            stack.enter_context(handling_signals(self.terminate))
            keeper.start()
            write_job_file(run_dir, make_job_file(options, "127.0.0.1", port))
            agent = await self._launch_agent(keeper, run_dir)
            if agent is not None:
                stack.push_async_callback(agent.close)
                environ = make_shared_environ(options, os.environ)
                requests = make_requests(options, self._welcome, port, run_dir, environ)
                self._agent = agent
                self._start_workers = functools.partial(agent.start, requests)
                keeper.say(AgentHello(node=0, host=socket.gethostname(), workers=options.workers))
                await stack.enter_async_context(self._beating(agent, keeper))
                self._greet()
            end = await asyncio.shield(keeper.ended)
            if agent is not None and agent.running and not agent.order_to_stop.done():
                agent.stop(signal.SIGTERM)  # there is no controller that would say so
                await agent.wait_idle()
            facts = dataclasses.asdict(end) | {"exit_code": int(end.exit_code), "workers": options.launch.world_size}
            self._log("end", facts)
            return end

    def _greet(self) -> None:
        """Name the job where an elastic one's output is not on the terminal."""
        options = self._options
        if options.log_dir is not None and options.launch.elastic:
            workers = f"{options.launch.world_size} worker{'s' * (options.launch.world_size != 1)}"
            self._print(f"elasrun: job {options.run_id}: {workers}, output is in {options.log_dir}", "start of the job")

    def _print(self, text: str, what: str) -> None:
        """A full disk or a terminal that is gone must not end the job."""
        try:
            print(text, flush=True)
        except OSError as error:
            logger.warning("the %s could not be written down: %s", what, error)

    def _make_keeper(self, listener: socket.socket, run_dir: Path) -> ControllerKeeper:
        options = self._options
        return ControllerKeeper(
            listener=listener,
            setup=Setup(
                launch=options.launch,
                token=options.token,
                welcome=self._welcome,
                journal=str(run_dir / JOURNAL_FILE),
                steps=None if options.log_dir is None else str(options.log_dir / STEPS_FILE),
                down_since_s=None,
            ),
            # Sooner than the leases of other nodes end, unless they are very short.
            silence_limit_s=max(LEAST_SILENCE_S, options.timeouts.heartbeat_timeout_s / 2),
            on_message=self._hear,
            on_restart=lambda how: self._log("controller_restarted", {"reason": how}),
        )

    @contextlib.asynccontextmanager
    async def _beating(self, agent: Agent, keeper: ControllerKeeper) -> AsyncIterator[None]:
        """Tell the controller whose pulses beat, as the agents of other nodes do."""

        async def beat() -> None:
            for number in itertools.count():
                keeper.say(AgentHeartbeat(node=0, number=number, beating=agent.take_beating()))
                await asyncio.sleep(self._options.timeouts.heartbeat_interval_s)

        task = asyncio.create_task(beat())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _launch_agent(self, keeper: ControllerKeeper, run_dir: Path) -> Agent | None:
        """The agent, or None when the job was ended while it preloaded."""
        options = self._options
        launching = asyncio.create_task(
            Agent.launch(
                preload=options.preload,
                environ=make_shared_environ(options, os.environ),
                timeouts=options.timeouts,
                report=lambda news: keeper.say(self._shorten(news)),
                run_dir=run_dir,
            )
        )
        either: set[asyncio.Future[Any]] = {launching, keeper.ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not launching.done():
            launching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await launching
            return None
        return launching.result()

    def _shorten(self, news: WorkerExited | WorkerHung) -> WorkerExited | WorkerHung:
        """Why workers refuse the job need not be said again where their output is on the same terminal."""
        if isinstance(news, WorkerExited) and news.refusal is not None and self._options.log_dir is None:
            return msgspec.structs.replace(news, refusal=dataclasses.replace(news.refusal, sentence=""))
        return news

    def _hear(self, message: ToAgent | Show) -> None:
        match message:
            case Show():
                self._show(message)
            case Welcome():
                if self._start_workers is not None:
                    start, self._start_workers = self._start_workers, None
                    start()
            case _:
                if self._agent is not None:
                    self._agent.obey(message)

    def _show(self, news: Show) -> None:
        """Tell people and programs, once."""
        key = (news.event, news.epoch, news.worker)
        if key in self._shown:  # said by a controller that was killed right after
            return
        self._shown.add(key)
        if news.text:
            self._print(news.text, f"{news.event} of epoch {news.epoch}")
        self._log(news.event, {"epoch": news.epoch, **news.facts})

    def _log(self, event: str, facts: dict[str, Any]) -> None:
        if self._options.log_dir is None:
            return
        try:
            with (self._options.log_dir / "events.jsonl").open("a") as file:
                file.write(json.dumps({"event": event, "time_s": time.time(), **facts}) + "\n")
        except OSError as error:
            logger.warning("the event '%s' could not be written down: %s", event, error)


def _listen(options: LaunchOptions) -> socket.socket:
    """The socket that the controllers take clients from, one controller after the other. Raises BadUsage."""
    host = "127.0.0.1" if options.nnodes == 1 else "0.0.0.0"
    try:
        return socket.create_server((host, options.controller_port), backlog=BACKLOG)
    except OSError as error:
        raise BadUsage(_explain_no_port(options, host, error)) from error


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
