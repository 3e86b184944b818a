"""After the controller was restarted: how it goes on, and what those who come back are told.

Whoever comes back says first what it has seen, and repeats what was not noted; all of that may be known already, and
then changes nothing. The controller repeats what it had decided. So it does not matter at which moment it was killed.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_elas.control import migrating
from megatron_elas.control.commands import Command, MakePlan, Note
from megatron_elas.control.ending import Step
from megatron_elas.control.events import Restarted
from megatron_elas.control.messages import (
    HelloAgain,
    KillWorker,
    Quiesce,
    Start,
    Stop,
    StopAll,
    ToAgent,
    ToWorker,
    Welcome,
)
from megatron_elas.control.recovering import FENCED, ask_planner, farewell
from megatron_elas.control.states import Ended, Gathering, Resuming, Running, Settling, State, Stopping
from megatron_elas.spec.errors import ExitCode


def go_on(state: State, event: Restarted) -> Step:
    """Give everybody the time back in which there was no controller, and ask again for a plan that was on its way."""
    note = Note(
        text=f"the controller goes on after {event.away_s:.1f} s, in state {type(state).__name__}", warning=True
    )
    planning: tuple[Command, ...] = ()
    match state:
        case Gathering(roster=roster) if roster.job is not None and len(roster.hellos) == roster.launch.world_size:
            planning = (MakePlan(job=roster.job, epoch=0, old=None, lost=(), domains=roster.domains),)
        case Settling(plan=None):
            planning = (ask_planner(state),)
        case Running() if state.search is not None:
            planning = (migrating.ask_planner(state),)
        case _:
            pass
    if isinstance(state, Gathering | Settling | Resuming | Stopping) and state.deadline_s is not None:
        state = replace(state, deadline_s=state.deadline_s + event.away_s)
    return state, (*planning, note)


def find_stranger(state: State, again: HelloAgain) -> Stop | None:
    """Why a worker that comes back is sent away; None when it is welcome."""
    roster, hello = state.roster, again.hello
    known = roster.hellos.get(hello.worker)
    if known is None or (known.pid, known.host) != (hello.pid, hello.host):
        sentence = f"worker {hello.worker} cannot come back: it was not there before"
        return Stop(exit_code=ExitCode.NOT_STARTED, sentence=sentence)
    if hello.worker in roster.lost:
        return farewell(roster.lost[hello.worker])
    if hello.worker in roster.drained:
        return migrating.FAREWELL
    return None


def catch_up_worker(state: State, again: HelloAgain) -> tuple[ToWorker, ...]:
    """What a worker that came back, and is no stranger, has missed."""
    if again.hello.worker in state.roster.finished:
        return () if again.finished else (Stop(exit_code=ExitCode.FINISHED, sentence="training is done"),)
    match state:
        case Running(plan=plan) if again.plan_epoch < 0 and plan.epoch == 0:
            start = Start(plan=plan, addresses=state.roster.addresses_of(plan.placement.workers))
            return (start, *_catch_up_migration(state, again))
        case Running():
            return _catch_up_migration(state, again)
        case Settling() if again.epoch < state.epoch:
            return (Quiesce(epoch=state.epoch, lost=state.outage.losses),)
        case Resuming() if again.plan_epoch < state.epoch:
            announced = again.epoch >= state.epoch
            quiesce = () if announced else (Quiesce(epoch=state.epoch, lost=state.outage.losses),)
            return (*quiesce, state.order)
        case _:
            return ()


def _catch_up_migration(state: Running, again: HelloAgain) -> tuple[ToWorker, ...]:
    """Whoever missed the order was waited for, so none of those that are told has gone over."""
    migration = state.migration
    if migration is None or migration.arrived or again.plan_epoch >= migration.epoch:
        return ()
    seated = migration.before.placement.find_seat(again.hello.worker) is not None
    return (state.migrate,) if seated else ()


def catch_up_agent(state: State, node: int, welcome: Welcome) -> tuple[ToAgent, ...]:
    """What an agent that came back may have missed; all of it may be obeyed twice."""
    roster = state.roster
    if isinstance(state, Stopping | Ended):
        return (StopAll(exit_code=state.exit_code, sentence=state.sentence),)
    fences = tuple(
        KillWorker(worker=worker)
        for worker, loss in sorted(roster.lost.items())
        if loss.reason in FENCED and roster.launch.node_of(worker) == node and worker not in roster.exited
    )
    return (welcome, *fences) if roster.started else ()
