"""The controller: one pure function from a state and an event to the next state and commands.

No sockets, clocks or threads. Guarantees, whatever arrives in whatever order: epochs only grow; each
survivor gets one ``Recover`` per settled epoch; a lost worker gets no message any more, but for a
``Stop`` with the loss itself, and can change nothing; a job ends once, with one code.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import replace

from megatron_elas.control import ending, joining, migrating, recovering, rejoining
from megatron_elas.control.commands import Note, Tell, TellAgent
from megatron_elas.control.crashes import find_twin, shorten
from megatron_elas.control.ending import Step, describe_exit, dismiss, end_if_empty, finish, stop
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
from megatron_elas.control.launch import Launch
from megatron_elas.control.messages import (
    AgentHello,
    CopyDiffered,
    Crashed,
    Declined,
    Drained,
    Failed,
    FaultFired,
    Finished,
    Hello,
    Inject,
    KillWorker,
    LeaveOut,
    Migrated,
    PeerUnreachable,
    Recovered,
    Settled,
    Stalled,
    Stop,
    Terminate,
    Unverified,
    WorkerExited,
    WorkerHung,
)
from megatron_elas.control.recovering import Training
from megatron_elas.control.states import Ended, Gathering, Resuming, Roster, Running, Settling, State, Stopping
from megatron_elas.spec.errors import ExitCode
from megatron_elas.spec.events import LossReason, WorkerLost

_SOCKET = re.compile(r" \(channel \d+, epoch \d+\)")
"""Which of a link's sockets broke: in the worker's traceback it helps, to people it says nothing."""


def initial_state(launch: Launch) -> Gathering:
    """Before anybody joined."""
    return Gathering(roster=Roster(launch=launch))


def step(state: State, event: Event, now: float) -> Step:
    """What follows from one event.

    Args:
        state: The state before.
        event: A message of a worker or agent, or an observation of the controller's own process.
        now: Wall-clock time in seconds, never going back.

    Returns:
        The state after, and commands in the order in which to carry them out.
    """
    after, commands = _step(state, event, now)
    return after, (*commands, *migrating.wind_up(state, after))


def _step(state: State, event: Event, now: float) -> Step:
    match event:
        case AgentHello() | AgentLost() | WorkerExited():
            return _processes_changed(state, event, now)
        case Terminate(signum=signum):
            return stop(state, 128 + signum, f"ended by {signal.Signals(signum).name}", signum)
        case Tick(waiting=waiting):
            return _check_deadlines(state, now, waiting)
        case Restarted():
            return rejoining.go_on(state, event)
        case Hello() if isinstance(state, Gathering):
            return joining.worker_joined(state, event, now)
        case PlanMade() | PlanRefused():
            return _planner_answered(state, event, now)
        case ChangeAsked():
            return migrating.change_asked(state, event)
        case PlanImproved() | PlanKept():
            return _improvement_answered(state, event)
        case Drained():
            return migrating.drained(state, event)
        case Inject(worker=worker, fault=fault):
            roster = replace(state.roster, injected=(*state.roster.injected, fault))
            return replace(state, roster=roster), (Tell(workers=(worker,), message=event),)
        case FaultFired():
            return _fault_fired(state, event), ()
        case Crashed():
            return _crashed(state, event)
        case _ if isinstance(state, Stopping | Ended):
            return state, ()
        case _:
            return _worker_spoke(state, event, now)


def _worker_spoke(state: Gathering | Training, event: Event, now: float) -> Step:
    """Messages of workers that take part, and the lack of them."""
    match event:
        case Failed():
            if event.worker in state.roster.lost or event.worker in state.roster.drained:
                return _ignore(state, event)
            code = event.exit_code or ExitCode.CRASHED
            return stop(state, code, f"worker {event.worker}: {event.sentence}", worker=event.worker)
        case WorkerSilent() if event.worker in state.roster.survivors:
            detail = f"no heartbeat for {event.silent_s:.1f} s"
            return _lose(state, [event.worker], LossReason.SILENT, detail, now)
        case Stalled() if event.worker in state.roster.survivors and not isinstance(state, Gathering):
            return _lose(state, [event.worker], LossReason.SILENT, event.detail, now)
        case WorkerHung() | WorkerSilent() if event.worker in state.roster.drained:
            return state, (
                TellAgent(node=state.roster.launch.node_of(event.worker), message=KillWorker(worker=event.worker)),
            )
        case WorkerHung() if event.worker in state.roster.survivors:
            return _lose(state, [event.worker], LossReason.SILENT, event.detail, now)
        case PeerUnreachable() if not isinstance(state, Gathering):
            return _peer_unreachable(state, event, now)
        case LeaveOut() if not isinstance(state, Gathering):
            if event.worker in state.roster.survivors and event.epoch in state.epochs:
                return recovering.leave_out(state, event, now)
        case CopyDiffered() if event.worker in state.roster.survivors:
            return _copy_differed(state, event)
        case Unverified() if isinstance(state, Resuming):
            if event.worker in state.roster.survivors and event.epoch == state.epoch:
                return recovering.distrust(state, event, now)
        case Unverified() if isinstance(state, Running) and state.migration is not None:
            if event.worker in state.roster.survivors and event.epoch == state.migration.epoch != state.epoch:
                return recovering.stay(state, event, now)
        case Migrated(report=crossing) if isinstance(state, Running) and state.migration is not None:
            seated = state.migration.target.placement.workers
            if crossing.epoch == state.migration.epoch and crossing.worker in set(seated) & set(state.roster.survivors):
                return migrating.migrated(state, crossing)
        case Declined() if isinstance(state, Running) and state.migration is not None:
            waited_for = event.worker in state.roster.survivors and not state.migration.arrived
            if event.epoch == state.migration.epoch and waited_for:
                return migrating.declined(state, event)
        case Finished() if not isinstance(state, Gathering) and event.worker in state.roster.survivors:
            roster = replace(state.roster, steps=max(state.roster.steps, event.steps))
            return recovering.worker_finished(replace(state, roster=roster), event.worker)
        case Settled(report=report) if isinstance(state, Settling):
            if report.epoch == state.epoch and report.worker in state.roster.survivors:
                return recovering.settled(state, report, now)
        case Recovered(report=outcome) if isinstance(state, Resuming):
            if outcome.epoch == state.epoch and outcome.worker in state.roster.survivors:
                return recovering.recovered(state, outcome)
        case _:
            pass
    return _ignore(state, event)


def _peer_unreachable(state: Training, event: PeerUnreachable, now: float) -> Step:
    survivors = state.roster.survivors
    if event.worker not in survivors or event.epoch not in state.epochs:
        return _ignore(state, event)
    if event.peer in state.roster.finished:
        roster, goodbyes = dismiss(state.roster)
        return replace(state, roster=roster), goodbyes
    if event.peer not in survivors or event.peer == event.worker:
        return _ignore(state, event)
    detail = f"link from worker {event.worker} broke: {_SOCKET.sub('', event.detail)}"
    return _lose(state, [event.peer], LossReason.UNREACHABLE, detail, now)


def _planner_answered(state: State, event: PlanMade | PlanRefused, now: float) -> Step:
    match state, event:
        case Gathering(), PlanMade(plan=plan) if plan.epoch == 0:
            return joining.plan_made(state, plan)
        case Gathering(), PlanRefused(epoch=0):
            return stop(state, event.exit_code, event.sentence)
        case Settling(epoch=epoch), PlanMade(plan=plan) if plan.epoch == epoch:
            return recovering.plan_made(state, plan, event.seconds, now)
        case Settling(epoch=epoch), PlanRefused() if event.epoch == epoch:
            return recovering.plan_refused(state, event.exit_code, event.sentence)
        case _:
            return _ignore(state, event)


def _improvement_answered(state: State, event: PlanImproved | PlanKept) -> Step:
    if not isinstance(state, Running) or state.search != event.search or state.roster.finished:
        return _ignore(state, event)
    return migrating.improved(state, event) if isinstance(event, PlanImproved) else migrating.kept(state, event)


def _fault_fired(state: State, event: FaultFired) -> State:
    """Remember when it struck. The news may come after the loss, so it is also put there."""
    roster = state.roster
    roster = replace(roster, faults={**roster.faults, event.worker: event}, struck=(*roster.struck, event.fault))
    state = replace(state, roster=roster)
    if isinstance(state, Settling | Resuming):
        return replace(state, outage=state.outage.with_fault(event))
    return state


def _crashed(state: State, event: Crashed) -> Step:
    """Remember the error. The loss is noticed by other signs; the job ends when a second worker fails alike.

    Also of a worker that is lost already: its links may have broken before its last words were read.
    """
    twin = find_twin(state.roster.crashes, event)
    if event.worker in state.roster.crashes:
        return _ignore(state, event)
    state = replace(state, roster=replace(state.roster, crashes={**state.roster.crashes, event.worker: event}))
    if isinstance(state, Settling | Resuming):
        state = replace(state, outage=state.outage.with_crash(event))
    if twin is None or state.roster.finished:
        return state, ()
    return stop(
        state,
        ExitCode.CRASHED,
        f"workers {twin.worker} and {event.worker} failed in step {event.step} with the same error, which the others "
        f"would run into too ({shorten(event.error)}): mend its cause, then restart from the newest checkpoint",
        worker=event.worker,
    )


def _copy_differed(state: Gathering | Training, event: CopyDiffered) -> Step:
    roster = replace(state.roster, copies_replaced=state.roster.copies_replaced + 1)
    text = (
        f"the copy of worker {event.owner}'s optimizer state on its backup, worker {event.worker}, differed in "
        f"{event.slot} before step {event.step} and was sent anew: if this happens again, test the memory of both hosts"
    )
    return replace(state, roster=roster), (Note(text=text, warning=True),)


def _processes_changed(state: State, event: AgentHello | AgentLost | WorkerExited, now: float) -> Step:
    match event:
        case AgentHello() if isinstance(state, Gathering):
            return joining.agent_joined(state, event, now)
        case WorkerExited(worker=worker):
            if worker in state.roster.exited or not 0 <= worker < state.roster.launch.world_size:
                return _ignore(state, event)
            return _worker_exited(state, event, now)
        case AgentLost() if event.node in state.roster.agents:
            return _agent_lost(state, event, now)
        case _:
            return _ignore(state, event)


def _worker_exited(state: State, event: WorkerExited, now: float) -> Step:
    worker, status = event.worker, event.status
    how = describe_exit(event)
    if isinstance(state, Gathering):
        return joining.worker_exited(state, event)
    roster = replace(state.roster, exited={**state.roster.exited, worker: status})
    state = replace(state, roster=roster)
    match state:
        case Ended():
            return state, ()
        case Stopping():
            return end_if_empty(state)
        case Running() | Settling() | Resuming() if worker in roster.finished or worker in roster.drained:
            done = "finished" if worker in roster.finished else "been drained"
            note = Note(text=f"worker {worker} had {done}, then {how}", warning=status != 0)
            if roster.remaining:
                return state, (note,)
            ended, commands = finish(roster)
            return ended, (note, *commands)
        case Settling() | Resuming() if worker in roster.lost:
            outage = state.outage.with_exit(worker, how)
            return replace(state, outage=outage), ()
        case Running() if worker in roster.lost:
            return state, ()
        case _:
            detail = how + (" before the end of training" if status == 0 else "")
            return _lose(state, [worker], LossReason.EXITED, detail, now)


def _agent_lost(state: State, event: AgentLost, now: float) -> Step:
    """All workers of the node are lost together. The agent fences them when it finds itself cut off, and so do we."""
    roster, node = state.roster, event.node
    roster = replace(roster, agents=roster.agents - {node})
    state = replace(state, roster=roster)
    affected = [worker for worker in roster.remaining if roster.launch.node_of(worker) == node]
    match state:
        case Ended():
            return state, ()
        case Stopping():
            return end_if_empty(state)
        case Gathering():
            how = "left" if event.silent_s is None else f"was silent for {event.silent_s:.1f} s"
            return stop(state, ExitCode.NOT_STARTED, f"node {node} {how} before training began: look at its output")
        case Running() | Settling() | Resuming():
            unneeded = [worker for worker in affected if worker in roster.finished or worker in roster.drained]
            state = replace(state, roster=replace(roster, exited={**roster.exited, **dict.fromkeys(unneeded, 0)}))
            lost = [worker for worker in affected if worker not in unneeded]
            if lost:
                return _lose_node(state, tuple(lost), event, now)
            return (state, ()) if state.roster.remaining else finish(state.roster)


def _lose_node(state: Training, workers: tuple[int, ...], event: AgentLost, now: float) -> Step:
    if event.silent_s is not None:
        detail = f"node {event.node} did not answer for {event.silent_s:.1f} s"
        return _lose(state, workers, LossReason.SILENT, detail, now)
    reason, detail = LossReason.EXITED, f"the agent of node {event.node} is gone"
    goodbye = Stop(exit_code=ExitCode.CUT_OFF, sentence=f"{detail}, so its workers were taken for lost")
    changed, commands = _lose(state, workers, reason, detail, now)
    return changed, (*commands, Tell(workers=workers, message=goodbye))


def _lose(state: Gathering | Training, workers: Iterable[int], reason: LossReason, detail: str, now: float) -> Step:
    if isinstance(state, Gathering):
        return joining.lost_too_early(state, next(iter(workers)), detail)
    faults: Mapping[int, FaultFired] = state.roster.faults
    losses = [
        WorkerLost(
            worker=worker,
            reason=reason,
            detail=detail,
            at_s=now,
            fault_s=faults[worker].at_s if worker in faults else None,
        )
        for worker in workers
    ]
    return recovering.lose(state, losses, now)


def _check_deadlines(state: State, now: float, waiting: frozenset[int]) -> Step:
    match state:
        case Gathering():
            return joining.check_deadline(state, now)
        case Settling() | Resuming():
            return recovering.check_deadline(state, now, waiting)
        case Stopping():
            return ending.check_deadline(state, now)
        case _:
            return state, ()


def _ignore(state: State, event: Event) -> Step:
    return state, (Note(text=f"ignored in state {type(state).__name__}: {event}"),)
