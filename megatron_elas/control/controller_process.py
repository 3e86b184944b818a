"""The process in which the controller runs. The launcher of node 0 keeps it alive (``controller_keeper``).

It may be killed at any moment: what it knows is in the journal. The listening socket is the launcher's, so clients
that come while there is no controller wait for the next one. It dies with the launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_elas.control.commands import LogLoss, ShowBlock, ShowRecovery
from megatron_elas.control.journal import BadJournal, Journal, is_new
from megatron_elas.control.messages import (
    AgentHeartbeat,
    AgentHello,
    FromLauncher,
    Heard,
    JobEnded,
    Message,
    Setup,
    Show,
    Terminate,
    WorkerExited,
    WorkerHung,
    decode_from_launcher,
    encode,
)
from megatron_elas.control.parent_death import die_with_parent
from megatron_elas.control.service import ControlService
from megatron_elas.control.states import State
from megatron_elas.control.step_log import StepLog
from megatron_elas.control.trace_log import TRACES_FILE, TraceLog
from megatron_elas.spec.errors import ExitCode

MAX_LINE_BYTES = 1 << 24


async def control(link: socket.socket, listener: socket.socket) -> None:
    """Run the job to its end, or until the launcher is gone."""
    reader, writer = await asyncio.open_connection(sock=link, limit=MAX_LINE_BYTES)

    def say(message: Message) -> None:
        writer.write(encode(message).encode() + b"\n")

    setup = decode_from_launcher(await reader.readline())
    assert isinstance(setup, Setup), setup
    try:
        journal, earlier = open_journal(setup)
    except BadJournal as error:
        say(JobEnded(exit_code=error.exit_code, sentence=str(error)))
        await writer.drain()
        return
    steps = None if setup.steps is None else StepLog(Path(setup.steps))
    traces = None if setup.steps is None else TraceLog(Path(setup.steps).with_name(TRACES_FILE))
    with contextlib.ExitStack() as stack:
        for log in (steps, traces):
            if log is not None:
                stack.enter_context(contextlib.closing(log))
        service = ControlService(
            launch=setup.launch,
            token=setup.token,
            welcome=setup.welcome,
            local_agent=say,
            show=lambda block: say(_show_block(block)),
            log=lambda loss: say(_show_loss(loss)),
            journal=journal,
            earlier=earlier,
            log_step=None if steps is None else steps.write,
            log_trace=None if traces is None else traces.write,
        )
        if earlier is not None:
            service.go_on(max(0.0, time.time() - (setup.down_since_s or time.time())))
        async with service.serve(listener):
            listening = asyncio.create_task(_listen(reader, service, say))
            either: set[asyncio.Future[Any]] = {listening, service.ended}
            done, _ = await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if service.ended not in done:
                listening.result()  # its error, if it ended with one
                return
            end = service.ended.result()
            say(JobEnded(**dataclasses.asdict(end)))
            await writer.drain()
            listening.cancel()


def open_journal(setup: Setup) -> tuple[Journal | None, tuple[State, float] | None]:
    """The journal, and what it leads to; None for the first controller. Raises BadJournal."""
    path = Path(setup.journal)
    if not is_new(path):
        journal, state, at_s = Journal.resume(path, setup.launch)
        return journal, (state, at_s)
    try:
        return Journal.create(path, setup.launch), None
    except OSError as error:
        raise BadJournal(f"the controller's journal {path} cannot be written: {error}") from error


async def _listen(reader: asyncio.StreamReader, service: ControlService, say: Callable[[Message], None]) -> None:
    """Until the launcher is gone."""
    while line := await reader.readline():
        _hear(decode_from_launcher(line), service, say)


def _hear(message: FromLauncher, service: ControlService, say: Callable[[Message], None]) -> None:
    match message:
        case AgentHello():
            service.local_agent_joined(message)
        case AgentHeartbeat(number=number, beating=beating):
            service.vouch(beating)
            say(Heard(number=number))
        case WorkerExited() | WorkerHung():
            service.hear_of_worker(message)
        case Terminate():
            service.apply(message)
        case Setup():
            raise AssertionError("it is said once")


def _show_block(block: ShowBlock) -> Show:
    event = "recovery" if isinstance(block, ShowRecovery) else "migration"
    return Show(event=event, epoch=block.epoch, text=block.text, facts={**block.facts, **block.phases_ms})


def _show_loss(loss: LogLoss) -> Show:
    return Show(event="loss", epoch=loss.epoch, worker=loss.worker, text="", facts=dict(loss.facts))


def main() -> int:
    """``python -m megatron_elas.control.controller_process LINK_FD LISTENER_FD LAUNCHER_PID``."""
    link_fd, listener_fd, launcher_pid = map(int, sys.argv[1:])
    die_with_parent(launcher_pid)
    logging.basicConfig(level=logging.WARNING, format="elasrun: %(message)s", stream=sys.stderr)
    # A client that hangs up while shaking hands (a port scan) is no news, and no reason for a traceback.
    logging.getLogger("websockets").setLevel(logging.CRITICAL)
    asyncio.run(control(socket.socket(fileno=link_fd), socket.socket(fileno=listener_fd)))
    return ExitCode.FINISHED


if __name__ == "__main__":
    sys.exit(main())
