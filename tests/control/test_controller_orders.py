"""Random orders, duplicates and late messages: what the controller guarantees in all of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elas.control.commands import Command, EndJob, ImprovePlan, Reply, Tell
from megatron_elas.control.events import ChangeAsked, Event, PlanImproved, PlanKept, Tick, WorkerSilent
from megatron_elas.control.messages import (
    Crashed,
    Declined,
    Drained,
    Finished,
    Migrate,
    Migrated,
    PeerUnreachable,
    Quiesce,
    Recover,
    Recovered,
    Settled,
    Stop,
    Unverified,
    WorkerExited,
    WorkerHung,
)
from megatron_elas.control.states import Running, Search, Settling, Stopping
from megatron_elas.planner.plan import initial_plan
from megatron_elas.spec.errors import ExitCode
from megatron_elas.spec.migration import MigrationReport
from megatron_elas.spec.report import RecoveryReport
from tests.control.jobs import Director, make_job, make_report, shifted

JOB = make_job(pipeline=2, data=3)
WORKERS = range(JOB.world_size)
PLAN = initial_plan(JOB, {worker: f"worker{worker}" for worker in WORKERS})

workers = st.sampled_from(WORKERS)
epochs = st.integers(0, 5)


def settled_event(worker: int, epoch: int, layout_epoch: int) -> Settled:
    report = make_report(worker, epoch, PLAN)
    holding = report.holdings[0]
    changed = type(holding)(
        epoch=layout_epoch, live=holding.live, kept=holding.kept, wards=dict.fromkeys(WORKERS, (5,))
    )
    return Settled(report=type(report)(worker=worker, epoch=epoch, step=5, activity=5, holdings=(changed,)))


def recovered_event(worker: int, epoch: int) -> Recovered:
    return Recovered(report=RecoveryReport(worker=worker, epoch=epoch, resume_step=5))


events: st.SearchStrategy[Event] = st.one_of(
    st.builds(settled_event, workers, epochs, st.just(0)),
    st.builds(recovered_event, workers, epochs),
    st.builds(
        lambda worker, status: WorkerExited(worker=worker, status=status, at_s=0.0),
        workers,
        st.sampled_from([0, 1, -9]),
    ),
    st.builds(
        lambda worker, epoch, step, renewable: Unverified(
            worker=worker, epoch=epoch, check="cast", step=step, sentence="x", renewable=renewable
        ),
        workers,
        epochs,
        st.integers(5, 6),
        st.booleans(),
    ),
    st.builds(lambda worker: WorkerHung(worker=worker, detail="stopped"), workers),
    st.builds(lambda worker: WorkerSilent(worker=worker, silent_s=3.0), workers),
    st.builds(
        lambda worker, epoch, peer: PeerUnreachable(worker=worker, epoch=epoch, peer=peer, detail="x"),
        workers,
        epochs,
        workers,
    ),
    st.builds(lambda worker: Finished(worker=worker), workers),
    st.builds(lambda worker, step: Crashed(worker=worker, step=step, error="x"), workers, st.integers(4, 6)),
    st.just(Tick()),
)


MOVING = make_job(pipeline=2, data=3, layers=(3, 3), migration="async")
"""The same grid, where all go over to other plans, too."""

changes: st.SearchStrategy[Event] = st.one_of(
    events,
    st.builds(
        lambda worker, epoch: Migrated(report=MigrationReport(worker=worker, epoch=epoch, step=7)), workers, epochs
    ),
    st.builds(lambda worker: Drained(worker=worker), workers),
    st.builds(lambda worker, epoch: Declined(worker=worker, epoch=epoch, sentence="x"), workers, epochs),
    st.builds(lambda worker, request: ChangeAsked(drained=(worker,), request=request), workers, st.integers(1, 9)),
    st.builds(lambda layers: ChangeAsked(layers=layers), st.sampled_from([(4, 2), (2, 4), (1, 1)])),
    st.builds(
        lambda epoch: PlanKept(search=Search(epoch=epoch), sentence="none"),
        epochs,
    ),
)


def moving_director() -> Director:
    """Its planner finds a better plan at once, whenever it is asked."""
    director = Director(MOVING).start()
    director.improver = shifted_in_turn
    return director


def shifted_in_turn(command: ImprovePlan) -> PlanImproved | PlanKept:
    """One layer to the first stage, until the second one has no more to give."""
    if command.plan.layers[1][1] - command.plan.layers[1][0] == 1:
        return PlanKept(search=command.search, sentence="none is left")
    return shifted(command)


def _is_order(command: Command, kind: type[Migrate]) -> bool:
    return isinstance(command, Tell) and isinstance(command.message, kind)


def check_guarantees(director: Director) -> None:
    """The controller's guarantees, over everything it ever commanded."""
    quiesced = [
        command.message.epoch
        for command in director.commands
        if isinstance(command, Tell) and isinstance(command.message, Quiesce)
    ]
    assert quiesced == sorted(set(quiesced)), "epochs only grow, one announcement each"
    recovers: dict[int, tuple[int, ...]] = {}
    for command in director.commands:
        if isinstance(command, Tell) and isinstance(command.message, Recover):
            epoch = command.message.plan.epoch
            assert epoch not in recovers, "one Recover per settled epoch"
            assert set(command.message.plan.placement.workers) <= set(command.workers)
            recovers[epoch] = command.workers
    promised = [command.message.plan.epoch for command in director.commands if _is_order(command, Migrate)]
    assert promised == sorted(set(promised)) and not set(promised) & set(quiesced), "every epoch begins in one way"
    begun = sorted((*quiesced, *promised))
    assert begun == list(range(1, len(begun) + 1)), "no epoch is left out"
    assert sum(isinstance(command, EndJob) for command in director.commands) <= 1


@settings(max_examples=400, deadline=None)
@given(st.lists(events, max_size=40))
def test_guarantees_hold_in_any_order_of_any_messages(script: list[Event]) -> None:
    director = Director(JOB).start()
    told_after_loss: list[tuple[int, ...]] = []
    for event in script:
        lost_before = set(director.state.roster.lost) | set(director.state.roster.finished)
        for command in director.send(event):
            if isinstance(command, Tell) and lost_before & set(command.workers):
                told_after_loss.append(command.workers)
    assert not told_after_loss, "a lost or finished worker gets no message"
    check_guarantees(director)


def waiting_in(director: Director) -> list[int]:
    """Requests of those who wait until workers are let go."""
    state = director.state
    if not isinstance(state, Running) or state.roster.finished or state.migration is None or state.migration.arrived:
        return []
    return [] if state.migration.request is None else [state.migration.request]


@settings(max_examples=150, deadline=None)
@given(st.lists(changes, max_size=40))
def test_guarantees_hold_where_all_go_over_to_other_plans(script: list[Event]) -> None:
    director = moving_director()
    answered: list[int] = []
    asked: list[int] = []
    for event in script:
        gone = {*director.state.roster.lost, *director.state.roster.finished}
        left = director.state.roster.drained
        asked += [event.request] if isinstance(event, ChangeAsked) and event.request is not None else []
        for command in director.send(event):
            if isinstance(command, Tell):
                assert not gone & set(command.workers), "a lost or finished worker gets no message"
                assert isinstance(command.message, Stop) or not left & set(command.workers)
            if isinstance(command, Reply):
                answered.append(command.request)
    assert sorted((*answered, *waiting_in(director))) == sorted(asked), "everybody who asks is answered once"
    assert not director.state.roster.drained & set(director.state.roster.lost)
    check_guarantees(director)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_honest_survivors_always_recover_or_the_job_says_why_not(data: st.DataObject) -> None:
    """Losses at random moments; survivors answer each epoch, in random order and with repeats."""
    director = Director(JOB).start()
    for _ in range(data.draw(st.integers(1, 3), label="losses")):
        if isinstance(director.state, Stopping):
            break
        victim = data.draw(st.sampled_from(director.state.roster.survivors))
        director.send(WorkerExited(worker=victim, status=-9, at_s=0.0))
        if not isinstance(director.state, Settling):
            break
        answers = data.draw(st.permutations(director.state.roster.survivors))
        cut = data.draw(st.integers(0, len(answers)), label="answers before the next loss")
        for worker in answers[:cut]:
            director.send(*[settled_event(worker, director.state.epoch, 0)] * data.draw(st.integers(1, 2)))
    if isinstance(director.state, Settling):
        for worker in director.state.roster.survivors:
            director.send(settled_event(worker, director.state.epoch, 0))
    if isinstance(director.state, Stopping):
        assert director.state.exit_code in (ExitCode.GAVE_UP, ExitCode.STATE_INVALID)
    else:
        survivors = director.state.roster.survivors
        for worker in survivors:
            director.send(recovered_event(worker, director.state.epoch))
        assert tuple(sorted(director.state.plan.placement.workers)) == survivors
    check_guarantees(director)
