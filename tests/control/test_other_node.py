"""The launcher of a node that is not the first, with a controller that the test plays."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from megatron_elas.config import ControlTimeouts
from megatron_elas.control.commands import EndJob
from megatron_elas.control.launch_options import LaunchOptions
from megatron_elas.control.messages import (
    AgentHeartbeat,
    AgentHello,
    Heard,
    Message,
    StopAll,
    Welcome,
    WorkerExited,
    decode_from_client,
    encode,
)
from megatron_elas.control.other_node import run_other_node
from megatron_elas.control.starter_messages import Target
from megatron_elas.control.wire import OPTIONS, Gate
from megatron_elas.spec.errors import ExitCode

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

PATIENCE_S = 60.0
TOKEN = "secret"
TIMEOUTS = ControlTimeouts(
    heartbeat_interval_s=0.1, heartbeat_timeout_s=PATIENCE_S, settle_timeout_s=PATIENCE_S, grace_s=10 * PATIENCE_S
)
WORKER = """
import pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5) if sys.argv[2] == "obeys" else None)
pathlib.Path(sys.argv[1]).touch()
while True:
    signal.pause()
"""


class PlayedController:
    """Welcomes the node, answers its heartbeats, and gives its order when the worker has started."""

    def __init__(self, started: Path, order: StopAll) -> None:
        self._started = started
        self._order: StopAll | None = order
        self.statuses: list[int] = []
        self._gate = Gate(TOKEN)
        self.greet = self._gate.greet

    async def converse(self, connection: ServerConnection) -> None:
        try:
            await self._gate.admit(connection)
            async for text in connection:
                for answer in self._answers(text):
                    await connection.send(encode(answer))
        except ConnectionClosed:
            pass

    def _answers(self, text: str | bytes) -> list[Message]:
        match decode_from_client(text):
            case AgentHello():
                return [Welcome(master_address="127.0.0.1", master_port=1, run_id="test")]
            case WorkerExited(status=status):
                self.statuses.append(status)
            case AgentHeartbeat(number=number):
                order, self._order = (self._order, None) if self._started.exists() else (None, self._order)
                return [Heard(number=number), *([order] if order is not None else [])]
        return []


def run_node(folder: Path, how: str, order: StopAll) -> tuple[EndJob, list[int]]:
    """A node of one worker, up to its end; gives also how the worker ended."""
    script, started = folder / "worker.py", folder / "started"
    script.write_text(WORKER)

    async def run() -> tuple[EndJob, list[int]]:
        controller = PlayedController(started, order)
        async with (
            asyncio.timeout(PATIENCE_S),
            serve(controller.converse, "127.0.0.1", 0, process_response=controller.greet, **OPTIONS) as server,
        ):
            port = next(iter(server.sockets)).getsockname()[1]
            target = Target(name=str(script), is_module=False, arguments=(str(started), how))
            end = await run_other_node(make_options(port, target))
        return end, controller.statuses

    return asyncio.run(run())


def make_options(port: int, target: Target) -> LaunchOptions:
    return LaunchOptions(
        nnodes=2, node_rank=1, workers_per_node=1, controller_host="127.0.0.1", controller_port=port,
        master_address="127.0.0.1", master_port=None, run_id="test", token=TOKEN, target=target, preload=None,
        fresh=False, log_dir=None, exit_code_file=None, dry_run=False, cluster="cpu", costs="measured",
        timeouts=TIMEOUTS,
    )  # fmt: skip


def test_workers_of_a_node_that_was_taken_for_lost_are_killed_at_once(tmp_path: Path) -> None:
    """They ignore SIGTERM, and the grace period is longer than the test may take."""
    order = StopAll(exit_code=ExitCode.CUT_OFF, sentence="node 1 was taken for lost", signum=signal.SIGKILL)
    end, statuses = run_node(tmp_path, "ignores", order)
    assert statuses == [-signal.SIGKILL]
    assert end.exit_code == ExitCode.CUT_OFF
    assert end.sentence.startswith("node 1 was taken for lost: the workers of this node were killed")


def test_workers_of_a_job_that_ends_are_asked_first_whatever_its_exit_code(tmp_path: Path) -> None:
    order = StopAll(exit_code=ExitCode.CUT_OFF, sentence="worker 0 exited with status 8")
    end, statuses = run_node(tmp_path, "obeys", order)
    assert statuses == [5]
    assert end == EndJob(exit_code=8, sentence="worker 0 exited with status 8")
