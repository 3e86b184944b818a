"""The agent's handle on its starter process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping

import msgspec

from megatron_elas.control.death_watch import DeathWatch, status_of_dying
from megatron_elas.control.ending import describe_status
from megatron_elas.control.starter_messages import (
    PreloadFailed,
    Ready,
    SignalWorker,
    StartWorker,
    WorkerEnded,
    decode_from_starter,
    encode_line,
)
from megatron_elas.control.vitals import Sign, StateFile
from megatron_elas.spec.errors import BadUsage, ElasticError

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 1 << 20
CLOSE_TIMEOUT_S = 5.0
"""For the starter to kill and reap its workers."""


class Starter:
    """Starts and signals workers, and says when they end. Make it with ``launch``."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        watch: DeathWatch,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_death: Callable[[WorkerEnded], None],
        on_end: Callable[[WorkerEnded], None],
    ) -> None:
        self._process = process
        self._watch = watch
        self._loop = asyncio.get_running_loop()
        self._on_death = on_death
        self._reader = reader
        self._writer = writer
        self._on_end = on_end
        self._running: set[int] = set()
        self._slots: dict[int, int] = {}
        self._states: dict[int, StateFile] = {}
        self._reading: asyncio.Task[None] | None = None

    @staticmethod
    async def launch(
        *,
        preload: str | None,
        environ: Mapping[str, str],
        on_death: Callable[[WorkerEnded], None],
        on_end: Callable[[WorkerEnded], None],
    ) -> Starter:
        """Start the process and wait until it has preloaded.

        Args:
            preload: ``module:function`` to call before the first fork, or None.
            environ: Environment while preloading; workers bring their own.
            on_death: Called on the event loop when a worker is found dying, as long before its end as the kernel needs
                to free its memory; not when it ends in order.
            on_end: Called on the event loop, once per worker that was started.

        Raises:
            BadUsage: Preloading failed; its traceback is on standard error.
        """
        ours, theirs = socket.socketpair()
        watch = DeathWatch()
        arguments = [str(theirs.fileno()), str(watch.fd), str(os.getpid()), *([preload] if preload else [])]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "megatron_elas.control.starter_process",
            *arguments,
            pass_fds=[theirs.fileno(), watch.fd],
            env=dict(environ),
            stdin=asyncio.subprocess.DEVNULL,
            process_group=0,
        )
        theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
        starter = Starter(process, watch, reader, writer, on_death, on_end)
        try:
            await starter._wait_ready()
        except BaseException:
            await starter.close()
            raise
        starter._reading = asyncio.create_task(starter._read())
        return starter

    async def _wait_ready(self) -> None:
        line = await self._reader.readline()
        if not line:
            status = await self._process.wait()
            raise ElasticError(f"the starter process ended with status {status} while preloading: see its output above")
        match decode_from_starter(line):
            case PreloadFailed(sentence=sentence):
                raise BadUsage(f"{sentence}: check --preload, or leave it out")
            case answer:
                assert isinstance(answer, Ready), answer

    def explain_death(self) -> str:
        """Why a worker dies, when it is because of this process: it has died itself, and takes its workers along."""
        status = self._process.returncode
        if status is None:
            status = status_of_dying(self._process.pid)
        if status is None:
            return ""
        how = describe_status(status).replace("killed", "was killed", 1)
        return f"with the process that workers are started from, which {how}"

    @property
    def running(self) -> frozenset[int]:
        """Workers that were started and did not end."""
        return frozenset(self._running)

    def start(self, request: StartWorker) -> None:
        """Start a worker. Its end is reported like any other, also when it cannot run."""
        self._running.add(request.worker)
        slot = self._watch_worker(request.worker)
        if slot is not None:
            self._slots[request.worker] = slot
        self._writer.write(encode_line(msgspec.structs.replace(request, watch_slot=slot)))

    def look(self) -> dict[int, Sign]:
        """What is seen now of the workers that run and hold their slots."""
        signs = {}
        for worker in self._running & self._slots.keys():
            slot = self._slots[worker]
            pid = self._watch.holder(slot)
            if pid and worker not in self._states:
                with contextlib.suppress(OSError):  # gone already: its end is reported elsewhere
                    self._states[worker] = StateFile(pid)
            if worker in self._states:
                signs[worker] = Sign(stopped=self._states[worker].is_stopped(), pulse=self._watch.pulse_ns(slot))
        return signs

    def _watch_worker(self, worker: int) -> int | None:
        def note_death(slot: int, status: int, at_s: float) -> None:
            death = WorkerEnded(worker=worker, status=status, at_s=at_s)
            self._loop.call_soon_threadsafe(self._on_death, death)

        return self._watch.watch(note_death)

    def send_signal(self, worker: int, signum: int) -> None:
        """Signal a worker, if it still runs."""
        if worker in self._running:
            self._writer.write(encode_line(SignalWorker(worker=worker, signum=signum)))

    async def _read(self) -> None:
        while line := await self._reader.readline():
            match decode_from_starter(line):
                case WorkerEnded() as end:
                    self._forget(end.worker)
                    self._on_end(end)
                case answer:
                    raise AssertionError(f"the starter cannot say {answer} now")
        # The starter itself was killed, and took its workers along.
        await self._process.wait()
        why = self.explain_death()
        logger.warning("workers %s end %s", sorted(self._running), why)
        for worker in sorted(self._running):
            self._forget(worker)
            self._on_end(WorkerEnded(worker=worker, status=-signal.SIGKILL, at_s=time.time(), why=why))

    def _forget(self, worker: int) -> None:
        self._running.discard(worker)
        if (state := self._states.pop(worker, None)) is not None:
            state.close()

    async def close(self) -> None:
        """Kill what still runs and wait until it is gone."""
        self._writer.close()
        if self._reading is None:
            self._process.kill()  # still preloading: it does not listen, and has no workers
        else:
            self._reading.cancel()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        for worker in tuple(self._states):
            self._forget(worker)
        self._watch.close()
