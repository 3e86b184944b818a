"""From a loss to training again: settle, plan, resume.

Every loss starts a new epoch. Losses add up until every survivor has committed a step under one
plan; until then each new plan is made from the last one that all had recovered under, and survivors
may hold state in the layout of any plan sent out since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_elas.control import migrating
from megatron_elas.control.commands import Command, LogLoss, MakePlan, Note, ShowRecovery, Tell, TellAgent
from megatron_elas.control.crashes import shorten
from megatron_elas.control.ending import Step, dismiss, finish, stop
from megatron_elas.control.messages import KillWorker, LeaveOut, Quiesce, Stop, Unverified
from megatron_elas.control.recovery_block import (
    facts_of,
    find_slowest,
    format_block,
    longest_background_s,
    loss_facts,
    phases_ms,
)
from megatron_elas.control.states import Outage, Resuming, Roster, Running, Settling
from megatron_elas.planner.fallback import fall_back
from megatron_elas.planner.settle import settle
from megatron_elas.spec.errors import ExitCode, StateInvalid
from megatron_elas.spec.events import ActivityFailed, LossReason, WorkerLost
from megatron_elas.spec.plan import ElasticPlan, Settlement
from megatron_elas.spec.report import RecoveryReport, SettleReport

Training = Running | Settling | Resuming
"""States in which a loss leads to a recovery."""

FENCED = frozenset({LossReason.SILENT, LossReason.UNREACHABLE})
"""Losses of processes that may still live; they are killed."""


def lose(state: Training, losses: Sequence[WorkerLost], now: float) -> Step:
    """Start a new epoch without these workers; all of them survivors until now."""
    losses = [replace(loss, detail=state.roster.explain(loss.worker, loss.detail)) for loss in losses]
    roster = migrating.cut_short(state)
    roster = replace(roster, lost={**roster.lost, **{loss.worker: loss for loss in losses}})
    fences = _fence(roster, losses)
    notes = (
        *(Note(text=f"worker {loss.worker} is lost: {loss.reason}, {loss.detail}", warning=True) for loss in losses),
        *_log_losses(state, losses),
    )
    if roster.finished:
        return _end_training(replace(state, roster=roster), (*fences, *notes))
    if not roster.survivors:
        stopped, commands = stop(
            replace(state, roster=roster),
            ExitCode.GAVE_UP,
            f"no worker is left, the last one {losses[-1].detail}: restart from the newest checkpoint",
        )
        return stopped, (*fences, *notes, *commands)
    settling, quiesce, planning = _begin_epoch(replace(state, roster=roster), losses, (), now)
    return settling, (quiesce, *fences, planning, *notes)


def leave_out(state: Training, event: LeaveOut, now: float) -> Step:
    """Start a new epoch with the same workers, in which what failed on one of them is not run again."""
    failure = ActivityFailed(worker=event.culprit, detail=shorten(event.detail), at_s=now)
    note = Note(text=f"worker {failure.worker} {failure.detail}; training goes on without it", warning=True)
    settling, quiesce, planning = _begin_epoch(state, (), (failure,), now)
    return settling, (quiesce, planning, note)


def distrust(state: Resuming, event: Unverified, now: float) -> Step:
    """A check failed: start a new epoch with the same workers and state from elsewhere, but not twice for one cause."""
    # Copies that were renewed once and are bad again are no remedy.
    renewable = event.renewable and (event.check, event.step, True) not in state.roster.unverified
    place = (event.check, event.step, renewable)
    if place in state.roster.unverified:
        return stop(
            state,
            ExitCode.STATE_INVALID,
            f"{event.sentence}. The same check failed before the same step already, so trying again cannot help: "
            f"restart from the newest checkpoint with --load",
        )
    outage = replace(
        state.outage,
        unverified=(*state.outage.unverified, event.sentence),
        distrusted=state.outage.distrusted or not renewable,
    )
    roster = replace(state.roster, unverified=state.roster.unverified | {place})
    remedy = "other copies are to take its place" if renewable else "the newest checkpoint is to take the state's place"
    settling, quiesce, planning = _begin_epoch(replace(state, roster=roster, outage=outage), (), (), now)
    return settling, (quiesce, planning, Note(text=f"{event.sentence}; {remedy}", warning=True))


def stay(state: Running, event: Unverified, now: float) -> Step:
    """A check failed where all go over to another plan: start a new epoch with the same workers, which go on from the
    layout that is whole, and leave layers where they are.
    """
    assert state.migration is not None
    text = f"on the way to epoch {state.migration.epoch}: {event.sentence}; from now on layers move only after a loss"
    state = replace(state, roster=replace(state.roster, settled_down=True))
    settling, quiesce, planning = _begin_epoch(state, (), (), now)
    outage = replace(settling.outage, unverified=(event.sentence,), began_s=now)
    return replace(settling, outage=outage), (quiesce, planning, Note(text=text, warning=True))


def _begin_epoch(
    state: Training, losses: Sequence[WorkerLost], failures: Sequence[ActivityFailed], now: float
) -> tuple[Settling, Tell, MakePlan]:
    """The state that waits for the survivors of the state's roster, and what they and the planner are told."""
    roster, outage = state.roster, _extend_outage(state, losses, failures)
    settling = Settling(
        roster=roster,
        epoch=state.next_epoch,
        outage=outage,
        deadline_s=now + roster.launch.timeouts.settle_timeout_s,
    )
    quiesce = Tell(workers=roster.survivors, message=Quiesce(epoch=settling.epoch, lost=outage.losses))
    return settling, quiesce, ask_planner(settling)


def _fence(roster: Roster, losses: Sequence[WorkerLost]) -> tuple[Command, ...]:
    """Have those killed that may still live, and tell them too: one of the two may not get through."""
    kills = tuple(
        TellAgent(node=node, message=KillWorker(worker=loss.worker))
        for loss in losses
        if loss.reason in FENCED and (node := roster.launch.node_of(loss.worker)) in roster.agents
    )
    told: dict[str, list[WorkerLost]] = {}
    for loss in losses:
        if loss.reason in FENCED:
            told.setdefault(loss.detail, []).append(loss)
    farewells = (
        Tell(workers=tuple(loss.worker for loss in alike), message=farewell(alike[0])) for alike in told.values()
    )
    return (*kills, *farewells)


def farewell(loss: WorkerLost) -> Stop:
    """What a lost worker is told, if it still lives."""
    return Stop(exit_code=ExitCode.CUT_OFF, sentence=f"it was taken for lost: {loss.detail}")


def _log_losses(state: Training, losses: Sequence[WorkerLost]) -> tuple[Command, ...]:
    before = state.plan.placement if isinstance(state, Running) else state.outage.began_in
    return tuple(LogLoss(epoch=state.epoch, worker=loss.worker, facts=loss_facts(before, loss)) for loss in losses)


def _extend_outage(state: Training, losses: Sequence[WorkerLost], failures: Sequence[ActivityFailed]) -> Outage:
    match state:
        case Running(plan=plan, migration=migration):
            plans = {plan.epoch: plan}
            if migration is not None and not migration.arrived:  # workers may hold either layout
                plans[migration.epoch] = migration.target
            outage = Outage(began_in=plan.placement, plans=plans)
        case Settling(outage=before) | Resuming(outage=before):
            outage = before
    return replace(outage, losses=(*outage.losses, *losses), failures=(*outage.failures, *failures))


def ask_planner(state: Settling) -> MakePlan:
    """For the epoch that begins."""
    job = state.roster.job
    assert job is not None, "workers joined before they could be lost"
    outage = state.outage
    return MakePlan(job=job, epoch=state.epoch, old=outage.base, lost=outage.lost, domains=state.roster.domains)


def _end_training(state: Training, commands: tuple[Command, ...]) -> Step:
    """Somebody has finished: let the others go too instead of recovering."""
    roster, goodbyes = dismiss(state.roster)
    plan = state.plan if isinstance(state, Running | Resuming) else state.outage.base
    if not roster.remaining:
        ended, last = finish(roster)
        return ended, (*commands, *goodbyes, *last)
    return Running(roster=roster, plan=plan), (*commands, *goodbyes)


def worker_finished(state: Training, worker: int) -> Step:
    """Take the worker off the list of those who are needed."""
    roster = replace(state.roster, finished=state.roster.finished | {worker})
    state = replace(state, roster=roster)
    match state:
        case Settling():
            return _end_training(state, (Note(text=f"epoch {state.epoch}: worker {worker} had finished already"),))
        case Resuming():
            return _run_if_recovered(state)
        case Running():
            running, shown = migrating.conclude(state)
            let_go, goodbyes = _let_spares_go(running)
            return let_go, (*shown, *goodbyes)


def _let_spares_go(state: Running) -> tuple[Running, tuple[Command, ...]]:
    """Once every worker with a seat has finished, there is nothing left to be a spare for."""
    waiting = set(state.roster.survivors)
    if not waiting or waiting - set(state.plan.placement.spares):
        return state, ()
    roster, goodbyes = dismiss(state.roster)
    return replace(state, roster=roster), goodbyes


def settled(state: Settling, report: SettleReport, now: float) -> Step:
    """Remember a survivor's position; the last one may move on."""
    if report.worker in state.reports:
        return state, (Note(text=f"epoch {state.epoch}: worker {report.worker} settled twice"),)
    return _resume_if_ready(replace(state, reports={**state.reports, report.worker: report}), now)


def plan_made(state: Settling, plan: ElasticPlan, seconds: float, now: float) -> Step:
    """Remember the plan; it may be the last thing that was missing."""
    return _resume_if_ready(replace(state, plan=plan, plan_s=seconds), now)


def _resume_if_ready(state: Settling, now: float) -> Step:
    survivors, plan = state.roster.survivors, state.plan
    if plan is None or not state.reports.keys() >= set(survivors):
        return state, ()
    plans = {**state.outage.plans, plan.epoch: plan}
    try:
        settlement = _settle(state, plan, plans)
    except StateInvalid as error:
        return stop(state, error.exit_code, f"{_because(state.outage)}: {error}")
    resuming = Resuming(
        roster=state.roster,
        plan=plan,
        plan_s=state.plan_s,
        settlement=settlement,
        outage=replace(state.outage, plans=plans, commit=settlement.commit, checkpoint=settlement.checkpoint),
        deadline_s=now + state.roster.launch.timeouts.resume_timeout_s,
    )
    note = Note(
        text=f"epoch {state.epoch}: {len(survivors)} survivors settled, step {settlement.resume_step} is next: "
        f"{plan.placement.describe()}"
    )
    notes = (note, *_note_checkpoint(settlement), *_note_waived(state.outage, settlement))
    return resuming, (Tell(workers=survivors, message=resuming.order), *notes)


def _settle(state: Settling, plan: ElasticPlan, plans: Mapping[int, ElasticPlan]) -> Settlement:
    """From the survivors' state, else from the newest checkpoint. Raises StateInvalid when there is none either."""
    survivors = state.roster.survivors
    try:
        if state.outage.distrusted:
            raise StateInvalid(
                f"{state.outage.unverified[-1]}. This job has saved no checkpoint to go on from: restart from the "
                f"newest one with --load"
            )
        reports = [_keep_known_layouts(state.reports[worker], plans, state.outage.base) for worker in survivors]
        return settle(reports, plans, state.outage.commit)
    except StateInvalid:
        fallback = fall_back([state.reports[worker] for worker in survivors], plan)
        if fallback is None:
            raise
        return fallback


def _note_checkpoint(settlement: Settlement) -> tuple[Note, ...]:
    if settlement.checkpoint is None:
        return ()
    text = f"no state is whole on the survivors: they go on from the checkpoint of iteration {settlement.checkpoint}"
    return (Note(text=text, warning=True),)


def _note_waived(outage: Outage, settlement: Settlement) -> tuple[Note, ...]:
    """For an activity that is left out though the worker that knew why was lost before it could say so."""
    if outage.failures or settlement.waived_activity < settlement.lead_activity:
        return ()
    return (Note(text="a save failed on a worker that was lost before it said why; training goes on", warning=True),)


def _keep_known_layouts(report: SettleReport, plans: Mapping[int, ElasticPlan], base: ElasticPlan) -> SettleReport:
    """The report without layouts that are older than what all had recovered under.

    A spare takes no part in migrations, so it may know only older ones; it holds nothing that counts.
    """
    known = tuple(holding for holding in report.holdings if holding.epoch in plans)
    if not known and base.placement.find_seat(report.worker) is not None:
        raise StateInvalid(
            f"worker {report.worker} holds state in the layouts of epochs "
            f"{[holding.epoch for holding in report.holdings]}, plans in use are those of {sorted(plans)}. "
            f"Restart from the newest checkpoint with --load"
        )
    return replace(report, holdings=known)


def plan_refused(state: Settling, exit_code: ExitCode, sentence: str) -> Step:
    """The survivors cannot carry the job on."""
    return stop(state, exit_code, f"{_because(state.outage)}: {sentence}")


def _because(outage: Outage) -> str:
    if not outage.losses and not outage.failures:
        return "; ".join(outage.unverified)
    if not outage.losses:
        return ", ".join(f"worker {failure.worker} {failure.detail}" for failure in outage.failures)
    who = ", ".join(f"worker {loss.worker} ({loss.detail})" for loss in outage.losses)
    return f"cannot go on without {who}"


def recovered(state: Resuming, report: RecoveryReport) -> Step:
    """Remember a survivor's time line; the last one ends the outage."""
    if report.worker in state.reports:
        return state, (Note(text=f"epoch {state.epoch}: worker {report.worker} recovered twice"),)
    return _run_if_recovered(replace(state, reports={**state.reports, report.worker: report}))


def _run_if_recovered(state: Resuming) -> Step:
    if not state.reports.keys() >= set(state.roster.survivors):
        return state, ()
    running, goodbyes = _let_spares_go(Running(roster=state.roster, plan=state.plan))
    reports = [state.reports[worker] for worker in sorted(state.reports)]
    if not reports:
        return running, (Note(text=f"epoch {state.epoch}: every survivor finished"), *goodbyes)
    running, planning = migrating.seek(running)
    return running, (
        *goodbyes,
        ShowRecovery(
            epoch=state.epoch,
            text=format_block(state.outage, state.plan, reports, state.plan_s),
            phases_ms=phases_ms(state.outage, find_slowest(reports), state.plan_s),
            facts=facts_of(state.outage, state.plan, find_slowest(reports), longest_background_s(reports)),
        ),
        *planning,
    )


def check_deadline(state: Settling | Resuming, now: float, waiting: frozenset[int]) -> Step:
    """Lose the survivors that did not report in time; not those that wait for others of them."""
    if now < state.deadline_s:
        return state, ()
    timeouts = state.roster.launch.timeouts
    detail = (
        f"did not unwind within --settle-timeout-s={timeouts.settle_timeout_s:g}"
        if isinstance(state, Settling)
        else f"did not finish its first step within --resume-timeout-s={timeouts.resume_timeout_s:g}"
    )
    late = [worker for worker in state.roster.survivors if worker not in state.reports]
    if isinstance(state, Resuming):
        late = [worker for worker in late if worker not in waiting] or late
    losses = [WorkerLost(worker=worker, reason=LossReason.SILENT, detail=detail, at_s=now) for worker in late]
    return lose(state, losses, now) if losses else (state, ())
