"""One node's workers: starts them, watches them, ends them. Imports no torch."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterable

from megatron_elas.control.messages import KillWorker, StopAll, ToAgent, Welcome, WorkerExited
from megatron_elas.control.starter import Starter
from megatron_elas.control.starter_messages import StartWorker, WorkerEnded

logger = logging.getLogger(__name__)


class Agent:
    """Obeys the controller. Where that is, and how its orders come, is its owner's business."""

    def __init__(self, *, starter: Starter, grace_s: float) -> None:
        self._starter = starter
        self._grace_s = grace_s
        self._killing: asyncio.TimerHandle | None = None
        self._stopped: asyncio.Future[StopAll] = asyncio.get_running_loop().create_future()
        self.first_failure: int | None = None
        """Exit status of the first worker that did not end with 0."""

    def start(self, requests: Iterable[StartWorker]) -> None:
        """Start workers."""
        for request in requests:
            self._starter.start(request)

    def obey(self, order: ToAgent) -> None:
        """Carry an order of the controller out."""
        match order:
            case KillWorker(worker=worker):
                self._starter.send_signal(worker, signal.SIGKILL)
            case StopAll():
                if not self._stopped.done():
                    self._stopped.set_result(order)
                self.stop(order.signum)
            case Welcome():
                pass

    def stop(self, signum: int) -> None:
        """Ask all workers to end; after the grace period, or when asked twice, kill them."""
        if self._killing is not None:
            self.kill()
            return
        self._signal_all(signum)
        self._killing = asyncio.get_running_loop().call_later(self._grace_s, self.kill)

    def kill(self) -> None:
        """End all workers now."""
        if self._starter.running:
            logger.warning("killing workers %s", sorted(self._starter.running))
        self._signal_all(signal.SIGKILL)

    def _signal_all(self, signum: int) -> None:
        for worker in sorted(self._starter.running):
            self._starter.send_signal(worker, signum)
            # A stopped process acts on no signal but SIGKILL until it is continued.
            self._starter.send_signal(worker, signal.SIGCONT)

    def note_end(self, end: WorkerEnded) -> None:
        """A worker ended."""
        if end.status != 0 and self.first_failure is None:
            self.first_failure = end.status

    async def wait_stopped(self) -> StopAll:
        """The order to stop, once it comes."""
        return await asyncio.shield(self._stopped)

    async def close(self) -> None:
        """End everything that is left."""
        if self._killing is not None:
            self._killing.cancel()
        await self._starter.close()


def report_to(report: Callable[[WorkerExited], None]) -> Callable[[WorkerEnded], None]:
    """What turns the starter's news into the controller's message."""

    def tell(end: WorkerEnded) -> None:
        report(WorkerExited(worker=end.worker, status=end.status, at_s=end.at_s))

    return tell
