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
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.connection import broadcast
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from megatron_elas.control.agent import Agent
from megatron_elas.control.commands import EndJob
from megatron_elas.control.ending import exit_code_of
from megatron_elas.control.launch_options import (
    LaunchOptions,
    format_host,
    make_job_file,
    make_requests,
    make_shared_environ,
)
from megatron_elas.control.messages import (
    AgentHello,
    StopAll,
    ToAgent,
    Welcome,
    WorkerExited,
    decode_to_agent,
    encode,
)
from megatron_elas.control.run_dir import make_run_dir, write_job_file
from megatron_elas.control.signals import handling_signals
from megatron_elas.control.wire import OPTIONS, make_headers
from megatron_elas.spec.errors import BadUsage, NotStarted

logger = logging.getLogger(__name__)

RETRY_S = 0.5
"""Between attempts to reach node 0, which may be started later."""


async def run_other_node(options: LaunchOptions) -> EndJob:
    """Run this node's workers until the controller says stop, or they have all ended without it.

    Raises:
        BadUsage: The controller refuses this node, or preloading failed.
        NotStarted: Node 0 cannot be reached in time, or leaves before the workers are started.
    """
    outbox: list[ClientConnection] = []

    def report(message: WorkerExited) -> None:
        broadcast(outbox, encode(message))

    environ = make_shared_environ(options, os.environ)
    signalled: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with contextlib.AsyncExitStack() as stack:
        run_dir = stack.enter_context(make_run_dir())
        job_file = make_job_file(options, options.controller_host, options.controller_port)
        write_job_file(run_dir, job_file)
        agent = await Agent.launch(
            preload=options.preload, environ=environ, grace_s=options.timeouts.grace_s, report=report
        )
        stack.push_async_callback(agent.close)
        connection = await stack.enter_async_context(await _reach(options))
        outbox.append(connection)
        await connection.send(
            encode(AgentHello(node=options.node_rank, host=socket.gethostname(), workers=options.workers))
        )
        order = await _receive(connection)
        if isinstance(order, Welcome):
            write_job_file(run_dir, msgspec.structs.replace(job_file, run_id=order.run_id))
            stack.enter_context(handling_signals(lambda signum: _note_signal(agent, signalled, signum)))
            agent.start(make_requests(options, order, options.controller_port, run_dir, environ))
            return await _work(agent, connection, signalled)
        assert isinstance(order, StopAll), order
        return EndJob(exit_code=order.exit_code, sentence=order.sentence)


def _note_signal(agent: Agent, signalled: asyncio.Future[int], signum: int) -> None:
    """End this node's workers; the job goes on without them."""
    if not signalled.done():
        signalled.set_result(signum)
    agent.stop(signum)


async def _work(agent: Agent, connection: ClientConnection, signalled: asyncio.Future[int]) -> EndJob:
    """Obey until there is nothing left to do."""
    obeying = asyncio.create_task(_obey(agent, connection))
    reasons: set[asyncio.Future[Any]] = {obeying, agent.order_to_stop, signalled}
    await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
    await agent.wait_idle()
    obeying.cancel()
    await asyncio.wait({obeying})
    if signalled.done():
        return EndJob(
            exit_code=128 + signalled.result(), sentence=f"ended by {signal.Signals(signalled.result()).name}"
        )
    if agent.order_to_stop.done():
        order = agent.order_to_stop.result()
        return EndJob(exit_code=order.exit_code, sentence=order.sentence)
    return EndJob(exit_code=exit_code_of(agent.first_failure), sentence="the controller on node 0 is gone")


async def _obey(agent: Agent, connection: ClientConnection) -> None:
    try:
        async for text in connection:
            agent.obey(decode_to_agent(text))
    except ConnectionClosed:
        pass
    if not agent.order_to_stop.done():
        logger.warning("the controller on node 0 is gone; this node's workers go on until they need it")


async def _receive(connection: ClientConnection) -> ToAgent:
    try:
        return decode_to_agent(await connection.recv())
    except ConnectionClosed as error:
        raise NotStarted(f"node 0 closed the connection ({error}): see its output") from error


async def _reach(options: LaunchOptions) -> ClientConnection:
    """Connect to node 0, waiting for it as long as workers may take to join."""
    address = f"ws://{format_host(options.controller_host)}:{options.controller_port}"
    loop = asyncio.get_running_loop()
    deadline = loop.time() + options.timeouts.join_timeout_s
    while True:
        try:
            return await connect(address, additional_headers=make_headers(options.token), proxy=None, **OPTIONS)
        except InvalidStatus as error:
            raise BadUsage(
                f"node 0 at {address} refused this node (HTTP {error.response.status_code}): give all nodes the same "
                f"--token-file or ELAS_TOKEN"
            ) from error
        except (OSError, InvalidHandshake) as error:
            if loop.time() > deadline:
                raise NotStarted(
                    f"node 0 did not answer at {address} within --join-timeout-s={options.timeouts.join_timeout_s:g} "
                    f"({error}): start elasrun there, and check --rdzv-endpoint"
                ) from error
            await asyncio.sleep(RETRY_S)
