"""The launcher's handle on the controller's process: starts it, and starts it again when it dies.

Training goes on meanwhile; a restarted controller goes on from its journal. One that does not answer for long is
killed, and so started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable

import msgspec

from megatron_elas.control.commands import EndJob
from megatron_elas.control.ending import describe_status
from megatron_elas.control.messages import (
    AgentHeartbeat,
    AgentHello,
    Heard,
    JobEnded,
    Message,
    Setup,
    Show,
    ToAgent,
    decode_to_launcher,
    encode,
)
from megatron_elas.spec.errors import ExitCode

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Within ``RESTART_WINDOW_S``; one more ends the job."""
RESTART_WINDOW_S = 60.0
MAX_LINE_BYTES = 1 << 24
CLOSE_TIMEOUT_S = 5.0
"""For a controller that has said that the job has ended to end itself."""
LOOK_S = 0.25
"""Between two looks at whether it answers; one look counts twice this at most (see ``vitals``)."""


class ControllerKeeper:
    """Of one job. ``start`` it, ``close`` it."""

    def __init__(
        self,
        *,
        listener: socket.socket,
        setup: Setup,
        silence_limit_s: float,
        on_message: Callable[[ToAgent | Show], None],
        on_restart: Callable[[str], None],
    ) -> None:
        """Prepare.

        Args:
            listener: Where clients come in; it stays this process's.
            setup: For the first controller.
            silence_limit_s: A controller that leaves heartbeats without an answer for so long is killed.
            on_message: Takes what it says, on the event loop.
            on_restart: Called with how a controller ended, before the next one is started.
        """
        self._listener = listener
        self._setup = setup
        self._silence_limit_s = silence_limit_s
        self._on_message = on_message
        self._on_restart = on_restart
        self._hello: AgentHello | None = None
        self._said: list[Message] = []
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._deaths: deque[float] = deque()
        self._silent_s = 0.0
        self._keeping: asyncio.Task[None] | None = None
        self.ended: asyncio.Future[EndJob] = asyncio.get_running_loop().create_future()
        """Set once: the controller has said so, or it cannot be kept alive."""

    def start(self) -> None:
        """Start the controller, and keep it."""
        self._keeping = asyncio.create_task(self._keep())
        self._keeping.add_done_callback(self._end_on_bugs)

    def _end_on_bugs(self, keeping: asyncio.Task[None]) -> None:
        error = None if keeping.cancelled() else keeping.exception()
        if error is not None and not self.ended.done():
            self.ended.set_exception(error)

    def say(self, message: Message) -> None:
        """Tell the controller, and every later one, unless it is a heartbeat."""
        if isinstance(message, AgentHello):
            self._hello = message
        elif not isinstance(message, AgentHeartbeat):
            self._said.append(message)
        self._write(message)

    def _write(self, message: Message) -> None:
        if self._writer is not None:
            self._writer.write(encode(message).encode() + b"\n")

    async def _keep(self) -> None:
        while True:
            status = await self._run_once()
            if self.ended.done():
                return
            how = describe_status(status)
            now = time.monotonic()
            self._deaths.append(now)
            while now - self._deaths[0] > RESTART_WINDOW_S:
                self._deaths.popleft()
            if len(self._deaths) > MAX_RESTARTS:
                self.ended.set_result(
                    EndJob(
                        exit_code=ExitCode.CRASHED,
                        sentence=f"the controller ended {len(self._deaths)} times within {RESTART_WINDOW_S:g} s, at "
                        f"last {how}: see above why, then restart from the newest checkpoint",
                    )
                )
                return
            logger.warning("the controller ended (%s) and is started again; training goes on", how)
            self._on_restart(how)
            self._setup = msgspec.structs.replace(self._setup, down_since_s=time.time())
            if self._hello is not None:
                self._hello = msgspec.structs.replace(self._hello, again=True)

    async def _run_once(self) -> int:
        """One controller, from its start to its end; gives its status."""
        ours, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), str(self._listener.fileno()), str(os.getpid())]
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "megatron_elas.control.controller_process",
            *arguments,
            pass_fds=[theirs.fileno(), self._listener.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=None if sys.stderr is not None else asyncio.subprocess.DEVNULL,
            process_group=0,
        )
        theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
        self._silent_s = 0.0
        for message in (self._setup, *([self._hello] if self._hello is not None else []), *self._said):
            self._write(message)
        looking = asyncio.create_task(self._look(process))
        try:
            with contextlib.suppress(ConnectionError):
                while line := await reader.readline():
                    self._hear(line)
            return await process.wait()
        finally:
            looking.cancel()
            writer, self._writer = self._writer, None
            writer.close()

    def _hear(self, line: bytes) -> None:
        match decode_to_launcher(line):
            case Heard():
                self._silent_s = 0.0
            case JobEnded() as end:
                if not self.ended.done():
                    self.ended.set_result(EndJob(**msgspec.structs.asdict(end)))
            case message:
                self._on_message(message)

    async def _look(self, process: asyncio.subprocess.Process) -> None:
        """Kill it when it does not answer heartbeats. Time in which this process was held up does not count."""
        loop = asyncio.get_running_loop()
        looked_s = loop.time()
        while self._silent_s < self._silence_limit_s:
            await asyncio.sleep(LOOK_S)
            passed_s = min(loop.time() - looked_s, 2 * LOOK_S)
            looked_s = loop.time()
            self._silent_s = self._silent_s + passed_s if self._hello is not None else 0.0
        logger.warning("the controller did not answer for %.1f s: killing it", self._silent_s)
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    async def close(self) -> None:
        """Let the controller end, or end it."""
        if self._keeping is None:
            return
        if self.ended.done():
            await asyncio.wait({self._keeping}, timeout=CLOSE_TIMEOUT_S)
        self._keeping.cancel()
        await asyncio.wait({self._keeping})
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
