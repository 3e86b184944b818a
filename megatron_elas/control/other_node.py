"""Nodes after the first: an agent that reports to the controller on node 0."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.connection import broadcast
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from megatron_elas.control.agent import Agent
from megatron_elas.control.commands import EndJob
from megatron_elas.control.launch_options import (
    LaunchOptions,
    format_host,
    make_job_file,
    make_requests,
    make_shared_environ,
)
from megatron_elas.control.lease import Lease, read_clock
from megatron_elas.control.messages import (
    AgentHeartbeat,
    AgentHello,
    Heard,
    StopAll,
    Welcome,
    WorkerExited,
    WorkerHung,
    decode_to_agent,
    encode,
)
from megatron_elas.control.run_dir import make_run_dir, write_job_file
from megatron_elas.control.signals import handling_signals
from megatron_elas.control.wire import dial_async
from megatron_elas.proof import NotAMember
from megatron_elas.spec.errors import BadUsage, ExitCode, NotStarted

logger = logging.getLogger(__name__)

RETRY_S = 0.5
"""Between attempts to reach node 0, which may be started later."""
RETRY_AGAIN_S = 0.1
"""The same when the connection has ended: the controller may be started again."""


async def run_other_node(options: LaunchOptions) -> EndJob:
    """Run this node's workers until the controller says stop, or cannot be heard any more.

    Raises:
        BadUsage: The controller refuses this node, or preloading failed.
        NotStarted: Node 0 cannot be reached in time, or leaves before the workers are started.
    """
    environ = make_shared_environ(options, os.environ)
    async with contextlib.AsyncExitStack() as stack:
        run_dir = stack.enter_context(make_run_dir())
        job_file = make_job_file(options, options.controller_host, options.controller_port)
        write_job_file(run_dir, job_file)
        node = OtherNode(options)
        agent = await Agent.launch(
            preload=options.preload,
            environ=environ,
            timeouts=options.timeouts,
            report=node.report,
            run_dir=run_dir,
        )
        stack.push_async_callback(agent.close)
        connection = await _reach(options)
        stack.push_async_callback(node.leave)
        order = await node.join(agent, connection)
        if isinstance(order, StopAll):
            return EndJob(exit_code=order.exit_code, sentence=order.sentence)
        write_job_file(run_dir, msgspec.structs.replace(job_file, run_id=order.run_id))
        stack.enter_context(handling_signals(node.terminate))
        agent.start(make_requests(options, order, options.controller_port, run_dir, environ))
        return await node.work()


class OtherNode:
    """Connects this node's agent and the controller.

    Its workers live no longer than its lease (``lease.py``). When its connection ends it comes back, unless node 0 has
    closed its port: then the launcher there has ended, without which nobody trains on. A controller that lived all the
    while has taken the node for lost, and says so; one that was started again goes on with it.
    """

    _agent: Agent
    _connection: ClientConnection
    _lease: Lease

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        loop = asyncio.get_running_loop()
        self._answered: asyncio.Future[Welcome | StopAll] = loop.create_future()
        self._cut_off: asyncio.Future[str] = loop.create_future()
        """Why, as a clause."""
        self._signalled: asyncio.Future[int] = loop.create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._reported: list[WorkerExited | WorkerHung] = []

    def report(self, message: WorkerExited | WorkerHung) -> None:
        """Tell the controller of a worker; one that is started again, too."""
        self._reported.append(message)
        broadcast([self._connection], encode(message))

    async def join(self, agent: Agent, connection: ClientConnection) -> Welcome | StopAll:
        """Introduce the node, and wait until all have come. Raises NotStarted."""
        self._agent, self._connection = agent, connection
        options = self._options
        self._lease = Lease(options.timeouts, read_clock())
        await connection.send(encode(self._hello))
        self._tasks = [asyncio.create_task(self._obey()), asyncio.create_task(self._keep_lease())]
        either: set[asyncio.Future[Any]] = {self._answered, self._cut_off}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._answered.done():
            raise NotStarted(f"{self._cut_off.result()} before the workers were started: see its output")
        return self._answered.result()

    @property
    def _hello(self) -> AgentHello:
        options = self._options
        return AgentHello(node=options.node_rank, host=socket.gethostname(), workers=options.workers)

    def terminate(self, signum: int) -> None:
        """A signal came: end this node's workers; the job goes on without them."""
        if not self._signalled.done():
            self._signalled.set_result(signum)
        self._agent.stop(signum)

    async def work(self) -> EndJob:
        """Obey until there is nothing left to do."""
        agent = self._agent
        reasons: set[asyncio.Future[Any]] = {agent.order_to_stop, self._signalled, self._cut_off}
        await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
        await agent.wait_idle()
        if self._signalled.done():
            signum = self._signalled.result()
            return EndJob(exit_code=128 + signum, sentence=f"ended by {signal.Signals(signum).name}")
        if agent.order_to_stop.done():
            order = agent.order_to_stop.result()
            return EndJob(exit_code=order.exit_code, sentence=order.sentence)
        return EndJob(
            exit_code=ExitCode.CUT_OFF,
            sentence=f"{self._cut_off.result()}: the workers of this node were killed; if the job still runs, it goes "
            f"on without them",
        )

    async def leave(self) -> None:
        """End what runs beside the others."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._connection.close()

    async def _obey(self) -> None:
        while not self._cut_off.done():
            await self._obey_to_the_end()
            if not self._agent.order_to_stop.done() and not self._cut_off.done():
                logger.warning("the controller on node 0 is gone; training goes on")
            if not await self._come_back():
                self._end_workers("the controller on node 0 is gone")
                return

    async def _come_back(self) -> bool:
        """Connect again, for as long as the lease lasts; False when node 0 does not even listen."""
        options = self._options
        while True:
            try:
                connection = await dial_async(_address_of(options), options.token)
                await connection.send(encode(msgspec.structs.replace(self._hello, again=True)))
                sent = 0
                while sent < len(self._reported):  # more may be reported meanwhile
                    await connection.send(encode(self._reported[sent]))
                    sent += 1
            except (ConnectionRefusedError, NotAMember):
                return False
            except (OSError, InvalidHandshake, ConnectionClosed):
                await asyncio.sleep(RETRY_AGAIN_S)
                continue
            self._connection = connection
            return True

    async def _obey_to_the_end(self) -> None:
        """Until the connection ends."""
        try:
            async for text in self._connection:
                match decode_to_agent(text):
                    case Heard(number=number):
                        self._lease.answered(number)
                    case StopAll(signum=signal.SIGKILL, sentence=sentence):
                        self._end_workers(sentence)
                    case (Welcome() | StopAll()) as order if not self._answered.done():
                        self._answered.set_result(order)
                    case order:
                        self._agent.obey(order)
        except ConnectionClosed:
            pass

    async def _keep_lease(self) -> None:
        lease = self._lease
        while (left_s := lease.left_s(read_clock())) > 0:
            heartbeat = AgentHeartbeat(
                node=self._options.node_rank,
                number=lease.ask(read_clock()),
                beating=self._agent.take_beating(),
            )
            broadcast([self._connection], encode(heartbeat))
            await asyncio.sleep(min(left_s, lease.pause_s))
        self._end_workers(
            f"node 0 did not answer for {lease.limit_s:g} s (--heartbeat-timeout-s less --heartbeat-interval-s)"
        )

    def _end_workers(self, why: str) -> None:
        """At once: the others may be going on without this node, so nothing here may write any more.

        In a job that is ending they have their grace period.
        """
        if self._agent.order_to_stop.done() or self._cut_off.done():
            return
        self._cut_off.set_result(why)
        self._agent.kill_all()


async def _reach(options: LaunchOptions) -> ClientConnection:
    """Connect to node 0, waiting for it as long as workers may take to join."""
    address = _address_of(options)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + options.timeouts.join_timeout_s
    while True:
        try:
            return await dial_async(address, options.token)
        except NotAMember as error:
            raise BadUsage(
                f"node 0 at {address} and this node do not share a secret: give all nodes the same --token-file or "
                f"ELAS_TOKEN"
            ) from error
        except (OSError, InvalidHandshake) as error:
            if loop.time() > deadline:
                raise NotStarted(
                    f"node 0 did not answer at {address} within --join-timeout-s={options.timeouts.join_timeout_s:g} "
                    f"({error}): start elasrun there, and check --rdzv-endpoint"
                ) from error
            await asyncio.sleep(RETRY_S)


def _address_of(options: LaunchOptions) -> str:
    return f"ws://{format_host(options.controller_host)}:{options.controller_port}"
