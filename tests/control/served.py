"""A controller with real sockets, on a thread of its own, for tests in one process."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatron_elas.config import ControlTimeouts
from megatron_elas.control.commands import EndJob, LogLoss, ShowMigration, ShowRecovery
from megatron_elas.control.events import Event
from megatron_elas.control.launch import Launch, Rebalance
from megatron_elas.control.link import ControlLink
from megatron_elas.control.messages import AgentHello, Quiesce, ToAgent, Welcome, WorkerExited
from megatron_elas.control.service import ControlService
from megatron_elas.control.states import State
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.step_report import StepReport
from megatron_elas.spec.step_trace import StepTrace
from tests.control.jobs import TIMEOUTS, make_hello

TOKEN = "secret"
WAIT_S = 20.0
ROOMY = replace(TIMEOUTS, heartbeat_timeout_s=3.0, settle_timeout_s=3.0)
"""For workers that send heartbeats from threads of a busy process."""
WELCOME = Welcome(master_address="127.0.0.1", master_port=1, run_id="test")


class Served:
    """The controller, seen from the test's thread."""

    def __init__(self, service: ControlService, loop: asyncio.AbstractEventLoop, port: int) -> None:
        self.service = service
        self._loop = loop
        self.address = f"ws://127.0.0.1:{port}"
        self.orders: queue.Queue[ToAgent] = queue.Queue()
        self.shown: queue.Queue[ShowRecovery | ShowMigration] = queue.Queue()
        self.logged: queue.Queue[LogLoss] = queue.Queue()
        self.steps: queue.Queue[StepReport] = queue.Queue()
        self.traces: queue.Queue[StepTrace] = queue.Queue()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run on the service's thread."""

        async def run() -> Any:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(WAIT_S)

    def apply(self, event: Event) -> None:
        """Let the controller see an event."""
        self.call(self.service.worker_exited if isinstance(event, WorkerExited) else self.service.apply, event)

    def set_agent_timeout(self, limit_s: float) -> None:
        """From now on; the workers keep theirs."""
        self.service._agent_health._limit_s = limit_s

    def set_silence(self, node: int, workers: Sequence[int], silence_s: float) -> None:
        """The node's agent and these workers said nothing for so long."""

        def age() -> None:
            heard_s = self.service.now() - silence_s
            self.service._agent_health.hear(node, heard_s)
            for worker in workers:
                self.service._health.hear(worker, heard_s)

        self.call(age)

    def record(self, method: str) -> queue.Queue[tuple[Any, ...]]:
        """The arguments of each call of a method of the service from now on, when the call has ended."""
        calls: queue.Queue[tuple[Any, ...]] = queue.Queue()
        original = getattr(self.service, method)

        def recorded(*args: Any) -> Any:
            try:
                return original(*args)
            finally:
                calls.put(args)

        setattr(self.service, method, recorded)
        return calls

    @property
    def state(self) -> State:
        """Its state now."""
        return self.call(lambda: self.service.state)

    def wait_ended(self) -> EndJob:
        """How the job ended."""

        async def wait() -> EndJob:
            return await asyncio.shield(self.service.ended)

        return asyncio.run_coroutine_threadsafe(wait(), self._loop).result(WAIT_S)


@contextlib.contextmanager
def serving(
    world_size: int,
    *,
    nnodes: int = 1,
    timeouts: ControlTimeouts = ROOMY,
    local_agent: bool = True,
    rebalances: tuple[Rebalance, ...] = (),
) -> Iterator[Served]:
    """A controller for so many workers; its own node's agent has joined and does nothing."""
    ready: queue.Queue[Served] = queue.Queue()
    stop = threading.Event()

    async def serve() -> None:
        orders: queue.Queue[ToAgent] = queue.Queue()
        shown: queue.Queue[ShowRecovery | ShowMigration] = queue.Queue()
        logged: queue.Queue[LogLoss] = queue.Queue()
        steps: queue.Queue[StepReport] = queue.Queue()
        traces: queue.Queue[StepTrace] = queue.Queue()
        launch = Launch(nnodes=nnodes, workers_per_node=world_size // nnodes, timeouts=timeouts, rebalances=rebalances)
        service = ControlService(
            launch=launch,
            token=TOKEN,
            welcome=WELCOME,
            local_agent=lambda order: None if isinstance(order, Welcome) else orders.put(order),
            show=shown.put,
            log=logged.put,
            log_step=steps.put,
            log_trace=traces.put,
        )
        listener = socket.create_server(("127.0.0.1", 0))
        async with service.serve(listener):
            served = Served(service, asyncio.get_running_loop(), listener.getsockname()[1])
            served.orders, served.shown, served.logged, served.steps = orders, shown, logged, steps
            served.traces = traces
            if local_agent:
                service.apply(AgentHello(node=0, host="here", workers=launch.workers_of(0)))
            ready.put(served)
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        yield ready.get(timeout=WAIT_S)
    finally:
        stop.set()
        thread.join(WAIT_S)
        assert not thread.is_alive()


class Member:
    """A worker's link, with what its callbacks were given."""

    plan: ElasticPlan
    """The first one, once the job has started."""

    def __init__(
        self, served: Served, worker: int, job: JobSpec, *, heartbeat_s: float = 0.05, patience_s: float = WAIT_S
    ) -> None:
        self.worker = worker
        self.quiesced: queue.Queue[Quiesce] = queue.Queue()
        self.injected: queue.Queue[str] = queue.Queue()
        self.link = ControlLink(
            served.address,
            TOKEN,
            make_hello(worker, job),
            heartbeat_s,
            self.quiesced.put,
            self.injected.put,
            patience_s,
        )


@contextlib.contextmanager
def joined(served: Served, job: JobSpec, **settings: Any) -> Iterator[list[Member]]:
    """All workers of the job, started."""
    with contextlib.ExitStack() as stack:
        members = []
        for worker in range(job.world_size):
            members.append(Member(served, worker, job, **settings))
            stack.callback(members[-1].link.close)
        for member in members:
            member.plan = member.link.wait_start(WAIT_S).plan
        yield members
