"""One node's workers: starts them, watches them, ends them. Imports no torch."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from megatron_elas.config import ControlTimeouts
from megatron_elas.control.messages import Heard, KillWorker, StopAll, ToAgent, Welcome, WorkerExited, WorkerHung
from megatron_elas.control.starter import Starter
from megatron_elas.control.starter_messages import StartWorker, WorkerEnded
from megatron_elas.control.vitals import LOOK_S, Vitals
from megatron_elas.refusal import read_refusal

Report = Callable[[WorkerExited | WorkerHung], None]
"""Takes news of a worker, on the event loop."""

logger = logging.getLogger(__name__)


class Agent:
    """Obeys the controller. Where that is, and how orders and news travel, is its owner's business.

    Make it with ``launch``, end it with ``close``.
    """

    def __init__(self, *, timeouts: ControlTimeouts, report: Report, run_dir: Path | None = None) -> None:
        self._run_dir = run_dir
        self._grace_s = timeouts.grace_s
        self._vitals = Vitals(hang_timeout_s=timeouts.hang_timeout_s, heartbeat_timeout_s=timeouts.heartbeat_timeout_s)
        self._report = report
        self._starter: Starter | None = None
        self._looking: asyncio.Task[None] | None = None
        self._killing: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._reported: set[int] = set()
        self.order_to_stop: asyncio.Future[StopAll] = asyncio.get_running_loop().create_future()
        """Set by the first ``StopAll``."""
        self.first_failure = 0
        """Exit status of the first worker that did not end with 0."""

    @staticmethod
    async def launch(
        *,
        preload: str | None,
        environ: Mapping[str, str],
        timeouts: ControlTimeouts,
        report: Report,
        run_dir: Path | None = None,
    ) -> Agent:
        """Start the process that workers come from, and let it preload.

        Args:
            preload: ``module:function``, or None.
            environ: Environment while preloading.
            timeouts: When a worker hangs, and how long it may take to end when it is asked to.
            report: Called when a worker has ended, once for each, and when one is found to hang.
            run_dir: The job's private folder, where workers write why they refuse a job.

        Raises:
            BadUsage: Preloading failed.
        """
        agent = Agent(timeouts=timeouts, report=report, run_dir=run_dir)
        agent._starter = await Starter.launch(
            preload=preload, environ=environ, on_death=agent._note_death, on_end=agent._note_end
        )
        agent._looking = asyncio.create_task(agent._look())
        return agent

    async def _look(self) -> None:
        """Look after the workers for as long as this task lives."""
        assert self._starter is not None
        loop = asyncio.get_running_loop()
        while True:
            for worker, words in self._vitals.look(self._starter.look(), loop.time()):
                self._report(WorkerHung(worker=worker, detail=words))
            await asyncio.sleep(LOOK_S)

    def take_beating(self) -> tuple[int, ...]:
        """Workers whose pulse was seen to beat since the last call."""
        return self._vitals.take_beating()

    @property
    def running(self) -> tuple[int, ...]:
        """Workers whose process has not ended, ascending."""
        return tuple(sorted(self._starter.running)) if self._starter is not None else ()

    def start(self, requests: Iterable[StartWorker]) -> None:
        """Start workers."""
        assert self._starter is not None, "the agent was launched"
        for request in requests:
            self._idle.clear()
            self._starter.start(request)

    def obey(self, order: ToAgent) -> None:
        """Carry an order of the controller out."""
        match order:
            case KillWorker(worker=worker):
                self._send_signal(signal.SIGKILL, [worker])
            case StopAll(signum=signum):
                if not self.order_to_stop.done():  # a restarted controller gives its order again
                    self.order_to_stop.set_result(order)
                    self.stop(signum)
            case Welcome() | Heard():
                pass

    def stop(self, signum: int) -> None:
        """Ask all workers to end; after the grace period, or when asked again, kill them."""
        if self._killing is not None:
            self._kill()
            return
        # A stopped process acts on no signal but SIGKILL until it is continued.
        self._send_signal(signum, self.running)
        self._send_signal(signal.SIGCONT, self.running)
        self._killing = asyncio.get_running_loop().call_later(self._grace_s, self._kill)

    def _kill(self) -> None:
        if self.running:
            logger.warning("workers %s did not end by themselves: killing them", list(self.running))
        self.kill_all()

    def kill_all(self) -> None:
        """End the workers at once; they cannot write anything any more."""
        self._send_signal(signal.SIGKILL, self.running)

    def _send_signal(self, signum: int, workers: Iterable[int]) -> None:
        if self._starter is not None:
            for worker in workers:
                self._starter.send_signal(worker, signum)

    def _note_end(self, end: WorkerEnded) -> None:
        if end.status != 0 and self.first_failure == 0:
            self.first_failure = end.status
        if not self.running:
            self._idle.set()
        self._tell(end)

    def _note_death(self, death: WorkerEnded) -> None:
        """The worker is as good as gone: others need not wait until it has given its memory back."""
        assert self._starter is not None
        self._send_signal(signal.SIGKILL, [death.worker])
        self._tell(msgspec.structs.replace(death, why=self._starter.explain_death()))

    def _tell(self, end: WorkerEnded) -> None:
        if end.worker not in self._reported:
            self._reported.add(end.worker)
            refusal = read_refusal(str(self._run_dir)) if end.status > 0 and self._run_dir is not None else None
            self._report(
                WorkerExited(worker=end.worker, status=end.status, at_s=end.at_s, why=end.why, refusal=refusal)
            )

    async def wait_idle(self) -> None:
        """Until no worker runs."""
        await self._idle.wait()

    async def close(self) -> None:
        """End everything that is left."""
        if self._killing is not None:
            self._killing.cancel()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait({self._looking})
        if self._starter is not None:
            await self._starter.close()
