"""Going over to another plan while nobody is lost, as plain values: no sockets, no clocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_elas.control.commands import (
    Command,
    EndJob,
    ImprovePlan,
    MakePlan,
    Note,
    Reply,
    ShowMigration,
    ShowRecovery,
    TellAgent,
)
from megatron_elas.control.events import AgentLost, ChangeAsked, Event, PlanImproved, PlanKept, WorkerSilent
from megatron_elas.control.messages import (
    Declined,
    Drained,
    Finished,
    KillWorker,
    LeaveOut,
    Migrate,
    PeerUnreachable,
    Quiesce,
    Recover,
    Settled,
    Stop,
    Terminate,
    Unverified,
    WorkerExited,
    WorkerHung,
)
from megatron_elas.control.service import improve_plan
from megatron_elas.control.states import Ended, Resuming, Running, Settling
from megatron_elas.control.tools import describe
from megatron_elas.spec.errors import ExitCode, NoFeasiblePlan
from tests.control.jobs import Director, end_of, make_job, make_report, shift_layer, shifted, told

JOB = make_job(pipeline=2, data=3, layers=(3, 3), migration="async")
WORKERS = tuple(range(JOB.world_size))


def exited(worker: int, status: int = -9) -> WorkerExited:
    return WorkerExited(worker=worker, status=status, at_s=0.0)


def running_of(director: Director) -> Running:
    assert isinstance(director.state, Running), director.state
    return director.state


def recover_from(director: Director, worker: int) -> list[Command]:
    """Lose a worker, and recover; gives what is commanded with the last report."""
    before = running_of(director).plan
    director.send(exited(worker))
    assert isinstance(director.state, Settling)
    epoch, survivors = director.state.epoch, director.state.roster.survivors
    director.settle(epoch, survivors, before)
    return director.recover(epoch, survivors)


@pytest.fixture
def director() -> Director:
    """Worker 5 was lost; nobody has answered for the planner, which looks for a better plan."""
    director = Director(JOB).start()
    recover_from(director, 5)
    return director


@pytest.fixture
def moving(director: Director) -> Director:
    """All are told to go over to epoch 2."""
    director.improver = shifted
    director.send(shifted(searched(director)))
    assert running_of(director).migration is not None
    return director


def searched(director: Director) -> ImprovePlan:
    """What the planner is asked last."""
    return [command for command in director.commands if isinstance(command, ImprovePlan)][-1]


def of[C: Command](commands: list[Command], kind: type[C]) -> list[C]:
    return [command for command in commands if isinstance(command, kind)]


# ---------------------------------------------------------------- looking for a better plan


def test_a_better_plan_is_looked_for_when_a_recovery_is_over(director: Director) -> None:
    order = searched(director)
    plan = running_of(director).plan
    assert (order.plan, order.search.epoch, order.search.drained) == (plan, 2, ())
    assert order.domains == {worker: f"worker{worker}" for worker in WORKERS}
    shown = [type(command) for command in director.commands if isinstance(command, ShowRecovery | ImprovePlan)]
    assert shown == [ShowRecovery, ImprovePlan], "people hear of the recovery first"


def test_none_is_looked_for_before_a_loss() -> None:
    assert not of(Director(JOB).start().commands, ImprovePlan)


def test_none_is_looked_for_where_layers_are_to_stay() -> None:
    director = Director(make_job(pipeline=2, data=3, layers=(3, 3))).start()
    assert not of(recover_from(director, 5), ImprovePlan)


def test_all_with_a_seat_are_told_and_know_where_everybody_is(moving: Director) -> None:
    [(workers, order)] = told(moving.commands, Migrate)
    assert workers == (0, 1, 2, 3, 4)
    assert order.plan == shift_layer(running_of(moving).plan, 2)
    assert order.addresses == {worker: f"unix:{worker}" for worker in workers}


def test_spares_are_not_told() -> None:
    director = Director(make_job(pipeline=2, data=2, tensor=2, layers=(3, 3), migration="async")).start()
    director.improver = shifted
    recover_from(director, 7)
    assert running_of(director).plan.placement.spares == (6,)
    [(workers, order)] = told(director.commands, Migrate)
    assert workers == (0, 1, 2, 3, 4, 5) and sorted(order.addresses) == [0, 1, 2, 3, 4, 5, 6]
    director.migrate(2, workers)
    # Worker 6 knows the layout of epoch 1 only; the others have left it.
    plan = running_of(director).plan
    director.send(exited(5))
    director.settle(3, (0, 1, 2, 3, 4), plan)
    director.settle(3, (6,), replace(plan, epoch=1))
    assert isinstance(director.state, Resuming) and director.state.settlement.base_epoch == 2
    [*_, (_, recover)] = told(director.commands, Recover)
    assert recover.base == plan, "a spare that gets a seat is told the layout that it has not seen"


@pytest.mark.parametrize("kept", [False, True])
def test_an_answer_that_comes_after_the_next_loss_changes_nothing(director: Director, kept: bool) -> None:
    order = searched(director)
    late = PlanKept(search=order.search, sentence="none") if kept else shifted(order)
    director.send(exited(4))
    state = director.state
    assert not told(director.send(late), Migrate) and director.state == state
    director.settle(2, state.roster.survivors, order.plan)
    director.recover(2, state.roster.survivors)
    state = director.state
    assert running_of(director).search is not None
    assert not told(director.send(late), Migrate) and director.state == state


def test_training_goes_on_when_there_is_nothing_better(director: Director) -> None:
    plan = running_of(director).plan
    director.send(PlanKept(search=searched(director).search, sentence="nothing"))
    assert running_of(director).plan == plan and running_of(director).search is None
    assert not told(director.commands, Migrate)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [(NoFeasiblePlan("no cell is left"), "no cell is left"), (ZeroDivisionError("x"), "the planner failed with Zero")],
)
def test_a_planner_that_fails_is_no_reason_to_end_a_job(
    director: Director, error: Exception, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **settings: object) -> None:
        raise error

    monkeypatch.setattr("megatron_elas.control.service.improve", fail)
    answer = improve_plan(searched(director))
    assert isinstance(answer, PlanKept) and answer.failed and answer.sentence.startswith(sentence)
    [note] = of(director.send(answer), Note)
    assert note.warning and running_of(director).search is None


def test_a_plan_that_seats_others_than_those_who_train_is_not_followed(director: Director) -> None:
    order = searched(director)
    plan = shift_layer(order.plan, 2, drained=(4,))
    [note] = of(director.send(PlanImproved(search=order.search, plan=plan, seconds=0.1)), Note)
    assert note.warning and "[0, 1, 2, 3]" in note.text and not told(director.commands, Migrate)


# ---------------------------------------------------------------- the way


def test_the_first_step_under_the_new_plan_puts_it_in_force(moving: Director) -> None:
    assert running_of(moving).epoch == 1
    moving.migrate(2, [3])
    state = running_of(moving)
    assert state.epoch == 2 and state.plan.layers == ((0, 4), (4, 6))
    assert not of(moving.commands, ShowMigration)


def test_the_last_report_shows_the_block_once(moving: Director) -> None:
    moving.migrate(2, [3, 1, 0, 2, 3], drain=0.001, verify=0.002)
    assert not of(moving.commands, ShowMigration)
    [block] = of(moving.migrate(2, [4], drain=0.004), ShowMigration)
    assert block.epoch == 2 and block.phases_ms["total"] == 4.0 and block.facts["slowest"] == 4
    assert "moved    layer 3 from stage 1 to 0" in block.text
    assert running_of(moving).migration is None
    state = moving.state
    moving.migrate(2, [4])
    assert moving.state == state


def test_reports_of_other_epochs_and_of_strangers_are_no_proof(moving: Director) -> None:
    state = moving.state
    moving.migrate(1, [0])
    moving.migrate(3, [0])
    moving.migrate(2, [5])
    assert moving.state == state


def test_no_other_plan_is_looked_for_after_a_migration(moving: Director) -> None:
    moving.migrate(2, [0, 1, 2, 3, 4])
    assert len(of(moving.commands, ImprovePlan)) == 1 and running_of(moving).search is None


@pytest.mark.parametrize("epoch", [1, 2])
def test_while_it_is_under_way_workers_may_speak_of_both_epochs(moving: Director, epoch: int) -> None:
    moving.send(PeerUnreachable(worker=0, epoch=epoch, peer=3, detail="reset"))
    assert isinstance(moving.state, Settling) and set(moving.state.roster.lost) == {3, 5}


def test_when_the_new_plan_is_in_force_nobody_may_speak_of_the_old_one(moving: Director) -> None:
    moving.migrate(2, [0])
    moving.send(PeerUnreachable(worker=0, epoch=1, peer=3, detail="reset"))
    assert isinstance(moving.state, Running)
    moving.send(LeaveOut(worker=0, epoch=2, culprit=0, detail="could not save"))
    assert isinstance(moving.state, Settling)


@pytest.mark.parametrize("arrived", [False, True])
def test_a_loss_on_the_way_takes_the_epoch_after_the_one_that_was_promised(moving: Director, arrived: bool) -> None:
    before, target = running_of(moving).plan, running_of(moving).migration.target
    if arrived:
        moving.migrate(2, [0, 1])
    commands = moving.send(exited(4))
    state = moving.state
    assert isinstance(state, Settling) and state.epoch == 3
    [(_, quiesce)] = told(commands, Quiesce)
    assert quiesce.epoch == 3
    plans = {2: target} if arrived else {1: before, 2: target}
    assert state.outage.plans == plans
    [order] = of(commands, MakePlan)
    assert (order.old, order.lost, order.epoch) == (plans[min(plans)], (4,), 3)
    shown = of(commands, ShowMigration)
    assert [block.facts["reported"] for block in shown] == ([[0, 1]] if arrived else [])


@pytest.mark.parametrize("layout", [1, 2])
def test_survivors_go_on_from_the_layout_that_all_hold(moving: Director, layout: int) -> None:
    before, target = running_of(moving).plan, running_of(moving).migration.target
    moving.send(exited(4))
    for worker in (0, 1, 2, 3):
        old = make_report(worker, 3, before)
        new = make_report(worker, 3, target)
        holdings = old.holdings if worker == 0 and layout == 1 else (*new.holdings, *old.holdings)
        moving.send(Settled(report=replace(old, holdings=holdings)))
    assert isinstance(moving.state, Resuming)
    assert moving.state.settlement.base_epoch == layout
    [*_, (_, recover)] = told(moving.commands, Recover)
    assert recover.base == {1: before, 2: target}[layout]
    moving.recover(3, (0, 1, 2, 3))
    assert searched(moving).search.epoch == 4


def test_a_check_that_fails_on_the_way_leads_back_and_layers_stay(moving: Director) -> None:
    before = running_of(moving).plan
    sentence = "weights are not their masters"
    for worker, epoch in ((0, 1), (1, 2), (2, 2)):
        assert isinstance(moving.state, Running) == (worker < 2), "of the epoch before nobody can say so"
        moving.send(Unverified(worker=worker, epoch=epoch, check="cast", step=9, sentence=sentence))
    assert isinstance(moving.state, Settling) and moving.state.epoch == 3 and set(moving.state.roster.lost) == {5}
    moving.settle(3, (0, 1, 2, 3, 4), before)
    moving.recover(3, (0, 1, 2, 3, 4))
    assert running_of(moving).search is None and len(of(moving.commands, ImprovePlan)) == 1
    [*_, block] = of(moving.commands, ShowRecovery)
    assert "failed   weights are not their masters" in block.text and block.facts["lost"] == []


def test_a_worker_that_finishes_before_it_reports_is_not_waited_for(moving: Director) -> None:
    moving.migrate(2, [0, 1, 2, 3])
    [block] = of(moving.send(Finished(worker=4)), ShowMigration)
    assert block.facts["reported"] == [0, 1, 2, 3] and running_of(moving).migration is None


def decline(director: Director, epoch: int, worker: int = 1) -> list[Command]:
    return director.send(Declined(worker=worker, epoch=epoch, sentence="no memory for layer 3"))


def test_a_plan_that_a_worker_cannot_go_over_to_is_dropped_and_training_goes_on(moving: Director) -> None:
    before = running_of(moving).plan
    [note] = decline(moving, 2)
    assert isinstance(note, Note) and note.warning and "worker 1 cannot go over to epoch 2: no memory" in note.text
    state = running_of(moving)
    assert (state.plan, state.migration, state.epochs) == (before, None, frozenset({1}))
    assert not decline(moving, 2, worker=3)[0].warning and moving.state == state, "a second one says nothing new"
    moving.migrate(2, [0])
    assert moving.state == state


def test_the_epoch_of_a_declined_plan_is_not_given_again(moving: Director) -> None:
    decline(moving, 2)
    moving.send(ChangeAsked(layers=(4, 2), request=7))
    assert running_of(moving).migration.epoch == 3, "whoever asks is heard"
    decline(moving, 3)
    assert isinstance(moving.send(exited(4)), list) and moving.state.epoch == 4
    assert set(moving.state.outage.plans) == {1}, "nobody has gone over to the others"
    moving.settle(4, (0, 1, 2, 3), moving.state.outage.base)
    moving.recover(4, (0, 1, 2, 3))
    assert running_of(moving).search is None and running_of(moving).migration is None, "none is begun unasked any more"


@pytest.mark.parametrize(("worker", "epoch"), [(5, 2), (1, 1), (1, 3)])
def test_strangers_and_other_epochs_decline_nothing(moving: Director, worker: int, epoch: int) -> None:
    state = moving.state
    decline(moving, epoch, worker)
    assert moving.state == state


def test_nobody_declines_what_all_have_gone_over_to(moving: Director) -> None:
    moving.migrate(2, [0])
    state = moving.state
    decline(moving, 2)
    assert moving.state == state


def test_after_two_losses_on_the_way_none_is_begun_unasked() -> None:
    director = Director(make_job(pipeline=2, data=4, layers=(3, 3), migration="async")).start()
    director.improver = shifted
    recover_from(director, 7)
    for worker, under_way in ((3, True), (6, False)):
        state = running_of(director)
        assert state.migration is not None
        recover_from(director, worker)
        assert (running_of(director).migration is not None) == under_way
    assert director.state.roster.settled_down and director.state.roster.cut_short == 2
    director.send(ChangeAsked(request=7))
    assert running_of(director).migration is not None


def test_losses_after_the_first_report_are_none_on_the_way() -> None:
    director = Director(make_job(pipeline=2, data=4, layers=(3, 3), migration="async")).start()
    director.improver = shifted
    recover_from(director, 7)
    for worker in (3, 6):
        migration = running_of(director).migration
        director.migrate(migration.epoch, [0])
        recover_from(director, worker)
    assert director.state.roster.cut_short == 0


# ---------------------------------------------------------------- workers that leave


@pytest.fixture
def leaving() -> Director:
    """All are told to go over to epoch 1, in which worker 2 has no seat."""
    director = Director(JOB).start()
    director.improver = shifted
    director.send(ChangeAsked(drained=(2,), request=7))
    return director


def answer_in(commands: list[Command]) -> tuple[int, bool, str]:
    [answer] = of(commands, Reply)
    return answer.request, answer.ok, answer.text


def test_a_drain_is_answered_when_the_worker_is_let_go(leaving: Director) -> None:
    assert not of(leaving.send(Drained(worker=2)), Reply)
    request, ok, text = answer_in(leaving.migrate(1, [0]))
    assert (request, ok) == (7, True) and text.startswith("worker 2 handed over everything; epoch 1 is in force")
    assert not of(leaving.migrate(1, [1, 3, 4, 5]), Reply)
    assert not of(leaving.send(exited(5)), Reply)


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (exited(5), "training was disturbed on the way, drain them anew"),
        (exited(2), "training was disturbed on the way, drain them anew"),
        (Unverified(worker=0, epoch=1, check="cast", step=9, sentence="x"), "training was disturbed on the way"),
        (LeaveOut(worker=0, epoch=0, culprit=0, detail="could not save"), "training was disturbed on the way"),
        (Declined(worker=0, epoch=1, sentence="no memory"), "worker 0 cannot take part (no memory)"),
        (Finished(worker=0), "training is done"),
        (Terminate(signum=15), "the job is ending"),
    ],
)
def test_a_drain_that_comes_to_nothing_is_answered_with_no(leaving: Director, event: Event, why: str) -> None:
    request, ok, text = answer_in(leaving.send(event))
    assert (request, ok) == (7, False) and text.startswith(f"worker 2 did not leave: {why}")


def test_who_does_not_wait_is_answered_when_there_is_a_plan() -> None:
    director = Director(JOB).start()
    director.improver = shifted
    request, ok, text = answer_in(director.send(ChangeAsked(drained=(2,), request=7, wait=False)))
    assert (request, ok) == (7, True) and text.startswith("worker 2 will leave; going over to epoch 1")
    assert not of(director.migrate(1, [0]), Reply)


def test_nobody_is_answered_twice(leaving: Director) -> None:
    assert len(of(leaving.send(Finished(worker=0)), Reply)) == 1
    assert not of(leaving.migrate(1, [1]), Reply)


def test_all_with_a_seat_hear_of_a_drain(leaving: Director) -> None:
    [(workers, order)] = told(leaving.commands, Migrate)
    assert workers == WORKERS and order.addresses.keys() == set(WORKERS)
    assert order.plan.placement.spares == (2,), "it is no stranger until it leaves"


def test_who_is_drained_leaves_with_the_first_step_that_was_finished_without_it(leaving: Director) -> None:
    assert not told(leaving.send(Drained(worker=2)), Stop)
    [(workers, goodbye)] = told(leaving.migrate(1, [0]), Stop)
    assert workers == (2,) and goodbye.exit_code == ExitCode.FINISHED
    assert running_of(leaving).plan.placement.spares == () and running_of(leaving).roster.survivors == (0, 1, 3, 4, 5)
    leaving.migrate(1, [1, 3, 4, 5])
    [block] = of(leaving.commands, ShowMigration)
    assert "drained  worker 2" in block.text and block.facts["drained"] == [2]


@pytest.mark.parametrize("status", [0, -9])
def test_its_end_is_no_loss(leaving: Director, status: int) -> None:
    leaving.migrate(1, [0])
    leaving.send(exited(2, status), Drained(worker=2))
    assert running_of(leaving).roster.lost == {}
    for worker in (0, 1, 3, 4, 5):
        leaving.send(Finished(worker=worker))
    leaving.send(*(exited(worker, 0) for worker in (0, 1, 3, 4, 5)))
    assert isinstance(leaving.state, Ended) and leaving.state.exit_code == 0


def test_the_job_ends_with_the_last_of_its_processes_even_if_that_was_drained(leaving: Director) -> None:
    leaving.migrate(1, [0])
    for worker in (0, 1, 3, 4, 5):
        leaving.send(Finished(worker=worker), exited(worker, 0))
    assert isinstance(leaving.state, Running)
    assert end_of(leaving.send(exited(2, 0))) == EndJob(exit_code=0, sentence="", drained=1)


def test_one_that_hangs_instead_of_leaving_is_killed(leaving: Director) -> None:
    leaving.migrate(1, [0])
    for event in (WorkerHung(worker=2, detail="stopped"), WorkerSilent(worker=2, silent_s=3.0)):
        assert TellAgent(node=0, message=KillWorker(worker=2)) in leaving.send(event)
    assert isinstance(leaving.state, Running)


def test_a_node_that_goes_down_before_its_drained_workers_were_seen_to_end_is_no_loss() -> None:
    job = make_job(pipeline=2, data=2, layers=(3, 3), migration="async")
    director = Director(job, nnodes=4).start()
    director.improver = shifted
    director.send(ChangeAsked(drained=(3,), request=7))
    director.migrate(1, [0])
    director.send(AgentLost(node=3))
    assert isinstance(director.state, Running) and director.state.roster.exited == {3: 0}


def test_a_loss_on_the_way_gives_it_its_seat_back(leaving: Director) -> None:
    commands = leaving.send(exited(5))
    assert isinstance(leaving.state, Settling) and 2 in leaving.state.roster.survivors
    assert any("drain them anew" in note.text for note in of(commands, Note))
    leaving.settle(2, (0, 1, 2, 3, 4), leaving.state.outage.base)
    assert isinstance(leaving.state, Resuming) and 2 in leaving.state.plan.placement.workers


def drain_like_torchft(*workers: int) -> Director:
    """All go over to a plan without the workers, in which the rest of their replica has no seat either."""
    director = Director(make_job(pipeline=2, data=2, layers=(3, 3), migration="async")).start()
    director.improver = lambda order: improve_plan(order, policy="torchft")
    director.send(ChangeAsked(drained=workers, request=7))
    return director


@pytest.mark.parametrize("worker", [0, 1, 2, 3])
def test_the_rest_of_a_replica_that_a_policy_leaves_out_stays_as_a_spare(worker: int) -> None:
    mate = (worker + 2) % 4
    director = drain_like_torchft(worker)
    [(workers, order)] = told(director.commands, Migrate)
    assert workers == (0, 1, 2, 3) and order.plan.placement.spares == tuple(sorted((worker, mate)))
    seated = order.plan.placement.workers
    director.send(Drained(worker=worker), Drained(worker=mate))
    [(gone, _)] = told(director.migrate(1, seated), Stop)
    state = running_of(director)
    assert gone == (worker,) and state.migration is None
    assert state.plan.placement.spares == (mate,) and mate in state.roster.survivors


def test_a_spare_of_a_drain_is_let_go_when_training_is_done_and_its_end_before_is_a_loss() -> None:
    director = drain_like_torchft(0)
    seated = director.state.migration.target.placement.workers
    director.migrate(1, seated)
    assert told(director.send(*(Finished(worker=worker) for worker in seated)), Stop)[0][0] == (2,)
    director = drain_like_torchft(0)
    director.migrate(1, seated)
    director.send(exited(2))
    assert isinstance(director.state, Settling) and set(director.state.roster.lost) == {2}
    director.settle(2, seated, director.state.outage.base)
    assert isinstance(director.state, Resuming) and director.state.plan.placement.workers == seated


def test_after_the_drain_a_loss_is_recovered_from_without_it(leaving: Director) -> None:
    leaving.migrate(1, [0, 1, 3, 4, 5])
    plan = running_of(leaving).plan
    commands = leaving.send(exited(5))
    [(told_to, _)] = told(commands, Quiesce)
    assert told_to == (0, 1, 3, 4)
    leaving.settle(2, (0, 1, 3, 4), plan)
    assert isinstance(leaving.state, Resuming)
    placement = leaving.state.plan.placement
    assert sorted((*placement.workers, *placement.spares)) == [0, 1, 3, 4]


def test_what_is_looked_for_unasked_gives_way_to_what_is_asked_for(director: Director) -> None:
    unasked = searched(director)
    director.send(ChangeAsked(drained=(4,), request=7))
    assert searched(director).search.drained == (4,)
    assert not told(director.send(shifted(unasked)), Migrate)
    assert told(director.send(shifted(searched(director))), Migrate)


def test_a_drain_that_cannot_be_planned_is_answered(director: Director) -> None:
    director.send(ChangeAsked(drained=(4,), request=7))
    answer = PlanKept(search=searched(director).search, sentence="no cell is left", failed=True)
    assert of(director.send(answer), Reply) == [Reply(request=7, ok=False, text="no cell is left")]


@pytest.mark.parametrize("event", [exited(4), Terminate(signum=15), Finished(worker=0)])
def test_whoever_waits_is_answered_when_something_comes_between(director: Director, event: object) -> None:
    director.send(ChangeAsked(drained=(4,), request=7))
    [answer] = of(director.send(event), Reply)
    assert (answer.request, answer.ok) == (7, False)


# ---------------------------------------------------------------- what cannot be asked for


def problem_of(director: Director, **change: object) -> str:
    state = director.state
    [answer] = director.send(ChangeAsked(request=3, **change))
    assert isinstance(answer, Reply) and not answer.ok and director.state == state
    assert "\n" not in answer.text
    return answer.text


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        ((9,), "worker 9 is not one of 0 to 5"),
        ((5,), "worker 5 is lost already: killed by SIGKILL"),
        ((0, 1, 2, 3, 4), "nobody would be left"),
    ],
)
def test_workers_that_cannot_be_drained(director: Director, workers: tuple[int, ...], words: str) -> None:
    assert words in problem_of(director, drained=workers)


def test_a_spare_has_nothing_to_hand_over_and_cells_leave_as_a_whole() -> None:
    director = Director(make_job(pipeline=2, data=2, tensor=2, layers=(3, 3), migration="blocking")).start()
    recover_from(director, 7)
    assert "worker 6 is a spare" in problem_of(director, drained=(6,))
    assert "worker 0 is in the tensor-parallel cell [0, 1]" in problem_of(director, drained=(0,))
    assert "drain 1 with it" in problem_of(director, drained=(0, 2, 3))
    assert of(director.send(ChangeAsked(drained=(0, 1), request=4)), ImprovePlan)


def test_who_was_drained_cannot_be_drained_again(leaving: Director) -> None:
    assert "going over to epoch 1" in problem_of(leaving, drained=(3,))
    leaving.migrate(1, [0, 1, 3, 4, 5])
    assert "worker 2 was drained already" in problem_of(leaving, drained=(2,))


def test_nothing_can_be_asked_for_where_layers_stay_or_nothing_runs() -> None:
    director = Director(make_job(pipeline=2, data=3, layers=(3, 3)))
    assert "has not begun" in problem_of(director, drained=(1,))
    director.start()
    assert "--elastic-migration off" in problem_of(director, drained=(1,))
    director.send(exited(5))
    assert "recovers from a loss" in problem_of(director, drained=(1,))
    director.send(Terminate(signum=15))
    assert "is ending" in problem_of(director, drained=(1,))


def test_one_change_at_a_time(director: Director) -> None:
    director.send(ChangeAsked(drained=(4,), request=7))
    assert "another change is being planned" in problem_of(director, drained=(3,))


@pytest.mark.parametrize("layers", [(6,), (2, 2, 2), (3, 4), (0, 0), (6, 0), (7, -1)])
def test_layers_that_do_not_fit_the_model(director: Director, layers: tuple[int, ...]) -> None:
    assert "do not fit 2 stages with 6 layers in all, which are 3,3 now" in problem_of(director, layers=layers)


# ---------------------------------------------------------------- layers that are asked for


def test_layers_that_are_asked_for_are_what_the_planner_is_asked_for(director: Director) -> None:
    [order] = of(director.send(ChangeAsked(layers=(4, 2), request=7)), ImprovePlan)
    assert order.search.layers == (4, 2)
    [answer] = of(director.send(shifted(order)), Reply)
    assert answer.ok and answer.text.startswith("going over to epoch 2")


def test_lines_of_the_script_count_whether_they_can_be_carried_out_or_not(director: Director) -> None:
    assert of(director.send(ChangeAsked(layers=(4, 2))), ImprovePlan)
    [note] = of(director.send(ChangeAsked(layers=(4, 2))), Note)
    assert note.warning and director.state.roster.scripted == 2


# ---------------------------------------------------------------- what people see


def status_of(director: Director) -> list[str]:
    return describe(director.state, lambda worker: None, lambda worker: None).splitlines()


def test_status_shows_a_plan_that_is_looked_for_the_way_to_it_and_who_has_left(leaving: Director) -> None:
    assert "going over to epoch 1" in status_of(leaving)[1]
    told = "stage 1 (layers 4-5): [3] [4] [5] | spare: 2; 0 of 5 workers have gone over, worker 2 will leave"
    assert status_of(leaving)[1].endswith(told)
    leaving.migrate(1, [0])
    assert "1 of 5 workers have gone over" in status_of(leaving)[1]
    assert "worker 2: drained, leaving" in status_of(leaving)
    leaving.send(exited(2, 0))
    assert "worker 2: drained" in status_of(leaving)


def test_status_shows_what_is_planned(director: Director) -> None:
    assert status_of(director)[1] == "a better plan is looked for"
    assert status_of(director)[2] == "consistency: numerical, events change losses by rounding"
    director.send(ChangeAsked(drained=(3, 4), request=7))
    assert status_of(director)[1] == "a plan without workers 3, 4 is made"
