"""How a job ends: asked to stop, or all its processes gone."""

from __future__ import annotations

import signal
from dataclasses import replace

from megatron_elas.control.commands import Command, EndJob, Note, Tell, TellAgent
from megatron_elas.control.messages import Stop, StopAll, WorkerExited
from megatron_elas.control.states import Ended, Roster, State, Stopping
from megatron_elas.spec.errors import ExitCode

Step = tuple[State, tuple[Command, ...]]
"""The next state and what to do."""


def stop(
    state: State, exit_code: int, sentence: str, signum: int = signal.SIGTERM, *, worker: int | None = None
) -> Step:
    """Have every agent end its workers. A job that is ending already keeps its first reason.

    Args:
        state: The state before.
        exit_code: Of the job.
        sentence: Why.
        signum: What agents send first.
        worker: Whose output says more, if one's does.
    """
    if isinstance(state, Stopping | Ended):
        return state, (Note(text=f"already ending, so this changes nothing: {sentence}"),)
    message = StopAll(exit_code=exit_code, sentence=sentence, signum=signum)
    orders = tuple(TellAgent(node=node, message=message) for node in sorted(state.roster.agents))
    stopping = Stopping(roster=state.roster, exit_code=exit_code, sentence=sentence, worker=worker)
    ended, commands = end_if_empty(stopping)
    return ended, (*orders, *commands)


def end_if_empty(state: Stopping) -> Step:
    """``Ended`` once no process is left that an agent could still report."""
    if state.roster.watched:
        return state, ()
    ended = Ended(roster=state.roster, exit_code=state.exit_code, sentence=state.sentence, worker=state.worker)
    return ended, (end_job(ended),)


def end_job(ended: Ended) -> EndJob:
    """What there is to say of the job."""
    roster = ended.roster
    return EndJob(
        exit_code=ended.exit_code,
        sentence=ended.sentence,
        worker=ended.worker,
        steps=roster.steps,
        lost=len(roster.lost),
        drained=len(roster.drained),
        unstruck=roster.unstruck,
    )


def check_deadline(state: Stopping, now: float) -> Step:
    """End without agents that should long have killed their workers."""
    if state.deadline_s is None:
        return replace(state, deadline_s=now + 2 * state.roster.launch.timeouts.grace_s), ()
    if now < state.deadline_s:
        return state, ()
    note = Note(text=f"workers {list(state.roster.watched)} were not reported to have ended", warning=True)
    ended, commands = end_if_empty(replace(state, roster=replace(state.roster, agents=frozenset())))
    return ended, (note, *commands)


def finish(roster: Roster) -> Step:
    """The job is done: every process that was not lost ended well."""
    message = StopAll(exit_code=ExitCode.FINISHED, sentence="")
    orders = tuple(TellAgent(node=node, message=message) for node in sorted(roster.agents))
    ended = Ended(roster=roster, exit_code=ExitCode.FINISHED, sentence="")
    return ended, (*orders, end_job(ended))


def dismiss(roster: Roster) -> tuple[Roster, tuple[Command, ...]]:
    """Let the survivors go: somebody passed the last barrier, so all have done their work.

    Without it a survivor whose last barrier was cut by a late loss would wait for peers that have
    left.
    """
    survivors = roster.survivors
    if not survivors:
        return roster, ()
    goodbye = Stop(exit_code=ExitCode.FINISHED, sentence="training is done")
    return replace(roster, finished=roster.finished | set(survivors)), (Tell(workers=survivors, message=goodbye),)


def describe_status(status: int) -> str:
    """For people: ``exited with status 1`` or ``killed by SIGKILL``."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def describe_exit(event: WorkerExited) -> str:
    """The status, and what else its agent knew."""
    return f"{describe_status(event.status)}, {event.why}" if event.why else describe_status(event.status)


def exit_code_of(status: int) -> int:
    """What a shell would say: 128 plus the signal number for a signal."""
    return status if status >= 0 else 128 - status
