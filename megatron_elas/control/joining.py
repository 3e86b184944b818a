"""How a job begins: agents and workers join, the first plan goes out."""

from __future__ import annotations

from dataclasses import replace

from megatron_elas.control.commands import MakePlan, Note, Tell, WelcomeAgents
from megatron_elas.control.ending import Step, describe_exit, describe_status, exit_code_of, finish, stop
from megatron_elas.control.messages import PROTOCOL_VERSION, AgentHello, Hello, Start, WorkerExited
from megatron_elas.control.states import Gathering, Roster, Running
from megatron_elas.spec.errors import ExitCode
from megatron_elas.spec.plan import ElasticPlan

OWN_EXIT_CODES = frozenset(code.value for code in ExitCode) - {ExitCode.FINISHED, ExitCode.CRASHED}
"""A worker that ends with one of these has said what is wrong; the job ends with the same."""


def find_agent_problem(roster: Roster, hello: AgentHello) -> str | None:
    """Why this agent cannot take part, as a sentence; None when it can."""
    launch = roster.launch
    if hello.version != PROTOCOL_VERSION:
        return (
            f"node {hello.node} speaks protocol {hello.version}, node 0 speaks {PROTOCOL_VERSION}: install one "
            f"version of megatron_elas on all nodes"
        )
    if not 0 <= hello.node < launch.nnodes:
        return f"--node-rank {hello.node} is not one of 0 to {launch.nnodes - 1} (--nnodes of node 0)"
    if hello.node in roster.agents and not hello.again:
        return f"--node-rank {hello.node} is taken by another node: give every node its own"
    if hello.workers != launch.workers_of(hello.node):
        return (
            f"node {hello.node} has {len(hello.workers)} workers, node 0 expects {launch.workers_per_node}: give "
            f"--nproc-per-node the same value on all nodes"
        )
    return None


def agent_joined(state: Gathering, hello: AgentHello, now: float) -> Step:
    """Remember the node. The first one starts the clock for the others, the last one the workers."""
    agents = state.roster.agents | {hello.node}
    complete = len(agents) == state.roster.launch.nnodes
    roster = replace(state.roster, agents=agents, started=complete)
    deadline_s = state.deadline_s or now + roster.launch.timeouts.join_timeout_s
    return replace(state, roster=roster, deadline_s=deadline_s), (WelcomeAgents(),) if complete else ()


def worker_joined(state: Gathering, hello: Hello, now: float) -> Step:
    """Remember the worker; the last one asks for the plan of epoch 0."""
    roster = state.roster
    if hello.worker in roster.hellos:
        return state, (Note(text=f"worker {hello.worker} joined twice; the second is ignored"),)
    problem = _find_problem(roster, hello)
    if problem is not None:
        return stop(state, *problem)
    deadline_s = state.deadline_s if roster.hellos else now + roster.launch.timeouts.join_timeout_s
    roster = replace(roster, hellos={**roster.hellos, hello.worker: hello})
    state = replace(state, roster=roster, deadline_s=deadline_s)
    if len(roster.hellos) < roster.launch.world_size:
        return state, ()
    return state, (MakePlan(job=hello.job, epoch=0, old=None, lost=(), domains=roster.domains),)


def _find_problem(roster: Roster, hello: Hello) -> tuple[ExitCode, str] | None:
    launch = roster.launch
    if hello.version != PROTOCOL_VERSION:
        return ExitCode.WRONG_VERSION, (
            f"worker {hello.worker} speaks protocol {hello.version}, the launcher speaks {PROTOCOL_VERSION}: "
            f"install one version of megatron_elas on all nodes"
        )
    if not 0 <= hello.worker < launch.world_size:
        return ExitCode.BAD_USAGE, f"worker {hello.worker} joined a job of workers 0 to {launch.world_size - 1}"
    if roster.job is not None and hello.job != roster.job:
        first = min(roster.hellos)
        return ExitCode.BAD_USAGE, (
            f"worker {hello.worker} was started for {hello.job}, worker {first} for {roster.job}: "
            f"give all workers the same flags"
        )
    if hello.job.world_size != launch.world_size:
        return ExitCode.BAD_USAGE, (
            f"{launch.world_size} workers were launched, but tensor {hello.job.tensor_parallel} x pipeline "
            f"{hello.job.pipeline_parallel} x data {hello.job.data_parallel} parallel needs {hello.job.world_size}: "
            f"change --nproc-per-node, --nnodes or the parallel sizes"
        )
    if roster.exited:
        worker, status = next(iter(roster.exited.items()))
        return ExitCode.NOT_STARTED, f"worker {worker} {describe_status(status)} without joining"
    return None


def plan_made(state: Gathering, plan: ElasticPlan) -> Step:
    """Send everybody off."""
    workers = tuple(sorted(state.roster.hellos))
    start = Start(plan=plan, addresses=state.roster.addresses_of(workers))
    note = Note(text=f"all {len(workers)} workers joined: {plan.placement.describe()}")
    return Running(roster=state.roster, plan=plan), (Tell(workers=workers, message=start), note)


def worker_exited(state: Gathering, event: WorkerExited) -> Step:
    """End as the process did when nobody joined (a plain job), else say that it is too early to lose one."""
    worker, status, how = event.worker, event.status, describe_exit(event)
    roster = replace(state.roster, exited={**state.roster.exited, worker: status})
    state = replace(state, roster=roster)
    if status in OWN_EXIT_CODES:
        first = event.refusal
        if first is None:
            return stop(state, status, f"worker {worker} {how}", worker=worker)
        reason = f": {first.sentence}" if first.sentence else f" {describe_status(first.exit_code)}"
        return stop(state, first.exit_code, f"worker {first.worker}{reason}", worker=first.worker)
    if roster.hellos or (roster.launch.elastic and status < 0):
        return lost_too_early(state, worker, how)
    if status != 0:
        return stop(state, exit_code_of(status), f"worker {worker} {how}", worker=worker)
    return (state, ()) if roster.remaining else finish(roster)


def lost_too_early(state: Gathering, worker: int, detail: str) -> Step:
    """Before the first step there is no state to recover."""
    return stop(
        state,
        ExitCode.NOT_STARTED,
        f"worker {worker} was lost before training began ({state.roster.explain(worker, detail)}): look at its output, "
        f"then start again",
        worker=worker,
    )


def check_deadline(state: Gathering, now: float) -> Step:
    """Give up when nodes, or workers of an elastic job, are still missing."""
    roster = state.roster
    if state.deadline_s is None or now < state.deadline_s:
        return state, ()
    limit = f"within --join-timeout-s={roster.launch.timeouts.join_timeout_s:g}"
    absent_nodes = sorted(set(range(roster.launch.nnodes)) - roster.agents)
    if absent_nodes:
        return stop(state, ExitCode.NOT_STARTED, f"nodes {absent_nodes} did not join {limit}: start elasrun on them")
    absent = sorted(set(range(roster.launch.world_size)) - roster.hellos.keys())
    if roster.hellos and absent:
        return stop(
            state,
            ExitCode.NOT_STARTED,
            f"workers {absent} did not join {limit}: look at their output, or raise the limit if they need longer",
        )
    return state, ()
