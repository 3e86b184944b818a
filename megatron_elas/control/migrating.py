"""Going over to another plan while nobody is lost: because it is better, or to let workers leave.

The planner looks for it while training goes on. Its epoch is the next one, and all with a seat are told; they find out
among themselves between which two steps they go over. So the controller need not wait for anything: until the first of
them has finished a step under the new plan each of the two plans may be the one that the state is laid out for, and
after it the new one is.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_elas.control.change_requests import find_problem
from megatron_elas.control.commands import Command, ImprovePlan, Note, Reply, Tell
from megatron_elas.control.ending import Step
from megatron_elas.control.events import ChangeAsked, PlanImproved, PlanKept
from megatron_elas.control.messages import Declined, Drained, Stop
from megatron_elas.control.migration_block import describe_forecast, describe_workers, show_migration
from megatron_elas.control.states import Migration, Roster, Running, Search, Settling, State
from megatron_elas.spec.errors import ExitCode
from megatron_elas.spec.migration import MigrationReport
from megatron_elas.spec.plan import ElasticPlan

FAREWELL = Stop(exit_code=ExitCode.FINISHED, sentence="it was drained")
"""To a worker that leaves."""
MOST_CUT_SHORT = 2
"""After so many losses on the way to another plan none is begun unasked any more."""


def seek(state: Running) -> tuple[Running, tuple[Command, ...]]:
    """After a recovery: look for a plan that is better than what could be found while all were waiting."""
    roster = state.roster
    if roster.job is None or roster.job.migration == "off" or roster.settled_down or roster.finished:
        return state, ()
    state = replace(state, search=Search(epoch=state.next_epoch))
    return state, (ask_planner(state),)


def ask_planner(state: Running) -> ImprovePlan:
    """For what the state is looking for."""
    job = state.roster.job
    assert job is not None and state.search is not None
    return ImprovePlan(job=job, plan=state.plan, search=state.search, domains=state.roster.domains)


def change_asked(state: State, event: ChangeAsked) -> Step:
    """Look for what is asked for, unless it cannot be had. What is looked for unasked gives way."""
    problem = find_problem(state, event)
    scripted = event.request is None
    if scripted:
        state = replace(state, roster=replace(state.roster, scripted=state.roster.scripted + 1))
    if problem is not None:
        return state, (_answer(event.request, problem),)
    assert isinstance(state, Running)
    search = Search(
        epoch=state.next_epoch,
        drained=tuple(sorted(set(event.drained))),
        layers=event.layers,
        request=event.request,
        wait=event.wait,
    )
    state = replace(state, search=search)
    return state, (ask_planner(state),)


def improved(state: Running, event: PlanImproved) -> Step:
    """Have everybody with a seat go over to the plan."""
    search, target = event.search, event.plan
    flaw = _find_flaw(state.plan, search, target)
    if flaw is not None:
        return kept(state, PlanKept(search=search, sentence=flaw, failed=True))
    placement = target.placement
    placement = replace(placement, spares=tuple(sorted({*placement.spares, *search.drained})))
    migration = Migration(
        before=state.plan,
        target=replace(target, placement=placement),
        plan_s=event.seconds,
        in_force_s=event.in_force_s,
        leaving=search.drained,
        request=search.request if search.drained and search.wait else None,
    )
    state = replace(state, search=None, migration=migration)
    orders = Tell(workers=tuple(sorted(state.plan.placement.workers)), message=state.migrate)
    text = f"going over to epoch {target.epoch}: {target.describe()}{describe_forecast(migration)}"
    if search.drained:
        text = f"{describe_workers(search.drained)} will leave; {text}"
    answer = Note(text=text) if migration.request is not None else _answer(search.request, text, ok=True)
    return state, (orders, answer)


def kept(state: Running, event: PlanKept) -> Step:
    """The plan in force stays."""
    answer = _answer(event.search.request, event.sentence, ok=not event.failed)
    return replace(state, search=None), (answer,)


def _answer(request: int | None, text: str, *, ok: bool = False) -> Command:
    return Note(text=text, warning=not ok) if request is None else Reply(request=request, ok=ok, text=text)


def _find_flaw(plan: ElasticPlan, search: Search, target: ElasticPlan) -> str | None:
    """Why nobody can go over to the target. Only a bug of the planner makes one.

    Where some leave, a policy may leave others without a seat too (``torchft``: the rest of their replica); these
    become spares.
    """
    seated = set(plan.placement.workers)
    staying, placement = seated - set(search.drained), target.placement
    waiting = staying & set(placement.spares) if search.drained else set()
    if target.epoch == search.epoch and placement.workers and set(placement.workers) == staying - waiting:
        return None
    return (
        f"a plan of epoch {target.epoch} for workers {sorted(target.placement.workers)} was found where one of epoch "
        f"{search.epoch} for {sorted(seated - set(search.drained))} was looked for: the plan in force stays"
    )


def migrated(state: Running, report: MigrationReport) -> Step:
    """A worker has finished a step under the new plan: the first one puts it in force, with the last one all is over.

    Those who leave go with the first one: that step was finished without them.
    """
    migration = state.migration
    assert migration is not None
    if report.worker in migration.reports:
        return state, (Note(text=f"epoch {migration.epoch}: worker {report.worker} went over twice"),)
    commands: tuple[Command, ...] = ()
    if not migration.arrived:
        state, commands = _take(state, migration)
    migration = replace(migration, reports={**migration.reports, report.worker: report})
    state, shown = conclude(replace(state, migration=migration))
    return state, (*commands, *shown)


def _take(state: Running, migration: Migration) -> tuple[Running, tuple[Command, ...]]:
    """The target is in force, and who leaves is not needed any more."""
    plan = migration.after
    gone = tuple(worker for worker in migration.leaving if worker in state.roster.survivors)
    roster = replace(state.roster, drained=state.roster.drained | set(gone))
    taken = replace(state, roster=roster, plan=plan)
    text = f"epoch {plan.epoch} is in force: {plan.describe()}"
    if migration.leaving:
        text = f"{describe_workers(migration.leaving)} handed over everything; {text}"
    answered = state.roster.finished  # when training was done
    answer = _answer(None if answered else migration.request, text, ok=True)
    return taken, (*((Tell(workers=gone, message=FAREWELL),) if gone else ()), answer)


def _not_drained(before: Running, why: str) -> tuple[Command, ...]:
    """The answer to whoever waits until workers leave that do not; none where it was answered already."""
    migration = before.migration
    assert migration is not None
    if migration.request is None or before.roster.finished:
        return ()
    text = f"{describe_workers(migration.leaving)} did not leave: {why}, see elas status"
    return (_answer(migration.request, text),)


def conclude(state: Running) -> tuple[Running, tuple[Command, ...]]:
    """The migration is over when all that are there to report have done so."""
    migration = state.migration
    if migration is None or not migration.arrived:
        return state, ()
    waited_for = set(state.plan.placement.workers) & set(state.roster.survivors)
    if not waited_for <= migration.reports.keys():
        return state, ()
    return replace(state, migration=None), (show_migration(migration),)


def drained(state: State, event: Drained) -> Step:
    """A worker waits to be let go. It leaves with the first step that is finished without it."""
    if event.worker in state.roster.drained:
        return state, (Tell(workers=(event.worker,), message=FAREWELL),)
    return state, (Note(text=f"worker {event.worker} has handed over what it had"),)


def declined(state: Running, event: Declined) -> Step:
    """A worker cannot go over, so nobody will: the plan in force stays, and no other one is looked for unasked."""
    migration = state.migration
    assert migration is not None and not migration.arrived
    roster = replace(state.roster, settled_down=True)
    text = (
        f"worker {event.worker} cannot go over to epoch {migration.epoch}: {event.sentence}; the plan of epoch "
        f"{state.epoch} stays, and from now on layers move only after a loss or when somebody asks"
    )
    stays = replace(state, roster=roster, migration=None, declined=migration.epoch)
    why = f"worker {event.worker} cannot take part ({event.sentence})"
    return stays, (Note(text=text, warning=True), *_not_drained(state, why))


def cut_short(state: State) -> Roster:
    """The roster when a loss comes. A second one on the way to another plan may be the plan's own fault."""
    roster = state.roster
    if not isinstance(state, Running) or state.migration is None or state.migration.arrived:
        return roster
    count = roster.cut_short + 1
    return replace(roster, cut_short=count, settled_down=roster.settled_down or count >= MOST_CUT_SHORT)


def wind_up(before: State, after: State) -> tuple[Command, ...]:
    """What is to be told of a search or a migration that another event has ended."""
    if not isinstance(before, Running) or before.roster.finished:
        return ()
    if isinstance(after, Running) and not after.roster.finished:
        return ()
    told: list[Command] = []
    search, migration = before.search, before.migration
    if search is not None and search.request is not None:
        why = "training is done" if after.roster.finished else "training was disturbed: ask again when it runs"
        told.append(_answer(search.request, f"{why}, see elas status"))
    if migration is not None and isinstance(after, Settling):
        if migration.arrived:
            told.append(show_migration(migration))
        else:
            text = f"training was disturbed before anybody said that epoch {migration.epoch} was reached"
            if migration.leaving:
                text += f": {describe_workers(migration.leaving)} may get work again, drain them anew"
            told.append(Note(text=text, warning=bool(migration.leaving)))
    if migration is not None and not migration.arrived:
        if after.roster.finished:
            why = "training is done, and they end with it"
        elif isinstance(after, Settling):
            why = "training was disturbed on the way, drain them anew when it runs"
        else:
            why = "the job is ending"
        told.extend(_not_drained(before, why))
    return tuple(told)
