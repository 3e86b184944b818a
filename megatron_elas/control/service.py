"""The controller on the network: sockets, clock and planner around the pure state machine.

One event at a time is applied, on one event loop; messages leave in the order of the commands,
without waiting for slow readers. What changes the state is in the journal before anything is sent. A client is
refused before it says a word unless it knows the token; one that then breaks the protocol loses its own connection and
nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence

import msgspec
from websockets.asyncio.server import Server, ServerConnection, broadcast, serve
from websockets.exceptions import ConnectionClosed

from megatron_elas.control.commands import (
    Command,
    EndJob,
    ImprovePlan,
    LogLoss,
    MakePlan,
    Note,
    Reply,
    ShowBlock,
    Tell,
    TellAgent,
    WelcomeAgents,
)
from megatron_elas.control.controller import initial_state, step
from megatron_elas.control.ending import end_job
from megatron_elas.control.events import (
    AgentLost,
    ChangeAsked,
    Event,
    PlanImproved,
    PlanKept,
    PlanMade,
    PlanRefused,
    Restarted,
    Tick,
    WorkerSilent,
)
from megatron_elas.control.health import Health
from megatron_elas.control.joining import find_agent_problem
from megatron_elas.control.journal import Journal, matters
from megatron_elas.control.launch import Launch
from megatron_elas.control.messages import (
    AgentHeartbeat,
    AgentHello,
    Answer,
    BadMessage,
    DrainRequest,
    FromClient,
    Heard,
    Heartbeat,
    Hello,
    HelloAgain,
    Inject,
    InjectRequest,
    Measured,
    Message,
    Migrated,
    Noted,
    RebalanceRequest,
    Recovered,
    Settled,
    StatusRequest,
    Stop,
    StopAll,
    ToAgent,
    Traced,
    Welcome,
    WorkerExited,
    WorkerHung,
    decode_from_client,
    encode,
)
from megatron_elas.control.outbox import NOT_KEPT
from megatron_elas.control.outlook import Outlook
from megatron_elas.control.recovery_block import add_step_times
from megatron_elas.control.rejoining import catch_up_agent, catch_up_worker, find_stranger
from megatron_elas.control.states import Ended, Gathering, Resuming, Running, State
from megatron_elas.control.tools import check_injection, describe
from megatron_elas.control.wire import BACKLOG, OPEN_TIMEOUT_S, OPTIONS, PROTOCOL_VIOLATION, Gate, detect_dead_peers
from megatron_elas.planner.improve import improve
from megatron_elas.planner.job_costs import JobCosts
from megatron_elas.planner.plan import initial_plan, predict_step_s, replan
from megatron_elas.proof import NotAMember
from megatron_elas.spec.errors import ElasticError, ExitCode
from megatron_elas.spec.policy import RunningPolicy
from megatron_elas.spec.step_report import StepReport
from megatron_elas.spec.step_trace import StepTrace

logger = logging.getLogger(__name__)

LAST_WORDS_S = 1.0
"""A dead worker's link normally ends at once; a process that inherited it can hold it open."""

ChangeRequest = DrainRequest | RebalanceRequest
"""Of tools, answered when there is a plan, or when it has been gone over to."""
NOT_OF_WORKERS = (
    Hello
    | HelloAgain
    | AgentHello
    | AgentHeartbeat
    | WorkerExited
    | WorkerHung
    | InjectRequest
    | StatusRequest
    | ChangeRequest
)
"""Messages that no worker sends, or not twice."""


def make_plan(
    command: MakePlan, costs: JobCosts | None = None, policy: RunningPolicy = "ours"
) -> PlanMade | PlanRefused:
    """Run the planner and take its time.

    Without costs every layer counts the same. That is also what a plan falls back on when costs make the planner fail:
    they come from measurements, and a recovery must not.
    """
    began_s = time.perf_counter()
    try:
        if command.old is None:
            plan = initial_plan(command.job, command.domains, costs)
        else:
            plan = replan(command.job, command.old, command.lost, command.epoch, command.domains, costs, policy)
    except ElasticError as error:
        return PlanRefused(epoch=command.epoch, exit_code=error.exit_code, sentence=str(error))
    except Exception:
        if costs is None:
            raise
        logger.exception("the plan of epoch %d counts layers", command.epoch)
        return make_plan(command, policy=policy)
    return PlanMade(plan=plan, seconds=time.perf_counter() - began_s)


def improve_plan(
    command: ImprovePlan, costs: JobCosts | None = None, policy: RunningPolicy = "ours"
) -> PlanImproved | PlanKept:
    """Run the planner for a job that has lost nobody. Whatever goes wrong there, training goes on as it does."""
    search = command.search
    began_s = time.perf_counter()
    try:
        plan = improve(
            command.job, command.plan, search.epoch, command.domains, costs, search.drained, policy, search.layers
        )
        in_force_s = None if plan is None or costs is None else predict_step_s(command.job, command.plan, costs)
    except ElasticError as error:
        return PlanKept(search=search, sentence=str(error), failed=True)
    except Exception as error:
        logger.exception("no plan for epoch %d, training goes on under the one in force", search.epoch)
        sentence = f"the planner failed with {type(error).__name__}: {error}"
        return PlanKept(search=search, sentence=f"{sentence}, see the output of elasrun on node 0", failed=True)
    if plan is None:
        return PlanKept(search=search, sentence="no plan was found whose steps are shorter by enough: layers stay")
    return PlanImproved(search=search, plan=plan, seconds=time.perf_counter() - began_s, in_force_s=in_force_s)


class ControlService:
    """Holds the state, applies events to it and carries the commands out."""

    def __init__(
        self,
        *,
        launch: Launch,
        token: str,
        welcome: Welcome,
        local_agent: Callable[[ToAgent], None],
        show: Callable[[ShowBlock], None],
        log: Callable[[LogLoss], None],
        journal: Journal | None = None,
        earlier: tuple[State, float] | None = None,
        log_step: Callable[[StepReport], None] | None = None,
        log_trace: Callable[[StepTrace], None] | None = None,
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
            launch: What was launched.
            token: Shared secret.
            welcome: Sent to all agents when the last one has joined.
            local_agent: Takes messages for node 0's agent, which has no connection here.
            show: Prints a block.
            log: Writes a loss down.
            journal: Where to write what changes the state.
            earlier: The state and the time that an earlier controller's journal leads to; then call ``go_on``.
            log_step: Takes every step that a worker has measured, with what was predicted for it.
            log_trace: Takes every step that a worker has traced.
        """
        self._gate = Gate(token)
        self._welcome = welcome
        self._local_agent = local_agent
        self._show = show
        self._log = log
        self._journal = journal
        self._state, journaled_s = earlier or (initial_state(launch), 0.0)
        timeouts = launch.timeouts
        self._health = Health(timeouts.heartbeat_timeout_s, timeouts.interpreter_timeout_s)
        self._agent_health = Health(timeouts.heartbeat_timeout_s)
        self._outlook = Outlook(launch)
        self._log_step = log_step
        self._log_trace = log_trace
        self._workers: dict[int, ServerConnection] = {}
        self._hung_up: dict[int, asyncio.Event] = {}
        self._agents: dict[int, ServerConnection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        """Tools that wait, by request."""
        # Wall-clock time for people and for comparison with the workers' marks, that cannot jump.
        self._clock_offset_s = max(time.time(), journaled_s) - time.monotonic()
        self.ended: asyncio.Future[EndJob] = asyncio.get_running_loop().create_future()
        """Set once, when the job has ended."""

    @property
    def state(self) -> State:
        """The controller's state now."""
        return self._state

    def now(self) -> float:
        """Wall-clock time that never goes back."""
        return self._clock_offset_s + time.monotonic()

    def apply(self, event: Event) -> None:
        """Let the controller decide, and do what it says. From the event loop's thread only."""
        with self._ending_on_bugs():
            now = self.now()
            state, commands = step(self._state, event, now)
            if matters(self._state, state, commands):
                self._write_down(event, now, state)
            self._state = state
            for command in commands:
                self._carry_out(command)

    def _write_down(self, event: Event, now: float, state: State) -> None:
        if self._journal is None:
            return
        try:
            self._journal.write(event, now, state)
        except OSError as error:
            # Half a journal would lead to an older state than this one, in which other decisions can be made.
            logger.warning("the journal cannot be written (%s): if this controller dies, the job ends", error)
            self._journal.discard()
            self._journal = None

    def go_on(self, away_s: float) -> None:
        """Take an earlier controller's place, ``away_s`` after it ended. Everybody has the usual time to come back."""
        now = self.now()
        roster = self._state.roster
        if isinstance(self._state, Ended):
            self.ended.set_result(end_job(self._state))
            return
        for worker in roster.survivors:
            self._health.hear(worker, now)
        for node in sorted(roster.agents - {0}):  # that of node 0 is there as long as this process is
            self._agent_health.hear(node, now)
        self.apply(Restarted(away_s=away_s))

    # ------------------------------------------------------------ running

    @contextlib.asynccontextmanager
    async def serve(self, listener: socket.socket) -> AsyncIterator[None]:
        """Accept clients and watch the time while the context lasts."""
        server: Server = await serve(
            self._converse, sock=listener, backlog=BACKLOG, process_response=self._gate.greet, **OPTIONS
        )
        ticking = asyncio.create_task(self._tick())
        ticking.add_done_callback(self._end_with)
        try:
            yield
        finally:
            ticking.cancel()
            server.close()
            await asyncio.wait({ticking})
            await server.wait_closed()

    def _end_with(self, ticking: asyncio.Task[None]) -> None:
        """Without it no silence is noticed: a bug there must end the job, too."""
        error = None if ticking.cancelled() else ticking.exception()
        if error is not None and not self.ended.done():
            self.ended.set_exception(error)

    async def _tick(self) -> None:
        timeouts = self._state.roster.launch.timeouts
        interval_s = min(timeouts.heartbeat_interval_s, timeouts.heartbeat_timeout_s / 10)
        while True:
            await asyncio.sleep(interval_s)
            now = self.now()
            for node, silent_s in self._agent_health.find_silent(now):
                self._lose_agent(node, silent_s)
            for worker, silent_s in self._health.find_silent(now):
                if not self._is_node_late(self._state.roster.launch.node_of(worker), now):
                    self._health.forget(worker)
                    self.apply(WorkerSilent(worker=worker, silent_s=silent_s))
            self.apply(Tick(waiting=self._health.waiting))

    def _lose_agent(self, node: int, silent_s: float) -> None:
        """The node does not answer. It has ended its workers by now; what reaches it after all says so too."""
        self._agent_health.forget(node)
        for worker in self._state.roster.launch.workers_of(node):
            self._health.forget(worker)
        connection = self._agents.pop(node, None)
        self.apply(AgentLost(node=node, silent_s=silent_s))
        if connection is None:  # it has not come back since this controller was started
            return
        sentence = f"node {node} did not answer for {silent_s:.1f} s, so it was taken for lost"
        # Not by the exit code: that may be a script's own, and its job ends politely.
        order = StopAll(exit_code=ExitCode.CUT_OFF, sentence=sentence, signum=signal.SIGKILL)
        broadcast([connection], encode(order))
        self._spawn(connection.close())

    def _is_node_late(self, node: int, now: float) -> bool:
        """Whether its agent is silent as well. Then the node is judged as a whole: one loss and not one per worker."""
        silence_s = self._agent_health.silence_of(node, now)
        return silence_s is not None and silence_s > 2 * self._state.roster.launch.timeouts.heartbeat_interval_s

    # ------------------------------------------------------------ conversations

    async def _converse(self, connection: ServerConnection) -> None:
        """One client, from its first message, which says what it is, to the end of its connection."""
        detect_dead_peers(connection.transport.get_extra_info("socket"))
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await self._gate.admit(connection)
                first = decode_from_client(await connection.recv())
            match first:
                case Hello():
                    await self._converse_with_worker(connection, first)
                case HelloAgain():
                    await self._converse_again(connection, first)
                case AgentHello():
                    await self._converse_with_agent(connection, first)
                case InjectRequest() | StatusRequest():
                    await self._send_answer(connection, self._answer(first))
                case DrainRequest() | RebalanceRequest():
                    await self._send_answer(connection, await self._change(first))
                case _:
                    raise BadMessage(f"a connection cannot begin with {type(first).__name__}")
        except NotAMember as error:
            logger.warning("refused a client from %s: %s", connection.remote_address, error)
            await connection.close(PROTOCOL_VIOLATION, str(error))
        except BadMessage as error:
            logger.warning("closing the connection of %s: %s", connection.remote_address, error)
            await connection.close(PROTOCOL_VIOLATION, str(error)[:100])
        except ConnectionClosed:
            pass
        except TimeoutError:
            await connection.close(PROTOCOL_VIOLATION, "said nothing")

    async def _converse_with_worker(self, connection: ServerConnection, hello: Hello) -> None:
        worker = hello.worker
        if worker in self._workers or not isinstance(self._state, Gathering):
            sentence = f"worker {worker} cannot join: it joined before, or training has begun"
            await connection.send(encode(Stop(exit_code=ExitCode.NOT_STARTED, sentence=sentence)))
            return
        await self._listen_to_worker(connection, hello)

    async def _converse_again(self, connection: ServerConnection, again: HelloAgain) -> None:
        """A worker that was connected before."""
        hello = again.hello
        if isinstance(self._state, Gathering) and hello.worker not in self._state.roster.hellos:
            await self._converse_with_worker(connection, hello)  # the controller had no time to note it
            return
        stranger = find_stranger(self._state, again)
        if stranger is not None:
            await connection.send(encode(stranger))
            return
        before = self._workers.pop(hello.worker, None)
        if before is not None:
            self._spawn(before.close())
        await self._listen_to_worker(connection, again)

    async def _listen_to_worker(self, connection: ServerConnection, first: Hello | HelloAgain) -> None:
        worker = first.worker if isinstance(first, Hello) else first.hello.worker
        self._workers[worker] = connection
        hung_up = self._hung_up[worker] = asyncio.Event()
        epoch, step = (0, 0) if isinstance(first, Hello) else (first.epoch, first.step)
        self._health.hear_progress(worker, epoch, step, self.now())
        if isinstance(first, Hello):
            self.apply(first)
        else:
            for order in catch_up_worker(self._state, first):
                broadcast([connection], encode(order))
        noted = 0
        try:
            async for text in connection:
                message = decode_from_client(text)
                if _speaker(message) != worker:
                    raise BadMessage(f"worker {worker} cannot send {type(message).__name__} for {_speaker(message)}")
                if self._workers.get(worker) is not connection:
                    return  # it has come back on another one, and repeats there what was not noted
                self._hear(worker, message)
                if not isinstance(message, NOT_KEPT):
                    noted += 1
                    broadcast([connection], encode(Noted(count=noted)))
        finally:
            hung_up.set()
            if worker not in self._state.roster.survivors:
                self._health.forget(worker)
            elif self._workers.get(worker) is connection:
                self._health.hang_up(worker, self.now())

    def _hear(self, worker: int, message: FromClient) -> None:
        if isinstance(message, Heartbeat):
            self._health.hear_progress(worker, message.epoch, message.step, self.now(), message.waiting)
            self._follow_script(message.step)
            return
        self._health.hear(worker, self.now())
        if isinstance(message, NOT_OF_WORKERS):
            raise BadMessage(f"worker {worker} cannot send {type(message).__name__}")
        if isinstance(message, Measured):
            self._measure(message.report)
            return
        if isinstance(message, Traced):
            if self._log_trace is not None:
                self._log_trace(message.trace)
            return
        self.apply(message)

    def _measure(self, report: StepReport) -> None:
        """A worker says what a step took. No decision of the state machine depends on it."""
        self._follow_plan()
        completed = self._outlook.take(report)
        if self._log_step is not None:
            self._log_step(completed)
        if isinstance(self._state, Running) and self._outlook.is_fit_due:
            self._spawn(self._fit())

    def _follow_plan(self) -> None:
        if isinstance(self._state, Running | Resuming):
            self._outlook.follow(self._state.plan, self._state.roster.profile)

    async def _fit(self) -> None:
        with self._ending_on_bugs():
            await self._outlook.fit()

    async def _converse_with_agent(self, connection: ServerConnection, hello: AgentHello) -> None:
        refusal = self._find_refusal(hello)
        if refusal is not None:
            await connection.send(encode(refusal))
            return
        before = self._agents.get(hello.node)
        self._agents[hello.node] = connection
        if before is not None:
            self._spawn(before.close())
        self._agent_health.hear(hello.node, self.now())
        if hello.node in self._state.roster.agents:
            for order in catch_up_agent(self._state, hello.node, self._welcome):
                broadcast([connection], encode(order))
        else:
            self.apply(hello)
        try:
            async for text in connection:
                self._hear_agent(connection, hello, decode_from_client(text))
        finally:
            if self._agents.get(hello.node) is connection:
                del self._agents[hello.node]
                self._agent_health.forget(hello.node)
                self.apply(AgentLost(node=hello.node))

    def _find_refusal(self, hello: AgentHello) -> StopAll | None:
        """Why an agent is sent away; None when it is welcome."""
        problem = find_agent_problem(self._state.roster, hello)
        if problem is not None:
            return StopAll(exit_code=ExitCode.BAD_USAGE, sentence=problem)
        if isinstance(self._state, Gathering) or hello.node in self._state.roster.agents:
            return None
        if hello.again:
            sentence = f"node 0 had taken node {hello.node} for lost"
            return StopAll(exit_code=ExitCode.CUT_OFF, sentence=sentence, signum=signal.SIGKILL)
        sentence = f"node {hello.node} comes too late: training has begun, or is ending"
        return StopAll(exit_code=ExitCode.BAD_USAGE, sentence=sentence)

    def local_agent_joined(self, hello: AgentHello) -> None:
        """Node 0's agent, which has no connection here, says hello."""
        if hello.node in self._state.roster.agents:
            for order in catch_up_agent(self._state, hello.node, self._welcome):
                self._local_agent(order)
        else:
            self.apply(hello)

    def _hear_agent(self, connection: ServerConnection, hello: AgentHello, message: FromClient) -> None:
        if self._agents.get(hello.node) is not connection:
            return  # the node was taken for lost; an answer would prolong its lease
        self._agent_health.hear(hello.node, self.now())
        match message:
            case AgentHeartbeat(node=node, number=number, beating=beating) if node == hello.node:
                self.vouch([worker for worker in beating if worker in hello.workers])
                broadcast([connection], encode(Heard(number=number)))
            case WorkerExited() | WorkerHung() if message.worker in hello.workers:
                self.hear_of_worker(message)
            case _:
                raise BadMessage(f"the agent of node {hello.node} cannot send {message}")

    def vouch(self, workers: Sequence[int]) -> None:
        """An agent sees these run, also those whose Python has no time for heartbeats."""
        now = self.now()
        for worker in workers:
            self._health.vouch(worker, now)

    def hear_of_worker(self, message: WorkerExited | WorkerHung) -> None:
        """An agent tells of a worker's process."""
        if isinstance(message, WorkerExited):
            self.worker_exited(message)
        else:
            self.apply(message)

    def worker_exited(self, message: WorkerExited) -> None:
        """An agent saw a process end.

        A process that ended by itself may have said why (``Finished``, ``Failed``) on its own link, and
        that may still be unread: it is read first.
        """
        self._health.forget(message.worker)
        hung_up = self._hung_up.get(message.worker)
        if message.status < 0 or hung_up is None or hung_up.is_set():
            self.apply(message)
        else:
            self._spawn(self._apply_after_last_words(message, hung_up))

    async def _apply_after_last_words(self, message: WorkerExited, hung_up: asyncio.Event) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await hung_up.wait()
        self.apply(message)

    def _step_times(self) -> str:
        """For people; empty when nothing is known, or no plan is in force."""
        self._follow_plan()
        return (
            self._outlook.meter.now(self._state.plan.epoch).describe()
            if isinstance(self._state, Running | Resuming)
            else ""
        )

    def _answer(self, request: InjectRequest | StatusRequest) -> Answer:
        if isinstance(request, StatusRequest):
            now = self.now()
            text = describe(
                self._state,
                self._health.step_of,
                lambda worker: self._health.silence_of(worker, now),
                self._step_times(),
            )
            return Answer(ok=True, text=text)
        fault = check_injection(self._state, request.fault, self._health.step_of)
        if isinstance(fault, Answer):
            return fault
        if fault.worker not in self._workers or self._hung_up[fault.worker].is_set():
            text = f"worker {fault.worker} is not connected at the moment, so it cannot be told: ask again in a second"
            return Answer(ok=False, text=text)
        self.apply(Inject(worker=fault.worker, fault=str(fault)))
        return Answer(ok=True, text=f"worker {fault.worker} will be struck: {fault}")

    async def _send_answer(self, connection: ServerConnection, answer: Answer) -> None:
        await connection.send(encode(msgspec.structs.replace(answer, run_id=self._welcome.run_id)))

    async def _change(self, request: ChangeRequest) -> Answer:
        """Have another plan made; the answer comes with it, or when who leaves is let go."""
        number = time.time_ns()  # one that was asked of an earlier controller is another one
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            match request:
                case DrainRequest(workers=workers, wait=wait):
                    self.apply(ChangeAsked(drained=workers, request=number, wait=wait))
                case RebalanceRequest(layers=layers):
                    self.apply(ChangeAsked(layers=layers, request=number))
            return await answer
        finally:
            del self._asked[number]

    def _follow_script(self, step: int) -> None:
        """Order what the job was launched to do at a step, when a worker has come to it and nothing else goes on."""
        script, state = self._state.roster.launch.rebalances, self._state
        done = state.roster.scripted
        if done == len(script) or step < script[done].step:
            return
        if isinstance(state, Running) and state.migration is None and (state.search is None or not state.search.asked):
            self.apply(ChangeAsked(layers=script[done].layers))

    # ------------------------------------------------------------ commands

    def _carry_out(self, command: Command) -> None:
        match command:
            case Tell(workers=workers, message=message):
                self._send(workers, message)
            case TellAgent(node=0, message=order):
                self._local_agent(order)
            case TellAgent(node=node, message=order):
                if node in self._agents:
                    broadcast([self._agents[node]], encode(order))
            case WelcomeAgents():
                self._local_agent(self._welcome)
                broadcast(self._agents.values(), encode(self._welcome))
            case MakePlan():
                self._spawn(self._run_planner(command))
            case ImprovePlan():
                self._spawn(self._run_improver(command))
            case Reply(request=request, ok=ok, text=text):
                waiting = self._asked.get(request)
                if waiting is not None and not waiting.done():
                    waiting.set_result(Answer(ok=ok, text=text))
            case ShowBlock():
                self._follow_plan()
                self._show(add_step_times(command, self._outlook.meter.summary()))
            case LogLoss():
                self._log(command)
            case Note(text=text, warning=warning):
                logger.log(logging.WARNING if warning else logging.INFO, "%s", text)
            case EndJob():
                if not self.ended.done():
                    self.ended.set_result(command)

    def _send(self, workers: Sequence[int], message: Message) -> None:
        # broadcast() writes at once and skips closed connections; it never waits for a reader.
        broadcast([self._workers[worker] for worker in workers if worker in self._workers], encode(message))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_planner(self, command: MakePlan) -> None:
        with self._ending_on_bugs():
            costs = self._outlook.reckon(self._state.roster.profile)
            answer = await asyncio.to_thread(make_plan, command, costs, self._state.roster.launch.policy)
        self.apply(answer)

    async def _run_improver(self, command: ImprovePlan) -> None:
        with self._ending_on_bugs():
            costs = self._outlook.reckon(self._state.roster.profile)
            answer = await asyncio.to_thread(improve_plan, command, costs, self._state.roster.launch.policy)
        self.apply(answer)

    @contextlib.contextmanager
    def _ending_on_bugs(self) -> Iterator[None]:
        """A bug of ours must end the job with its traceback, not leave workers waiting for an answer."""
        try:
            yield
        except Exception as error:
            if not self.ended.done():
                self.ended.set_exception(error)
            raise


def _speaker(message: FromClient) -> int | None:
    """The worker a message says it is from; None for messages that are not of workers."""
    if isinstance(message, Settled | Recovered | Migrated | Measured):
        return message.report.worker
    if isinstance(message, Traced):
        return message.trace.worker
    worker = getattr(message, "worker", None)
    return worker if isinstance(worker, int) else None
