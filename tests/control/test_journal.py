"""What the journal leads to, whole and cut, and what a restarted controller says."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elas.control.commands import ImprovePlan, MakePlan, ShowMigration, Tell
from megatron_elas.control.controller import step
from megatron_elas.control.events import ChangeAsked, Event, PlanMade, Restarted
from megatron_elas.control.journal import BadJournal, Journal, is_new, matters, replay
from megatron_elas.control.launch import Launch
from megatron_elas.control.messages import (
    AgentHello,
    Declined,
    Finished,
    HelloAgain,
    KillWorker,
    Migrate,
    Quiesce,
    Recover,
    Start,
    Stop,
    StopAll,
    Terminate,
    WorkerExited,
    WorkerHung,
)
from megatron_elas.control.migrating import FAREWELL
from megatron_elas.control.rejoining import catch_up_agent, catch_up_worker, find_stranger
from megatron_elas.control.service import make_plan
from megatron_elas.control.states import Ended, Gathering, Resuming, Running, Settling, State, Stopping
from megatron_elas.spec.errors import ExitCode
from megatron_elas.spec.job import JobSpec
from tests.control.jobs import TIMEOUTS, Director, make_hello, shifted, told
from tests.control.served import WELCOME
from tests.control.test_controller_orders import (
    JOB,
    MOVING,
    PLAN,
    WORKERS,
    changes,
    events,
    moving_director,
    recovered_event,
    settled_event,
    shifted_in_turn,
)

LAUNCH = Launch(nnodes=1, workers_per_node=JOB.world_size, timeouts=TIMEOUTS)


class Journaled(Director):
    """A director whose controller writes a journal, and can be killed."""

    def __init__(self, path: Path, job: JobSpec = JOB) -> None:
        super().__init__(job)
        self.path = path
        self.journal = Journal.create(path, LAUNCH)
        self.states: list[State] = [self.state]
        """After each line."""

    def send(self, *events: Event) -> list:
        first = len(self.commands)
        for event in events:
            self.now += 0.001
            before = self.state
            self.state, commands = step(before, event, self.now)
            if matters(before, self.state, commands):
                self.journal.write(event, self.now, self.state)
                self.states.append(self.state)
            self.commands.extend(commands)
            for command in commands:
                if isinstance(command, MakePlan):
                    self.send(make_plan(command))
                if isinstance(command, ImprovePlan) and self.improver is not None:
                    self.send(self.improver(command))
        return self.commands[first:]

    def restart(self) -> None:
        """Kill it, and go on from what it has written."""
        self.journal.close()
        self.journal, self.state, at_s = Journal.resume(self.path, LAUNCH)
        assert at_s <= self.now
        self.send(Restarted(away_s=1.0))


@pytest.fixture
def director(tmp_path: Path) -> Journaled:
    director = Journaled(tmp_path / "journal")
    director.start()
    return director


def settle_all(director: Director) -> None:
    for worker in director.state.roster.survivors:
        director.send(settled_event(worker, director.state.epoch, 0))


def exited(worker: int) -> WorkerExited:
    return WorkerExited(worker=worker, status=-9, at_s=0.0)


def again(worker: int, *, epoch: int = 0, plan_epoch: int = 0, finished: bool = False) -> HelloAgain:
    return HelloAgain(hello=make_hello(worker, JOB), epoch=epoch, plan_epoch=plan_epoch, finished=finished)


# ---------------------------------------------------------------- the journal


@settings(max_examples=150, deadline=None)
@given(st.lists(events, max_size=30), st.data())
def test_replaying_gives_the_state_whatever_happened_and_wherever_the_last_line_is_cut(
    script: Sequence[Event], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        director = Journaled(Path(folder) / "journal")
        director.start()
        director.send(*script)
        written = director.path.read_bytes()
        director.journal.close()
    assert replay(written, LAUNCH)[0] == director.state
    head = written.index(b"\n") + 1
    # A share: how long the lines are depends on the planner's time.
    cut = head + round(data.draw(st.floats(0, 1), label="share that is left") * (len(written) - head))
    assert replay(written[:cut], LAUNCH)[0] == director.states[written[:cut].count(b"\n") - 1]


@settings(max_examples=150, deadline=None)
@given(st.lists(events, max_size=25), st.data())
def test_a_controller_that_was_killed_now_and_then_decides_as_one_that_was_not(
    script: Sequence[Event], data: st.DataObject
) -> None:
    calm = Director(JOB).start()
    calm.send(*script)
    with tempfile.TemporaryDirectory() as folder:
        director = Journaled(Path(folder) / "journal")
        director.start()
        for event in script:
            director.send(event)
            if data.draw(st.booleans(), label="killed"):
                director.restart()
        director.journal.close()
    assert without_times(director.state) == without_times(calm.state)
    for kind in (Quiesce, Recover, Start):
        assert [(who, strip(what)) for who, what in told(director.commands, kind)] == [
            (who, strip(what)) for who, what in told(calm.commands, kind)
        ], "nothing is decided twice, nor otherwise"


def strip(message: object) -> object:
    """A message without times."""
    match message:
        case Quiesce(epoch=epoch, lost=lost):
            return epoch, [(loss.worker, loss.reason, loss.detail) for loss in lost]
        case Recover(plan=plan, settlement=settlement, addresses=addresses):
            return plan, settlement, addresses
        case _:
            return message


def without_times(state: State) -> tuple[object, ...]:
    """What was decided."""
    roster = state.roster
    lost = {worker: (loss.reason, loss.detail) for worker, loss in roster.lost.items()}
    common = (type(state), lost, roster.finished, roster.exited, roster.crashes)
    match state:
        case Running(plan=plan, search=search, migration=migration):
            change = (plan, search, migration, state.declined, roster.settled_down)
            return (*common, *change, roster.drained, roster.scripted)
        case Settling(epoch=epoch, reports=reports, plan=plan):
            return (*common, epoch, reports, plan)
        case Resuming(plan=plan, settlement=settlement, reports=reports):
            return (*common, plan, settlement, reports)
        case Stopping(exit_code=code, sentence=sentence) | Ended(exit_code=code, sentence=sentence):
            return (*common, code, sentence)
        case Gathering():
            return (*common, roster.hellos)


@settings(max_examples=100, deadline=None)
@given(st.lists(changes, max_size=25), st.data())
def test_a_controller_that_was_killed_orders_no_migration_twice(script: Sequence[Event], data: st.DataObject) -> None:
    calm = moving_director()
    calm.send(*script)
    with tempfile.TemporaryDirectory() as folder:
        director = Journaled(Path(folder) / "journal", MOVING)
        director.improver = shifted_in_turn
        director.start()
        for event in script:
            director.send(event)
            if data.draw(st.booleans(), label="killed"):
                director.restart()
        director.journal.close()
    assert without_times(director.state) == without_times(calm.state)
    orders = [[message for _, message in told(who.commands, Migrate)] for who in (director, calm)]
    assert orders[0] == orders[1]


def test_a_line_that_is_cut_short_is_dropped_and_written_over(director: Journaled) -> None:
    whole = director.path.read_bytes()
    director.path.write_bytes(whole[:-5])
    journal, state, _ = Journal.resume(director.path, LAUNCH)
    assert state == director.states[-2]
    journal.write(Finished(worker=0), 200.0, step(state, Finished(worker=0), 200.0)[0])
    journal.close()
    assert replay(director.path.read_bytes(), LAUNCH)[0] == step(state, Finished(worker=0), 200.0)[0]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text.replace(b'"event":"Hello"', b'"event":"Nothing"', 1), r"line 3 .* is damaged \('Nothing'\)"),
        (lambda text: text.replace(b'"at_s":', b'"at":', 1), "line 2 .* is damaged"),
        (lambda text: text.replace(b'"journal":1', b'"journal":9', 1), "version 9"),
        (lambda text: text.replace(b'"nnodes":1', b'"nnodes":2', 1), "nnodes=2"),
        (lambda text: b"\n" + text, "no head"),
        (lambda text: b"", "is empty"),
        (lambda text: text.replace(b'"state":"Running"', b'"state":"Settling"', 1), "was megatron_elas changed"),
    ],
)
def test_a_journal_that_cannot_be_gone_on_from_is_refused_with_a_sentence(
    damage, words: str, director: Journaled
) -> None:
    director.path.write_bytes(damage(director.path.read_bytes()))
    with pytest.raises(BadJournal, match=words) as refused:
        Journal.resume(director.path, LAUNCH)
    assert refused.value.exit_code == ExitCode.STATE_INVALID


def test_half_a_journal_is_not_taken_for_a_new_job(director: Journaled) -> None:
    assert not is_new(director.path)
    director.journal.discard()
    assert not is_new(director.path)
    with pytest.raises(BadJournal, match="could not be written to the end"):
        Journal.resume(director.path, LAUNCH)


def test_a_journal_without_its_first_line_is_a_new_one(tmp_path: Path) -> None:
    assert is_new(tmp_path / "journal")
    (tmp_path / "journal").write_bytes(b'{"journal"')
    assert is_new(tmp_path / "journal")
    Journal.create(tmp_path / "journal", LAUNCH).close()
    assert isinstance(replay((tmp_path / "journal").read_bytes(), LAUNCH)[0], Gathering)


def test_lines_say_in_words_what_was_decided(director: Journaled) -> None:
    director.send(exited(5))
    settle_all(director)
    last = director.path.read_text().splitlines()[-1]
    assert '"state":"Resuming","epoch":1,"lost":[5],"settlement":{"base_epoch":0,"resume_step":5' in last


# ---------------------------------------------------------------- going on


def test_deadlines_are_moved_by_the_time_without_a_controller(director: Journaled) -> None:
    director.send(exited(5))
    before = director.state
    director.send(Restarted(away_s=7.0))
    assert isinstance(before, Settling) and director.state == replace(before, deadline_s=before.deadline_s + 7.0)


def test_a_plan_that_was_on_its_way_is_asked_for_again() -> None:
    director = Director(JOB, planner=False)
    director.send(AgentHello(node=0, host="here", workers=tuple(WORKERS)))
    director.send(*(make_hello(worker, JOB) for worker in WORKERS))
    assert [type(c) for c in director.send(Restarted(away_s=1.0)) if isinstance(c, MakePlan)] == [MakePlan]
    director.send(PlanMade(plan=PLAN, seconds=0.1), exited(5))
    [order] = [c for c in director.send(Restarted(away_s=1.0)) if isinstance(c, MakePlan)]
    assert (order.epoch, order.lost) == (1, (5,))


@pytest.fixture
def moving(tmp_path: Path) -> Journaled:
    """Nobody has answered for the planner, who is to find a plan without worker 2."""
    director = Journaled(tmp_path / "moving", MOVING)
    director.start()
    director.send(ChangeAsked(drained=(2,), request=7))
    return director


def test_a_plan_to_go_over_to_that_was_on_its_way_is_asked_for_again(moving: Journaled) -> None:
    [before] = [command for command in moving.commands if isinstance(command, ImprovePlan)]
    moving.restart()
    [_, after] = [command for command in moving.commands if isinstance(command, ImprovePlan)]
    assert after == before
    moving.send(shifted(after), shifted(before))
    assert len(told(moving.commands, Migrate)) == 1
    moving.restart()
    assert len(told(moving.commands, Migrate)) == 1 and moving.state.migration is not None


def test_a_declined_plan_stays_declined(moving: Journaled) -> None:
    moving.improver = shifted
    moving.restart()
    moving.send(Declined(worker=1, epoch=1, sentence="no memory for layer 3"))
    assert isinstance(moving.state, Running) and moving.state.declined == 1
    moving.restart()
    assert isinstance(moving.state, Running) and moving.state.migration is None
    assert (moving.state.next_epoch, moving.state.roster.settled_down) == (2, True)
    assert catch_up_worker(moving.state, again(2)) == ()
    moving.send(Declined(worker=1, epoch=1, sentence="no memory for layer 3"))
    assert len(told(moving.commands, Migrate)) == 1


def test_a_worker_that_missed_the_order_to_go_over_gets_it_until_somebody_has(moving: Journaled) -> None:
    moving.improver = shifted
    moving.restart()
    [(_, order)] = told(moving.commands, Migrate)
    moving.restart()
    assert catch_up_worker(moving.state, again(1)) == (order,)
    assert catch_up_worker(moving.state, again(2)) == (order,), "who leaves takes part"
    assert [type(message) for message in catch_up_worker(moving.state, again(1, plan_epoch=-1))] == [Start, Migrate]
    assert catch_up_worker(moving.state, again(1, plan_epoch=1)) == ()
    moving.migrate(1, [0])
    moving.restart()
    assert catch_up_worker(moving.state, again(1)) == ()
    assert find_stranger(moving.state, again(2)) == FAREWELL


def test_the_block_of_a_migration_is_shown_by_the_controller_that_hears_the_last_report(moving: Journaled) -> None:
    moving.improver = shifted
    moving.restart()
    for worker in (0, 1, 3, 4):
        moving.migrate(1, [worker])
        moving.restart()
    assert not [command for command in moving.commands if isinstance(command, ShowMigration)]
    moving.migrate(1, [5, 5])
    [block] = [command for command in moving.commands if isinstance(command, ShowMigration)]
    assert block.facts["reported"] == [0, 1, 3, 4, 5]


def test_a_worker_that_comes_back_is_told_what_it_missed_and_nothing_else(director: Journaled) -> None:
    start = Start(plan=PLAN, addresses=director.state.roster.addresses_of(tuple(WORKERS)))
    assert catch_up_worker(director.state, again(0, plan_epoch=-1)) == (start,)
    assert catch_up_worker(director.state, again(0)) == ()
    [(_, quiesce)] = told(director.send(exited(5)), Quiesce)
    assert catch_up_worker(director.state, again(0)) == (quiesce,)
    assert catch_up_worker(director.state, again(0, epoch=1)) == ()
    settle_all(director)
    [(_, recover)] = told(director.commands, Recover)
    assert catch_up_worker(director.state, again(0, epoch=1)) == (recover,), "the very order that was decided"
    assert catch_up_worker(director.state, again(0, epoch=1, plan_epoch=1)) == ()
    director.send(*(recovered_event(worker, 1) for worker in director.state.roster.survivors))
    assert (
        isinstance(director.state, Running) and catch_up_worker(director.state, again(0, epoch=1, plan_epoch=1)) == ()
    )


def test_the_order_to_recover_is_the_same_when_somebody_has_finished_meanwhile(director: Journaled) -> None:
    director.send(exited(5))
    settle_all(director)
    [(_, recover)] = told(director.commands, Recover)
    director.send(Finished(worker=1))
    assert catch_up_worker(director.state, again(0, epoch=1)) == (recover,)


def test_a_worker_that_finished_is_let_go_and_one_that_was_dismissed_is_told(director: Journaled) -> None:
    director.send(Finished(worker=0))
    assert catch_up_worker(director.state, again(0, finished=True)) == ()
    director.send(exited(5))  # everybody else is dismissed
    [goodbye] = catch_up_worker(director.state, again(1))
    assert isinstance(goodbye, Stop) and goodbye.exit_code == ExitCode.FINISHED


def test_a_lost_worker_and_a_stranger_are_sent_away(director: Journaled) -> None:
    director.send(WorkerHung(worker=5, detail="its process is stopped"))
    away = find_stranger(director.state, again(5))
    assert away is not None and away.exit_code == ExitCode.CUT_OFF and "its process is stopped" in away.sentence
    assert find_stranger(director.state, again(0)) is None
    other = msgspec.structs.replace(again(0), hello=msgspec.structs.replace(make_hello(0, JOB), pid=1))
    away = find_stranger(director.state, other)
    assert away is not None and away.exit_code == ExitCode.NOT_STARTED


def test_an_agent_that_comes_back_is_told_everything_again(director: Journaled) -> None:
    assert catch_up_agent(director.state, 0, WELCOME) == (WELCOME,)
    director.send(WorkerHung(worker=5, detail="stopped"))
    assert catch_up_agent(director.state, 0, WELCOME) == (WELCOME, KillWorker(worker=5))
    director.send(exited(5))
    assert catch_up_agent(director.state, 0, WELCOME) == (WELCOME,), "it is dead"
    director.send(Terminate(signum=15))
    [order] = catch_up_agent(director.state, 0, WELCOME)
    assert isinstance(order, StopAll) and order.exit_code == 143


def test_an_agent_waits_for_the_others_before_it_is_welcomed() -> None:
    director = Director(JOB, nnodes=2)
    director.send(AgentHello(node=0, host="here", workers=(0, 1, 2)))
    assert catch_up_agent(director.state, 0, WELCOME) == ()


def test_what_is_said_twice_changes_nothing(director: Journaled) -> None:
    """A worker repeats what was not noted, an agent all it ever said."""
    director.send(exited(5))
    epoch = director.state.epoch
    for worker in (0, 1, 2, 3):
        director.send(*[settled_event(worker, epoch, 0)] * 2)
    state = director.state
    director.send(exited(5), settled_event(0, epoch, 0))
    assert director.state == state
    director.send(settled_event(4, epoch, 0), settled_event(4, epoch, 0))
    director.send(*(recovered_event(worker, 1) for worker in (0, 0, 1, 2, 3, 4)), recovered_event(2, 1))
    assert isinstance(director.state, Running)
    assert len(told(director.commands, Recover)) == 1
    assert not [command for command in director.send(exited(5)) if isinstance(command, Tell)]
