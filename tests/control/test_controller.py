"""The controller as plain values: no sockets, no clocks."""

from __future__ import annotations

import signal
from dataclasses import replace

import msgspec
import pytest

from megatron_elas.control.commands import EndJob, MakePlan, Note, ShowRecovery, Tell, TellAgent, WelcomeAgents
from megatron_elas.control.events import AgentLost, PlanMade, Tick, WorkerSilent
from megatron_elas.control.messages import (
    AgentHello,
    CopyDiffered,
    Crashed,
    Failed,
    FaultFired,
    Finished,
    Inject,
    KillWorker,
    LeaveOut,
    PeerUnreachable,
    Quiesce,
    Recover,
    Settled,
    Start,
    Stop,
    StopAll,
    Terminate,
    Unverified,
    WorkerExited,
    WorkerHung,
)
from megatron_elas.control.states import Ended, Gathering, Resuming, Running, Settling, Stopping
from megatron_elas.control.tools import describe
from megatron_elas.planner.plan import initial_plan
from megatron_elas.refusal import Refusal
from megatron_elas.spec.errors import ExitCode
from megatron_elas.spec.events import LossReason
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.report import Holding, SettleReport
from tests.control.jobs import TIMEOUTS, Director, end_of, make_hello, make_job, make_report, told


def exited(worker: int, status: int) -> WorkerExited:
    return WorkerExited(worker=worker, status=status, at_s=0.0)


@pytest.fixture
def job() -> JobSpec:
    return make_job(pipeline=2, data=2)


@pytest.fixture
def running(job: JobSpec) -> Director:
    return Director(job).start()


def plan_of(director: Director):
    assert isinstance(director.state, Running | Resuming)
    return director.state.plan


def stop_code(director: Director) -> int:
    assert isinstance(director.state, Stopping | Ended), director.state
    return director.state.exit_code


def end_well(director: Director, steps: int) -> EndJob | None:
    workers = director.state.roster.remaining
    director.send(*(Finished(worker=worker, steps=steps) for worker in workers))
    return end_of(director.send(*(exited(worker, 0) for worker in workers)))


# ---------------------------------------------------------------- joining


def test_the_last_worker_to_join_starts_everybody(job: JobSpec) -> None:
    director = Director(job)
    director.send(AgentHello(node=0, host="here", workers=(0, 1, 2, 3)))
    director.send(*(make_hello(worker, job) for worker in (3, 1, 0)))
    assert not told(director.commands, Start)
    director.send(make_hello(2, job))
    [(workers, start)] = told(director.commands, Start)
    assert workers == (0, 1, 2, 3)
    assert start.plan == initial_plan(job, {worker: f"worker{worker}" for worker in range(4)})
    assert start.addresses == {worker: f"unix:{worker}" for worker in range(4)}
    assert isinstance(director.state, Running)


def test_a_worker_that_joins_twice_is_counted_once(job: JobSpec) -> None:
    director = Director(job)
    director.send(*(make_hello(worker, job) for worker in (0, 0, 1, 1)))
    assert isinstance(director.state, Gathering)
    assert sorted(director.state.roster.hellos) == [0, 1]


def test_workers_with_different_flags_end_the_job_as_bad_usage(job: JobSpec) -> None:
    director = Director(job)
    director.send(make_hello(0, job), make_hello(1, make_job(pipeline=4, data=1)))
    assert stop_code(director) == ExitCode.BAD_USAGE
    assert "worker 1" in director.state.sentence and "same flags" in director.state.sentence


def test_a_grid_of_another_size_than_was_launched_is_bad_usage(job: JobSpec) -> None:
    director = Director(job)
    director.send(make_hello(0, make_job(pipeline=4, data=2)))
    assert stop_code(director) == ExitCode.BAD_USAGE
    assert "needs 8" in director.state.sentence


def test_a_worker_of_another_protocol_is_a_wrong_version(job: JobSpec) -> None:
    director = Director(job)
    hello = make_hello(0, job)
    director.send(type(hello)(**{name: getattr(hello, name) for name in hello.__struct_fields__} | {"version": 99}))
    assert stop_code(director) == ExitCode.WRONG_VERSION


@pytest.mark.parametrize("silent", [False, True])
def test_a_loss_before_the_start_ends_the_job_as_not_started(job: JobSpec, silent: bool) -> None:
    director = Director(job)
    director.send(AgentHello(node=0, host="here", workers=(0, 1, 2, 3)), make_hello(0, job), make_hello(1, job))
    director.send(WorkerSilent(worker=1, silent_s=2.0) if silent else exited(1, -signal.SIGKILL))
    assert stop_code(director) == ExitCode.NOT_STARTED


def test_a_worker_that_leaves_without_joining_ends_an_elastic_job(job: JobSpec) -> None:
    director = Director(job)
    director.send(exited(3, 0), make_hello(0, job))
    assert stop_code(director) == ExitCode.NOT_STARTED


def test_own_exit_codes_of_workers_before_the_start_are_passed_on(job: JobSpec) -> None:
    director = Director(job)
    director.send(make_hello(0, job), exited(1, ExitCode.BAD_USAGE))
    assert stop_code(director) == ExitCode.BAD_USAGE


def test_the_reason_is_that_of_the_worker_that_refused_first_not_of_the_one_that_ended_first(job: JobSpec) -> None:
    director = Director(job)
    first = Refusal(worker=2, exit_code=6, sentence="torch is too old")
    director.send(WorkerExited(worker=1, status=2, at_s=0.0, refusal=first), exited(2, 6))
    assert (stop_code(director), director.state.worker) == (ExitCode.WRONG_VERSION, 2)
    assert director.state.sentence == "worker 2: torch is too old"
    crashed = Director(job)
    crashed.send(WorkerExited(worker=1, status=9, at_s=0.0, refusal=first))
    assert crashed.state.sentence == "worker 1 exited with status 9", "that is another reason"


def test_workers_that_do_not_join_in_time_end_the_job(job: JobSpec) -> None:
    director = Director(job)
    director.send(AgentHello(node=0, host="here", workers=(0, 1, 2, 3)), make_hello(0, job))
    director.now += TIMEOUTS.join_timeout_s - 1
    director.send(Tick())
    assert isinstance(director.state, Gathering)
    director.now += 2
    director.send(Tick())
    assert stop_code(director) == ExitCode.NOT_STARTED
    assert "[1, 2, 3]" in director.state.sentence


def test_a_plain_job_is_never_late(job: JobSpec) -> None:
    director = Director(job)
    director.send(AgentHello(node=0, host="here", workers=(0, 1, 2, 3)))
    director.now += 100 * TIMEOUTS.join_timeout_s
    director.send(Tick())
    assert isinstance(director.state, Gathering)


def test_workers_are_started_when_the_last_node_has_joined(job: JobSpec) -> None:
    director = Director(job, nnodes=2)
    assert director.send(AgentHello(node=1, host="there", workers=(2, 3))) == []
    assert director.send(AgentHello(node=0, host="here", workers=(0, 1))) == [WelcomeAgents()]


def test_a_node_that_does_not_come_ends_the_job(job: JobSpec) -> None:
    director = Director(job, nnodes=2)
    director.send(AgentHello(node=0, host="here", workers=(0, 1)))
    director.now += TIMEOUTS.join_timeout_s + 1
    commands = director.send(Tick())
    assert stop_code(director) == ExitCode.NOT_STARTED
    assert "nodes [1]" in director.state.sentence
    assert end_of(commands) is not None, "no worker was started, so there is none to wait for"


def test_only_workers_that_an_agent_can_still_report_are_waited_for(job: JobSpec) -> None:
    director = Director(job, nnodes=2).start()
    director.send(AgentLost(node=1), Terminate(signum=signal.SIGTERM), Tick())
    assert isinstance(director.state, Stopping)
    director.now += 2 * TIMEOUTS.grace_s
    note, end = director.send(Tick())
    assert isinstance(note, Note) and note.text == "workers [0, 1] were not reported to have ended"
    assert end_of([end]) is not None


# ---------------------------------------------------------------- plain jobs


def test_a_plain_job_ends_with_zero_when_all_its_processes_do(job: JobSpec) -> None:
    director = Director(job)
    director.send(AgentHello(node=0, host="here", workers=(0, 1, 2, 3)))
    commands = director.send(*(exited(worker, 0) for worker in range(4)))
    end = end_of(commands)
    assert end is not None and end.exit_code == 0


@pytest.mark.parametrize(("status", "code"), [(7, 7), (-signal.SIGSEGV, 128 + signal.SIGSEGV), (1, 1)])
def test_a_plain_job_ends_as_its_first_failing_worker(job: JobSpec, status: int, code: int) -> None:
    director = Director(job)
    director.send(AgentHello(node=0, host="here", workers=(0, 1, 2, 3)))
    commands = director.send(exited(0, 0), exited(2, status))
    assert [command.message.exit_code for command in commands if isinstance(command, TellAgent)] == [code]
    assert end_of(commands) is None
    end = end_of(director.send(exited(1, -signal.SIGTERM), exited(3, -signal.SIGTERM)))
    assert end is not None and end.exit_code == code


def test_a_signal_ends_everything_with_128_plus_its_number(running: Director) -> None:
    commands = running.send(Terminate(signum=signal.SIGINT))
    [order] = [command for command in commands if isinstance(command, TellAgent)]
    assert isinstance(order.message, StopAll) and order.message.signum == signal.SIGINT
    end = end_of(running.send(*(exited(worker, -signal.SIGINT) for worker in range(4))))
    assert end is not None and end.exit_code == 130


# ---------------------------------------------------------------- recovery


def test_a_lost_worker_makes_survivors_quiesce_settle_and_recover(running: Director) -> None:
    old = plan_of(running)
    commands = running.send(exited(3, -signal.SIGKILL))
    [(workers, quiesce)] = told(commands, Quiesce)
    assert workers == (0, 1, 2) and quiesce.epoch == 1
    [loss] = quiesce.lost
    assert (loss.worker, loss.reason, loss.detail) == (3, LossReason.EXITED, "killed by SIGKILL")
    assert not told(running.settle(1, [0, 2], old), Recover)
    [(workers, recover)] = told(running.settle(1, [1], old), Recover)
    assert workers == (0, 1, 2)
    assert recover.plan.epoch == 1 and recover.plan.placement.workers == (0, 1, 2)
    assert (recover.settlement.base_epoch, recover.settlement.resume_step) == (0, 5)
    assert 3 not in recover.addresses
    assert not [c for c in running.recover(1, [0, 1]) if isinstance(c, ShowRecovery)]
    assert [c for c in running.recover(1, [2]) if isinstance(c, ShowRecovery)]
    assert isinstance(running.state, Running) and running.state.epoch == 1


def leave_out(worker: int, epoch: int = 0) -> LeaveOut:
    return LeaveOut(worker=worker, epoch=epoch, culprit=worker, detail="could not save: OSError: full\nand more lines")


def test_what_one_worker_could_not_do_is_left_out_by_the_same_workers(running: Director) -> None:
    old = plan_of(running)
    commands = running.send(leave_out(2))
    [(workers, quiesce)] = told(commands, Quiesce)
    assert workers == (0, 1, 2, 3) and (quiesce.epoch, quiesce.lost) == (1, ())
    assert [c.text for c in commands if isinstance(c, Note) and c.warning] == [
        "worker 2 could not save: OSError: full; training goes on without it"
    ]
    [(workers, recover)] = told(running.settle(1, [0, 1, 2, 3], old), Recover)
    assert workers == (0, 1, 2, 3) and recover.plan.placement == old.placement
    [shown] = [c for c in running.recover(1, [0, 1, 2, 3]) if isinstance(c, ShowRecovery)]
    assert "left out worker 2 could not save: OSError: full\n" in shown.text
    assert isinstance(running.state, Running) and running.state.epoch == 1


@pytest.mark.parametrize("event", [leave_out(1, epoch=0), leave_out(3, epoch=1)], ids=["older-epoch", "lost-worker"])
def test_a_failure_of_an_older_epoch_or_of_a_lost_worker_is_ignored(running: Director, event: LeaveOut) -> None:
    running.send(exited(3, -signal.SIGKILL))
    running.send(event)
    assert isinstance(running.state, Settling) and running.state.epoch == 1


def test_a_loss_beside_a_failure_is_recovered_from_with_it(running: Director) -> None:
    running.send(leave_out(2), exited(3, -signal.SIGKILL))
    assert isinstance(running.state, Settling) and running.state.epoch == 2
    assert running.state.outage.lost == (3,) and len(running.state.outage.failures) == 1


def test_quiesce_leaves_before_the_planner_is_asked(running: Director) -> None:
    running.planner = False
    commands = running.send(exited(3, -signal.SIGKILL))
    kinds = [type(command) for command in commands]
    assert kinds.index(Tell) < kinds.index(MakePlan)


def test_recover_waits_for_the_plan(running: Director) -> None:
    old = plan_of(running)
    running.planner = False
    commands = running.send(exited(3, -signal.SIGKILL))
    assert not told(running.settle(1, [0, 1, 2], old), Recover)
    [request] = [command for command in commands if isinstance(command, MakePlan)]
    plan = running.state.outage.base
    made = replace(plan, epoch=1, placement=plan.placement.without(request.lost))
    [(_, recover)] = told(running.send(PlanMade(plan=made, seconds=0.25)), Recover)
    assert recover.plan_s == 0.25


def test_a_worker_that_hangs_is_killed_and_the_others_go_on(running: Director) -> None:
    commands = running.send(WorkerHung(worker=2, detail="its process is stopped, for 0.25 s"))
    assert TellAgent(node=0, message=KillWorker(worker=2)) in commands
    [(workers, quiesce)] = told(commands, Quiesce)
    assert workers == (0, 1, 3)
    assert (quiesce.lost[0].reason, quiesce.lost[0].detail) == (LossReason.SILENT, "its process is stopped, for 0.25 s")


def test_a_worker_that_hangs_and_takes_no_part_is_left_alone(job: JobSpec) -> None:
    director = Director(job)
    director.send(AgentHello(node=0, host="here", workers=(0, 1, 2, 3)), WorkerHung(worker=2, detail="x"))
    assert isinstance(director.state, Gathering), "it may be a job without --elastic"


def test_a_silent_worker_is_killed_and_the_others_go_on(running: Director) -> None:
    commands = running.send(WorkerSilent(worker=2, silent_s=10.4))
    assert TellAgent(node=0, message=KillWorker(worker=2)) in commands
    [(workers, quiesce)] = told(commands, Quiesce)
    assert workers == (0, 1, 3)
    assert quiesce.lost[0].detail == "no heartbeat for 10.4 s"
    running.send(exited(2, -signal.SIGKILL))
    assert isinstance(running.state, Settling) and running.state.epoch == 1


def test_a_worker_that_a_peer_cannot_reach_is_killed(running: Director) -> None:
    commands = running.send(PeerUnreachable(worker=1, epoch=0, peer=3, detail="reset"))
    assert TellAgent(node=0, message=KillWorker(worker=3)) in commands
    assert told(commands, Quiesce)[0][1].lost[0].reason is LossReason.UNREACHABLE
    running.send(exited(3, 1))
    assert running.state.outage.losses[0].detail.endswith("exited with status 1")


def test_a_broken_link_is_told_to_people_without_the_name_of_its_socket(running: Director) -> None:
    detail = "Connection reset by peer (channel 1099511627778, epoch 0)"
    running.send(PeerUnreachable(worker=1, epoch=0, peer=3, detail=detail))
    assert running.state.roster.lost[3].detail == "link from worker 1 broke: Connection reset by peer"


def test_of_two_workers_that_accuse_each_other_one_is_lost(running: Director) -> None:
    running.send(
        PeerUnreachable(worker=1, epoch=0, peer=3, detail="reset"),
        PeerUnreachable(worker=3, epoch=0, peer=1, detail="reset"),
    )
    assert set(running.state.roster.lost) == {3}
    assert running.state.epoch == 1


def test_an_accusation_of_an_older_epoch_is_ignored(running: Director) -> None:
    running.send(exited(3, -9), PeerUnreachable(worker=0, epoch=0, peer=1, detail="cancelled"))
    assert set(running.state.roster.lost) == {3}


def test_a_second_loss_while_settling_starts_another_epoch_with_both(running: Director) -> None:
    job = make_job(pipeline=2, data=3)
    running = Director(job).start()
    old = plan_of(running)
    running.send(exited(5, -9))
    running.settle(1, [0, 1, 2, 3], old)
    [(workers, quiesce)] = told(running.send(exited(1, -9)), Quiesce)
    assert workers == (0, 2, 3, 4) and quiesce.epoch == 2
    assert [loss.worker for loss in quiesce.lost] == [5, 1]
    assert not told(running.settle(1, [4], old), Recover), "reports of the older epoch count no more"
    [(_, recover)] = told(running.settle(2, [0, 2, 3, 4], old), Recover)
    assert recover.plan.epoch == 2 and recover.plan.placement.workers == (0, 2, 3, 4)


def test_a_loss_while_resuming_settles_in_the_layout_that_all_survivors_hold(running: Director) -> None:
    running = Director(make_job(pipeline=2, data=3)).start()
    first = plan_of(running)
    running.send(exited(5, -9))
    running.settle(1, [0, 1, 2, 3, 4], first)
    second = plan_of(running)
    running.recover(1, [0])
    running.send(exited(1, -9))
    assert isinstance(running.state, Settling) and running.state.epoch == 2
    assert set(running.state.outage.plans) == {0, 1}
    assert running.state.outage.lost == (1, 5)
    running.settle(2, [0, 2, 3], second, step_number=6)
    [(_, recover)] = told(running.settle(2, [4], second, step_number=6), Recover)
    assert recover.settlement.base_epoch == 1 and recover.settlement.resume_step == 6
    assert recover.plan.placement.workers == (0, 2, 3, 4)


def test_an_outage_ends_when_all_have_recovered_and_the_next_starts_from_there(running: Director) -> None:
    running = Director(make_job(pipeline=2, data=3)).start()
    running.send(exited(5, -9))
    running.settle(1, [0, 1, 2, 3, 4], initial_plan(running.job, running.state.roster.domains))
    running.recover(1, [0, 1, 2, 3, 4])
    running.send(exited(1, -9))
    assert running.state.outage.lost == (1,)
    assert set(running.state.outage.plans) == {1}


def test_survivors_that_do_not_settle_in_time_are_lost_too(running: Director) -> None:
    running = Director(make_job(pipeline=2, data=3)).start()
    old = plan_of(running)
    running.send(exited(5, -9))
    running.settle(1, [0, 1, 2, 3], old)
    running.now += TIMEOUTS.settle_timeout_s
    commands = running.send(Tick())
    assert TellAgent(node=0, message=KillWorker(worker=4)) in commands
    assert told(commands, Quiesce)[0][0] == (0, 1, 2, 3)
    assert "--settle-timeout-s=2" in running.state.roster.lost[4].detail


def resuming(job: JobSpec, lost: int) -> Director:
    """A job whose survivors were just told to recover."""
    director = Director(job).start()
    old = plan_of(director)
    director.send(exited(lost, -9))
    director.settle(1, director.state.roster.survivors, old)
    assert isinstance(director.state, Resuming)
    return director


def test_of_survivors_that_are_late_only_those_that_wait_for_nobody_are_lost() -> None:
    director = resuming(make_job(pipeline=2, data=3), 5)
    director.now += TIMEOUTS.resume_timeout_s
    director.send(Tick(waiting=frozenset({0, 2, 3, 4})))
    assert isinstance(director.state, Settling) and set(director.state.roster.lost) == {1, 5}


def test_late_survivors_that_all_wait_are_lost_together() -> None:
    director = resuming(make_job(pipeline=2, data=3), 5)
    director.recover(1, [0, 1, 2])
    director.now += TIMEOUTS.resume_timeout_s
    director.send(Tick(waiting=frozenset({0, 1, 2, 3, 4})))
    assert set(director.state.roster.lost) == {3, 4, 5}


def test_survivors_that_do_not_finish_their_first_step_in_time_are_lost_too() -> None:
    director = resuming(make_job(pipeline=2, data=3), 5)
    director.recover(1, [0, 1, 2, 3])
    director.now += TIMEOUTS.resume_timeout_s - 1
    director.send(Tick())
    assert isinstance(director.state, Resuming)
    director.now += 1
    commands = director.send(Tick())
    assert TellAgent(node=0, message=KillWorker(worker=4)) in commands
    [(workers, quiesce)] = told(commands, Quiesce)
    assert workers == (0, 1, 2, 3) and quiesce.epoch == 2
    loss = director.state.roster.lost[4]
    assert loss.reason is LossReason.SILENT
    assert loss.detail == "did not finish its first step within --resume-timeout-s=5"


def test_a_spare_that_does_not_report_in_time_is_lost_too() -> None:
    director = resuming(make_job(pipeline=1, data=2, tensor=2), 3)
    director.recover(1, [0, 1])
    director.now += TIMEOUTS.resume_timeout_s
    assert told(director.send(Tick()), Quiesce)[0][0] == (0, 1)
    assert set(director.state.roster.lost) == {2, 3}


def test_a_job_whose_survivors_all_hang_in_their_first_step_gives_up() -> None:
    director = resuming(make_job(pipeline=2, data=2), 3)
    director.now += TIMEOUTS.resume_timeout_s
    commands = director.send(Tick())
    assert all(TellAgent(node=0, message=KillWorker(worker=worker)) in commands for worker in (0, 1, 2))
    assert stop_code(director) == ExitCode.GAVE_UP
    assert "--resume-timeout-s=5" in director.state.sentence


def test_a_recovery_that_ended_has_no_deadline_any_more() -> None:
    director = resuming(make_job(pipeline=2, data=2), 3)
    director.recover(1, [0, 1, 2])
    director.now += 100 * TIMEOUTS.resume_timeout_s
    assert director.send(Tick()) == []


# ---------------------------------------------------------------- errors that are no accident

NAN = "RuntimeError: Rank {}, node n, device 0, iteration 6: Unexpected result nan"


def crashed(worker: int, step: int = 5, error: str = "ValueError: bad sample") -> Crashed:
    return Crashed(worker=worker, step=step, error=error)


def test_a_worker_that_crashes_is_lost_with_its_error(running: Director) -> None:
    assert running.send(crashed(3, error="ValueError: bad sample\nsecond line")) == []
    [(_, quiesce)] = told(running.send(exited(3, 1)), Quiesce)
    assert quiesce.lost[0].detail == "exited with status 1, failed with: ValueError: bad sample"


def test_an_error_that_is_read_after_the_loss_is_added_to_it(running: Director) -> None:
    running.send(PeerUnreachable(worker=1, epoch=0, peer=3, detail="reset"), crashed(3))
    assert running.state.outage.losses[0].detail == (
        "link from worker 1 broke: reset, failed with: ValueError: bad sample"
    )


@pytest.mark.parametrize("errors", [("ValueError: bad sample",) * 2, (NAN.format(1), NAN.format(3))])
@pytest.mark.parametrize("recovered", [False, True])
def test_a_second_worker_that_crashes_alike_ends_the_job(errors: tuple[str, str], recovered: bool) -> None:
    director = Director(make_job(pipeline=1, data=4)).start()
    old = plan_of(director)
    director.send(crashed(3, error=errors[0]))
    if recovered:
        director.send(exited(3, 1))
        director.settle(1, [0, 1, 2], old)
        director.recover(1, [0, 1, 2])
    director.send(crashed(1, error=errors[1]))
    assert stop_code(director) == ExitCode.CRASHED
    assert director.state.sentence == (
        f"workers 3 and 1 failed in step 5 with the same error, which the others would run into too ({errors[1]}): "
        f"mend its cause, then restart from the newest checkpoint"
    )


@pytest.mark.parametrize("other", [crashed(1, step=6), crashed(1, error="OSError: no space"), crashed(3)])
def test_crashes_that_differ_are_losses(running: Director, other: Crashed) -> None:
    running.send(crashed(3), other)
    assert isinstance(running.state, Running)


def test_a_crash_after_somebody_finished_ends_no_job(running: Director) -> None:
    running.send(Finished(worker=0), crashed(1), crashed(2))
    assert isinstance(running.state, Running)


def test_a_crash_before_the_start_is_named(job: JobSpec) -> None:
    director = Director(job)
    director.send(make_hello(0, job), crashed(0, step=0), exited(0, 1))
    assert stop_code(director) == ExitCode.NOT_STARTED
    assert "failed with: ValueError: bad sample" in director.state.sentence


def test_a_long_error_is_shortened(running: Director) -> None:
    running.send(crashed(3, error="x" * 10_000), exited(3, 1))
    assert len(running.state.roster.lost[3].detail) < 400


def test_fewer_workers_than_a_cell_takes_give_up() -> None:
    director = Director(make_job(pipeline=2, data=1, tensor=2)).start()
    for worker in (1, 2, 3):
        director.send(exited(worker, -9))
    assert stop_code(director) == ExitCode.GAVE_UP
    assert "too few workers are left (1), a cell takes 2" in director.state.sentence


def test_losing_a_whole_stage_is_settled_like_any_other_loss(running: Director) -> None:
    running.send(exited(2, -9), exited(3, -9))
    assert isinstance(running.state, Settling) and running.state.roster.survivors == (0, 1)


def test_losing_everybody_gives_up(running: Director) -> None:
    for worker in range(4):
        running.send(exited(worker, -9))
    assert stop_code(running) == ExitCode.GAVE_UP


def test_an_incomplete_state_ends_the_job_as_invalid(running: Director) -> None:
    running.send(exited(3, -9))
    empty = Holding(epoch=0, live=5, kept=(5,), wards={})
    for worker in (0, 1, 2):
        running.send(Settled(report=SettleReport(worker=worker, epoch=1, step=5, activity=5, holdings=(empty,))))
    assert stop_code(running) == ExitCode.STATE_INVALID


def settle_with_checkpoints(director: Director, epoch: int, checkpoints: dict[int, int], plan=None) -> Recover | None:
    """All survivors settle, with nothing whole unless a plan is given; each knows of this checkpoint."""
    empty = Holding(epoch=0, live=5, kept=(5,), wards={})
    for worker, checkpoint in checkpoints.items():
        holdings = (empty,) if plan is None else make_report(worker, epoch, plan).holdings
        report = SettleReport(
            worker=worker, epoch=epoch, step=7, activity=9, waived=4, checkpoint=checkpoint, holdings=holdings
        )
        director.send(Settled(report=report))
    told_now = [message for _, message in told(director.commands, Recover) if message.plan.epoch == epoch]
    return told_now[0] if told_now else None


def test_where_no_state_is_whole_all_go_on_from_the_newest_checkpoint_that_anybody_knows(running: Director) -> None:
    running.send(exited(3, -9))
    recover = settle_with_checkpoints(running, 1, {0: 4, 1: -1, 2: 2})
    assert recover is not None
    settlement = recover.settlement
    assert (settlement.checkpoint, settlement.resume_step, settlement.base_epoch) == (4, 4, 1)
    assert (settlement.lead_activity, settlement.waived_activity) == (9, 4)
    assert any("go on from the checkpoint of iteration 4" in c.text for c in running.commands if isinstance(c, Note))
    [shown] = [c for c in running.recover(1, [0, 1, 2]) if isinstance(c, ShowRecovery)]
    assert "\nstate    from the checkpoint of iteration 4\n" in shown.text
    assert isinstance(running.state, Running)


def test_a_whole_state_is_taken_before_a_checkpoint(running: Director) -> None:
    old = plan_of(running)
    running.send(exited(3, -9))
    recover = settle_with_checkpoints(running, 1, {0: 4, 1: 4, 2: 4}, old)
    assert recover is not None and recover.settlement.checkpoint is None and recover.settlement.resume_step == 5


def unverified(worker: int, epoch: int, *, step: int = 5, renewable: bool = False) -> Unverified:
    return Unverified(
        worker=worker, epoch=epoch, check="contents", step=step, sentence="exp_avg differs", renewable=renewable
    )


def test_a_failed_check_makes_all_go_on_from_the_checkpoint(running: Director) -> None:
    old = plan_of(running)
    running.send(exited(3, -9))
    assert settle_with_checkpoints(running, 1, {0: 4, 1: 4, 2: 4}, old) is not None
    commands = running.send(unverified(2, 1), unverified(0, 1), unverified(1, 1))
    [(workers, quiesce)] = told(commands, Quiesce)
    assert workers == (0, 1, 2) and quiesce.epoch == 2
    recover = settle_with_checkpoints(running, 2, {0: 4, 1: 4, 2: 4}, old)
    assert recover is not None and recover.settlement.checkpoint == 4
    [shown] = [c for c in running.recover(2, [0, 1, 2]) if isinstance(c, ShowRecovery)]
    assert "\nfailed   exp_avg differs\n" in shown.text


def test_a_failed_check_without_a_checkpoint_ends_the_job_with_its_sentence(running: Director) -> None:
    old = plan_of(running)
    running.send(exited(3, -9))
    settle_with_checkpoints(running, 1, {0: -1, 1: -1, 2: -1}, old)
    running.send(unverified(1, 1))
    assert settle_with_checkpoints(running, 2, {0: -1, 1: -1, 2: -1}, old) is None
    assert stop_code(running) == ExitCode.STATE_INVALID
    assert "exp_avg differs" in running.state.sentence and "saved no checkpoint" in running.state.sentence


def test_bad_copies_alone_are_made_anew_from_their_owners(running: Director) -> None:
    old = plan_of(running)
    running.send(exited(3, -9))
    settle_with_checkpoints(running, 1, {0: 4, 1: 4, 2: 4}, old)
    running.send(unverified(1, 1, renewable=True))
    recover = settle_with_checkpoints(running, 2, {0: 4, 1: 4, 2: 4}, old)
    assert recover is not None and recover.settlement.checkpoint is None


def test_copies_that_are_bad_again_after_they_were_renewed_give_way_to_the_checkpoint(running: Director) -> None:
    old = plan_of(running)
    running.send(exited(3, -9))
    settle_with_checkpoints(running, 1, {0: 4, 1: 4, 2: 4}, old)
    running.send(unverified(1, 1, renewable=True))
    settle_with_checkpoints(running, 2, {0: 4, 1: 4, 2: 4}, old)
    running.send(unverified(1, 2, renewable=True))
    recover = settle_with_checkpoints(running, 3, {0: 4, 1: 4, 2: 4}, old)
    assert recover is not None and recover.settlement.checkpoint == 4
    running.send(unverified(1, 3, renewable=True))
    assert stop_code(running) == ExitCode.STATE_INVALID


@pytest.mark.parametrize("later", [0, 1], ids=["same-outage", "later-outage"])
def test_the_same_check_that_fails_before_the_same_step_again_ends_the_job(later: int) -> None:
    running = Director(make_job(pipeline=1, data=4)).start()
    plan = plan_of(running)
    running.send(exited(3, -9))
    epoch = 1
    settle_with_checkpoints(running, epoch, {0: 4, 1: 4, 2: 4}, plan)
    running.send(unverified(1, epoch))
    epoch = 2
    survivors = [0, 1, 2]
    settle_with_checkpoints(running, epoch, dict.fromkeys(survivors, 4), plan)
    if later:
        running.recover(epoch, survivors)
        assert isinstance(running.state, Running)
        plan, survivors, epoch = plan_of(running), [0, 1], 3
        running.send(exited(2, -9))
        settle_with_checkpoints(running, epoch, dict.fromkeys(survivors, 4), plan)
    before = running.state
    running.send(unverified(0, epoch, step=4))
    assert isinstance(running.state, Settling), "another step: another attempt"
    running.state = before
    running.send(unverified(0, epoch))
    assert stop_code(running) == ExitCode.STATE_INVALID
    assert "same check failed before the same step already" in running.state.sentence


def test_a_failed_check_of_an_older_epoch_or_of_a_lost_worker_is_ignored(running: Director) -> None:
    old = plan_of(running)
    running.send(exited(3, -9))
    settle_with_checkpoints(running, 1, {0: 4, 1: 4, 2: 4}, old)
    before = running.state
    running.send(unverified(1, 0), unverified(3, 1))
    assert running.state == before


def test_a_copy_that_differed_is_told_and_counted(running: Director) -> None:
    commands = running.send(CopyDiffered(worker=1, epoch=0, owner=0, step=100, slot="exp_avg"))
    [note] = commands
    assert isinstance(note, Note) and note.warning
    assert "worker 0's optimizer state on its backup, worker 1, differed in exp_avg before step 100" in note.text
    assert isinstance(running.state, Running)
    assert "that differed from their owners and were replaced: 1" in describe(
        running.state, lambda worker: 0, lambda worker: None
    )


def test_state_in_the_layout_of_an_unknown_plan_is_invalid(running: Director) -> None:
    running.send(exited(3, -9))
    strange = Holding(epoch=7, live=5, kept=(5,), wards={})
    for worker in (0, 1, 2):
        running.send(Settled(report=SettleReport(worker=worker, epoch=1, step=5, activity=5, holdings=(strange,))))
    assert stop_code(running) == ExitCode.STATE_INVALID


def test_layouts_older_than_the_last_recovery_are_left_out(running: Director) -> None:
    running = Director(make_job(pipeline=1, data=4)).start()
    first = plan_of(running)
    running.send(exited(3, -9))
    running.settle(1, [0, 1, 2], first)
    running.recover(1, [0, 1, 2])
    second = plan_of(running)
    running.send(exited(2, -9))
    for worker in (0, 1):
        holdings = (*make_report(worker, 2, second).holdings, *make_report(worker, 2, first).holdings)
        running.send(Settled(report=SettleReport(worker=worker, epoch=2, step=5, activity=5, holdings=holdings)))
    [(_, recover)] = told(running.commands, Recover)[1:]
    assert recover.settlement.base_epoch == 1


@pytest.mark.parametrize("code", [ExitCode.STATE_INVALID, 16, 17])
def test_a_failure_that_nobody_can_mend_ends_the_job_with_its_code(running: Director, code: int) -> None:
    """16 and 17 are Megatron's own: it ends the run to be started again, or because of a wrong result."""
    commands = running.send(Failed(worker=2, exit_code=code, sentence="shards differ"))
    assert [command.message.exit_code for command in commands if isinstance(command, TellAgent)] == [code]
    assert running.state.sentence == "worker 2: shards differ"
    end = end_of(running.send(*(exited(worker, code) for worker in range(4))))
    assert end is not None and end.exit_code == code


def test_messages_of_lost_workers_change_nothing(running: Director) -> None:
    old = plan_of(running)
    running.send(WorkerSilent(worker=3, silent_s=9.0))
    before = running.state
    running.send(
        Settled(report=make_report(3, 1, old)),
        Failed(worker=3, exit_code=4, sentence="late"),
        Finished(worker=3),
        PeerUnreachable(worker=3, epoch=1, peer=0, detail="late"),
        WorkerSilent(worker=3, silent_s=19.0),
    )
    assert running.state == before


def test_duplicates_are_ignored_with_a_note(running: Director) -> None:
    old = plan_of(running)
    running.send(exited(3, -9))
    running.settle(1, [0], old)
    before = running.state
    commands = running.settle(1, [0], old) + running.send(exited(3, -9))
    assert running.state == before
    assert all(isinstance(command, Note) for command in commands)


def test_a_fault_that_was_announced_dates_the_loss_whenever_the_news_comes(running: Director) -> None:
    fired = FaultFired(worker=3, fault="kill:worker=3@step=5,phase=between", at_s=99.5)
    early = Director(running.job).start()
    early.send(fired, exited(3, -9))
    running.send(exited(3, -9), fired)
    for director in (early, running):
        assert director.state.outage.losses[0].fault_s == 99.5


def test_a_spare_is_asked_to_settle_too() -> None:
    director = Director(make_job(pipeline=1, data=2, tensor=2)).start()
    old = plan_of(director)
    [(workers, _)] = told(director.send(exited(3, -9)), Quiesce)
    assert workers == (0, 1, 2)
    [(workers, recover)] = told(director.settle(1, [0, 1, 2], old), Recover)
    assert workers == (0, 1, 2) and recover.plan.placement.spares == (2,)


# ---------------------------------------------------------------- the end


def test_the_job_is_done_when_all_survivors_finished_and_left(running: Director) -> None:
    old = plan_of(running)
    running.send(exited(3, -9))
    running.settle(1, [0, 1, 2], old)
    running.recover(1, [0, 1, 2])
    for worker in (0, 1, 2):
        assert end_of(running.commands) is None
        running.send(Finished(worker=worker), exited(worker, 0))
    end = end_of(running.commands)
    assert end is not None and (end.exit_code, end.sentence) == (0, "")


def test_a_worker_that_leaves_with_zero_before_the_end_is_lost(running: Director) -> None:
    running.send(exited(1, 0))
    assert running.state.roster.lost[1].detail == "exited with status 0 before the end of training"


def test_a_finished_worker_counts_as_recovered(running: Director) -> None:
    old = plan_of(running)
    running.send(exited(3, -9))
    running.settle(1, [0, 1, 2], old)
    running.recover(1, [0, 1])
    commands = running.send(Finished(worker=2))
    assert isinstance(running.state, Running)
    assert any(isinstance(command, ShowRecovery) for command in commands)


def test_a_loss_after_somebody_finished_lets_the_others_go(running: Director) -> None:
    running.send(Finished(worker=0), exited(0, 0))
    [(workers, stop)] = told(running.send(exited(1, -9)), Stop)
    assert workers == (2, 3) and stop.exit_code == 0
    assert not told(running.commands, Quiesce)
    end = end_of(running.send(exited(2, 0), exited(3, 0)))
    assert end is not None and end.exit_code == 0


def test_a_worker_that_had_finished_before_it_heard_of_a_loss_ends_the_recovery(running: Director) -> None:
    running.send(exited(1, -9))
    [(workers, _)] = told(running.send(Finished(worker=0)), Stop)
    assert workers == (2, 3)
    end = end_of(running.send(exited(0, 0), exited(2, 0), exited(3, 0)))
    assert end is not None and end.exit_code == 0


def test_an_agent_that_is_gone_takes_its_workers_with_it_in_one_epoch() -> None:
    director = Director(make_job(pipeline=2, data=4), nnodes=4).start()
    [(workers, quiesce)] = told(director.send(AgentLost(node=1)), Quiesce)
    assert workers == (0, 1, 4, 5, 6, 7) and quiesce.epoch == 1
    assert [(loss.worker, loss.reason) for loss in quiesce.lost] == [(2, LossReason.EXITED), (3, LossReason.EXITED)]


def test_a_node_that_does_not_answer_is_lost_in_one_epoch_and_its_workers_are_told_to_end() -> None:
    director = Director(make_job(pipeline=1, data=4), nnodes=2).start()
    commands = director.send(AgentLost(node=1, silent_s=10.2))
    [(workers, quiesce)] = told(commands, Quiesce)
    assert workers == (0, 1) and [loss.reason for loss in quiesce.lost] == [LossReason.SILENT] * 2
    assert quiesce.lost[0].detail == "node 1 did not answer for 10.2 s"
    [(workers, end)] = told(commands, Stop)
    assert workers == (2, 3) and end.exit_code == ExitCode.CUT_OFF
    assert not director.send(AgentLost(node=1))[:-1], "its connection ends later: no second loss"
    assert isinstance(director.state, Settling) and director.state.epoch == 1


def test_stopping_ends_when_the_agents_are_gone_even_if_workers_were_not_reported(running: Director) -> None:
    running.send(Terminate(signum=signal.SIGTERM))
    end = end_of(running.send(AgentLost(node=0)))
    assert end is not None and end.exit_code == 143


def test_the_first_reason_to_stop_is_kept(running: Director) -> None:
    running.send(Failed(worker=2, exit_code=4, sentence="first"), Terminate(signum=signal.SIGTERM))
    assert stop_code(running) == 4


def test_spares_are_let_go_when_every_worker_with_a_seat_has_finished() -> None:
    running = Director(make_job(pipeline=1, data=2, tensor=2)).start()
    old = plan_of(running)
    running.send(exited(3, -9))
    running.settle(1, [0, 1, 2], old)
    running.recover(1, [0, 1, 2], first_step=101.0)
    assert plan_of(running).placement.spares == (2,)
    assert not told(running.send(Finished(worker=0)), Stop), "a spare must stay for as long as it may be needed"
    assert [(workers, message.exit_code) for workers, message in told(running.send(Finished(worker=1)), Stop)] == [
        ((2,), ExitCode.FINISHED)
    ]
    running.send(exited(0, 0), exited(1, 0), exited(2, 0))
    assert isinstance(running.state, Ended) and running.state.exit_code == ExitCode.FINISHED


def test_a_spare_that_recovers_after_everybody_else_has_finished_is_let_go_too() -> None:
    running = Director(make_job(pipeline=1, data=3, tensor=2)).start()
    old = plan_of(running)
    running.send(exited(0, -9))
    running.settle(1, [1, 2, 3, 4, 5], old)
    running.recover(1, [2, 3, 4, 5], first_step=101.0)
    for worker in (2, 3, 4, 5):
        running.send(Finished(worker=worker), exited(worker, 0))
    commands = running.recover(1, [1], restore=101.0)
    assert [(workers, message.exit_code) for workers, message in told(commands, Stop)] == [((1,), ExitCode.FINISHED)]


def test_the_end_tells_steps_losses_and_the_faults_that_never_struck(job: JobSpec) -> None:
    early, late, never = (f"kill:worker={worker}@step={step},phase=norm" for worker, step in ((3, 5), (3, 90), (1, 90)))
    director = Director(job)
    hellos = [make_hello(worker, job) for worker in range(4)]
    hellos[3], hellos[1] = (
        msgspec.structs.replace(hellos[worker], faults=own) for worker, own in ((3, (early, late)), (1, (never,)))
    )
    director.send(AgentHello(node=0, host="here", workers=(0, 1, 2, 3)), *hellos)
    plan = plan_of(director)
    [(workers, _)] = told(director.send(Inject(worker=2, fault="stop:worker=2@step=90,phase=save")), Inject)
    assert workers == (2,)
    director.send(FaultFired(worker=3, fault=early, at_s=99.5), exited(3, -signal.SIGKILL))
    director.settle(1, (0, 1, 2), plan)
    director.recover(1, (0, 1, 2))
    status = describe(director.state, lambda worker: 7, lambda worker: 0.1).splitlines()
    waiting = f"{never}, {late}, stop:worker=2@step=90,phase=save"
    assert f"scripted faults that have not struck: {waiting}" in status
    assert end_well(director, 12) == EndJob(
        exit_code=0, sentence="", steps=12, lost=1, unstruck=(never, late, "stop:worker=2@step=90,phase=save")
    )
