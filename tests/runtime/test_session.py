"""The step as a transaction, with sessions on threads: every survivor ends with the state of an undisturbed run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_elas.runtime.replicator import Replicator
from megatron_elas.runtime.snapshots import SnapshotMode
from megatron_elas.spec.errors import EpochChanged, StateInvalid
from megatron_elas.spec.transaction import StepPhase, Update
from tests.runtime.jobs import PATIENCE_S, Job, ToyWorker, check_end, job_of, value_of
from tests.runtime.workers import wait_until

STEPS = 6


def evaluate_after(*steps: int):
    """What to do between steps: an evaluation after these."""

    def between(worker: ToyWorker, step: int) -> None:
        if step in steps:
            worker.evaluate(step)

    return between


def evaluations(job: Job) -> dict[int, float]:
    """The last value of every evaluation, the same on all survivors."""
    found = [dict(job.workers[worker].evaluated) for worker in job.survivors]
    assert all(values == found[0] for values in found), found
    return found[0]


def cut_in_barrier(worker: ToyWorker, calls: int) -> None:
    """Let the worker's barrier of this number be passed by all others and be cut short here, once the epoch ends."""
    real, count = worker.communicator.barrier, [0]

    def barrier() -> None:
        count[0] += 1
        real()
        if count[0] == calls:
            wait_for_the_end(worker)
            raise EpochChanged("cut short in the barrier that the others have left")

    worker.communicator.barrier = barrier  # type: ignore[method-assign]


def cut_in_norm(worker: ToyWorker, step: int) -> None:
    """Let the worker's norm of this step be known to all others and be cut short here, once the epoch ends."""
    real = worker.communicator.all_gather_rows

    def all_gather_rows(row):
        rows = real(row)
        if worker.session._running == step and worker.session._phase is StepPhase.REDUCE:
            wait_for_the_end(worker)
            raise EpochChanged("cut short in the norm that others know")
        return rows

    worker.communicator.all_gather_rows = all_gather_rows  # type: ignore[method-assign]


def lose_before_the_order(job: Job, worker: int) -> None:
    """Lose the worker once the epoch is settled, before those who wait for the order have looked at it."""
    job.wait(lambda: job.orders.get(1), "the order of epoch 1")
    job.workers[worker].fall_silent()


def vanish_after(event: threading.Event, worker: ToyWorker) -> Callable[[], None]:
    """A hook in which the worker is lost, but not before the event."""

    def vanish() -> None:
        assert event.wait(PATIENCE_S)
        worker.vanish()

    return vanish


def holds_copy(job: Job, owner: int, version: int) -> bool:
    """Whether the owner's backup has all of its copy of the version."""
    backup = job.plan.backup_of(owner)
    assert backup is not None
    state = job.workers[backup].session._state
    return state is not None and version in state.store.wards[owner].held


def wait_for_the_end(worker: ToyWorker) -> None:
    """Of the epoch."""
    worker.job.wait(lambda: worker.transport.cancelled, "that the epoch has ended")


FIRST_END = 3
"""Barriers of a worker: one after the first copies, then in every step two of the toy's own."""


def end_of(step: int) -> int:
    """Number of the barrier that ends this step, without evaluations before it; logging has none."""
    return FIRST_END + 2 * step


both_modes = pytest.mark.parametrize("mode", list(SnapshotMode))


def test_an_undisturbed_job_runs_every_step_once(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        job.run(steps=STEPS, between=evaluate_after(2))
        check_end(job, STEPS)
        assert evaluations(job) == {2: value_of(3)}
        assert all(worker.steps_run == list(range(STEPS)) for worker in job.workers)


@both_modes
@pytest.mark.parametrize("step", [0, 1, 3, STEPS - 1])
@pytest.mark.parametrize(
    "phase", ["forward", "reduce", "snapshot", "norm", "optimizer", "gather", "commit", "between", "log"]
)
def test_a_worker_lost_at_any_place_of_a_step_is_made_up_for(
    phase: str, step: int, mode: SnapshotMode, tmp_path: Path
) -> None:
    with job_of(tmp_path, mode=mode) as job:
        job.workers[2].hooks[phase, step] = job.workers[2].vanish
        job.run(steps=STEPS, between=ToyWorker.log)
        assert job.lost == {2}
        check_end(job, STEPS)
        assert all(job.workers[worker].logged == list(range(STEPS)) for worker in job.survivors)
        if mode is SnapshotMode.REPLAY:
            resumed = [order.settlement.resume_step for order in job.orders.values()]
            committed = resumed == [step + 1]
            assert committed or resumed == [step]
            if phase not in ("optimizer", "gather"):  # in which the lost worker alone may know the norm, or others too
                assert committed == (phase in ("commit", "between", "log"))
            for worker in job.survivors:
                runs = job.workers[worker].steps_run
                assert sorted(set(runs)) == list(range(STEPS))
                again = 0 if committed else (runs.count(step), runs.count(step) - 1)[1]
                assert len(runs) == STEPS + again, "a step was run again that had been committed"


def test_a_step_commits_when_one_survivor_knows_the_norm_and_the_others_do_not(tmp_path: Path) -> None:
    with job_of(tmp_path, stages=2, rows=2) as job:
        prepared = threading.Event()
        for cut in (1, 2):  # of both stages; worker 1 is the backup of 0
            cut_in_norm(job.workers[cut], 3)
        job.workers[0].hooks["gather", 3] = lambda: (prepared.set(), wait_for_the_end(job.workers[0]))
        job.workers[3].hooks["optimizer", 3] = vanish_after(prepared, job.workers[3])
        job.run(steps=STEPS, between=ToyWorker.log)
        check_end(job, STEPS)
        order = job.orders[1].settlement
        assert order.resume_step == 4 and order.commit == Update.of(3, norm=3.0)
        phases = {worker: report.phase for worker, report in job.reports[1].items()}
        assert phases == {0: StepPhase.SYNC, 1: StepPhase.REDUCE, 2: StepPhase.REDUCE}
        for worker in job.survivors:
            assert job.workers[worker].steps_run == list(range(STEPS)), "a committed step was run again"
            assert job.workers[worker].logged == list(range(STEPS))


def test_a_step_whose_norm_nobody_knows_is_dropped(tmp_path: Path) -> None:
    with job_of(tmp_path, stages=2, rows=2) as job:
        job.workers[3].hooks["norm", 3] = job.workers[3].vanish
        job.run(steps=STEPS)
        check_end(job, STEPS)
        settlement = job.orders[1].settlement
        assert settlement.resume_step == 3 and (settlement.commit is None or settlement.commit.step == 2)
        assert {report.phase for report in job.reports[1].values()} <= {StepPhase.COMPUTE, StepPhase.REDUCE}
        assert all(job.workers[worker].steps_run == [0, 1, 2, 3, 3, 4, 5] for worker in job.survivors)


def test_a_decision_to_commit_is_kept_when_the_only_one_who_knew_the_norm_is_lost_next(tmp_path: Path) -> None:
    with job_of(tmp_path, rows=4) as job:
        prepared = threading.Event()
        for cut in (1, 3):
            cut_in_norm(job.workers[cut], 3)
        job.workers[0].hooks["gather", 3] = lambda: (prepared.set(), wait_for_the_end(job.workers[0]))
        job.workers[2].hooks["optimizer", 3] = vanish_after(prepared, job.workers[2])
        # Worker 0 is lost when the decision is made and nobody has heard of it.
        job.workers[1].hooks["settled", 1] = lambda: lose_before_the_order(job, 0)
        job.run(steps=STEPS)
        check_end(job, STEPS)
        assert job.lost == {0, 2}
        assert job.orders[2].settlement.commit == Update.of(3, norm=3.0)
        assert all(job.workers[worker].steps_run == list(range(STEPS)) for worker in job.survivors)


def test_a_backup_that_is_lost_with_the_step_open_leaves_the_owner_to_seed_another(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        backup = job.plan.backup_of(0)
        assert backup is not None
        job.workers[backup].hooks["gather", 2] = job.workers[backup].vanish
        owner = 0
        job.workers[owner].hooks["forward", 4] = job.workers[owner].vanish
        job.run(steps=STEPS)
        assert job.lost == {owner, backup}
        check_end(job, STEPS)


def test_replayed_copies_are_those_of_the_owners(tmp_path: Path) -> None:
    with job_of(tmp_path, stages=2, rows=2) as job:
        job.run(steps=STEPS)
        for worker in job.workers:
            state = worker.session._state
            assert state is not None and state.store.own.held == (), "an owner keeps a copy of its own shard"
            for ward, copies in state.store.wards.items():
                assert copies.held == (STEPS,)
                assert torch.equal(copies.get(STEPS), job.workers[ward].shard)


def test_an_update_that_was_cut_off_half_way_is_undone(tmp_path: Path) -> None:
    with job_of(tmp_path, stages=2, rows=2, mode=SnapshotMode.COPY) as job:
        # Worker 0, of the stage that loses nobody, has changed its shard and not yet ended the step.
        changed = threading.Event()

        def wait_there() -> None:
            wait_until(lambda: holds_copy(job, 3, 3))  # or all would go one step back
            changed.set()
            wait_for_the_end(job.workers[0])

        job.workers[0].hooks["optimizer", 3] = wait_there
        job.workers[3].hooks["optimizer", 3] = vanish_after(changed, job.workers[3])
        job.run(steps=STEPS)
        check_end(job, STEPS)
        assert job.workers[0].steps_run == [0, 1, 2, 3, 3, 4, 5]


def test_nobody_gives_up_an_older_version_before_the_newer_copies_of_all_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job_of(tmp_path, mode=SnapshotMode.COPY) as job:
        victim, ahead = job.workers[2], threading.Event()
        real = Replicator._exchange

        def exchange(replicator: Replicator, store, version: int, renew: bool) -> None:
            if replicator is getattr(victim.session._pool, "_replicator", None) and version == 3:
                job.wait(lambda: job.lost, "that the worker is lost")  # so its copies of version 3 never leave
            real(replicator, store, version, renew)

        def vanish() -> None:
            assert not ahead.wait(0.3), "worker 1 began step 4 while a copy of version 3 was missing at worker 0"
            victim.vanish()

        monkeypatch.setattr(Replicator, "_exchange", exchange)
        job.workers[1].hooks["snapshot", 4] = ahead.set  # by then it has written over its version 2
        victim.hooks["snapshot", 3] = vanish
        job.run(steps=STEPS)
        check_end(job, STEPS)
        assert [order.settlement.resume_step for order in job.orders.values()] == [2]


def test_copies_that_had_not_arrived_take_all_one_step_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with job_of(tmp_path, mode=SnapshotMode.COPY) as job:
        victim, held = job.workers[2], threading.Event()
        real = Replicator._exchange

        def exchange(replicator: Replicator, store, version: int, renew: bool) -> None:
            if replicator is getattr(victim.session._pool, "_replicator", None) and version == 3:
                held.wait(PATIENCE_S)  # its copies of version 3 leave only after its end: never
            real(replicator, store, version, renew)

        monkeypatch.setattr(Replicator, "_exchange", exchange)

        def vanish() -> None:
            try:
                victim.vanish()
            finally:
                held.set()

        victim.hooks["forward", 3] = vanish
        job.run(steps=STEPS)
        check_end(job, STEPS)
        assert [order.settlement.resume_step for order in job.orders.values()] == [2]
        for worker in job.survivors:
            assert job.workers[worker].steps_run[:6] in ([0, 1, 2, 2, 3, 4], [0, 1, 2, 3, 2, 3])


def test_nobody_begins_the_first_step_before_all_first_copies_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job_of(tmp_path) as job:
        slow, began = job.workers[0], threading.Event()
        real = Replicator._exchange

        def exchange(replicator: Replicator, store, version: int, renew: bool) -> None:
            if replicator is getattr(slow.session._pool, "_replicator", None) and version == 0:
                assert not began.wait(0.3), "a forward pass began while a copy was still missing"
            real(replicator, store, version, renew)

        monkeypatch.setattr(Replicator, "_exchange", exchange)
        job.workers[2].hooks["forward", 0] = began.set
        job.run(steps=2)
        check_end(job, 2)


def test_a_worker_that_others_have_left_behind_logs_alone_while_they_are_in_the_next_step(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        # Worker 0 is in the log of step 2 when the epoch ends, worker 1 in the commit before. Then both run step 3.
        cut_in_barrier(job.workers[1], end_of(2))
        ahead = threading.Event()
        job.workers[0].hooks["log", 2] = ahead.set
        job.workers[2].hooks["log", 2] = vanish_after(ahead, job.workers[2])
        job.run(steps=STEPS, between=ToyWorker.log)
        check_end(job, STEPS)
        assert job.orders[1].settlement.lead_activity == 3 and job.reports[1][1].activity == 2
        assert all(job.workers[worker].logged == list(range(STEPS)) for worker in job.survivors)


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("evaluated", [True, False], ids=["then-evaluate", "then-step"])
def test_a_worker_cut_off_in_a_barrier_that_others_have_left_joins_them_again(
    evaluated: bool, step: int, tmp_path: Path
) -> None:
    with job_of(tmp_path) as job:
        cut_in_barrier(job.workers[1], end_of(step))
        job.workers[2].hooks["between", step] = job.workers[2].vanish
        job.run(steps=STEPS, between=evaluate_after(step) if evaluated else None)
        check_end(job, STEPS)
        assert evaluations(job) == ({step: value_of(step + 1)} if evaluated else {})


def test_a_worker_cut_off_in_the_last_barrier_of_training_joins_the_end(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        cut_in_barrier(job.workers[1], end_of(STEPS - 1))
        job.workers[2].hooks["between", STEPS - 1] = job.workers[2].vanish
        job.run(steps=STEPS)
        check_end(job, STEPS)


def test_an_evaluation_that_others_have_left_counts_for_the_one_cut_off_in_its_barrier(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        # After the commit of step 2 come the evaluation's own barrier and the one that ends it.
        cut_in_barrier(job.workers[1], end_of(2) + 2)
        ahead = threading.Event()
        job.workers[0].hooks["forward", 3] = ahead.set
        job.workers[2].hooks["forward", 3] = vanish_after(ahead, job.workers[2])
        job.run(steps=STEPS, between=evaluate_after(2))
        check_end(job, STEPS)
        assert evaluations(job) == {2: value_of(3)}
        assert [step for step, _ in job.workers[1].evaluated] == [2], "it was evaluated a second time"


@pytest.mark.parametrize("worker", [0, 1, 2])
def test_an_evaluation_cut_short_is_run_again_on_the_same_parameters(worker: int, tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        job.workers[worker].hooks["evaluate", 2] = job.workers[worker].vanish
        job.run(steps=STEPS, between=evaluate_after(2, 4))
        check_end(job, STEPS)
        assert evaluations(job) == {2: value_of(3), 4: value_of(5)}


def fail() -> None:
    raise OSError("no space left")


def save_after(*steps: int):
    """What to do between steps: a save after these."""

    def between(worker: ToyWorker, step: int) -> None:
        if step in steps:
            worker.save(step)

    return between


@pytest.mark.parametrize("failing", [(1,), (0, 1, 2)], ids=["one", "all"])
def test_a_save_that_fails_anywhere_is_left_out_by_all(failing: tuple[int, ...], tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        for worker in failing:
            job.workers[worker].hooks["save", 2] = fail
        job.run(steps=STEPS, between=save_after(2, 4))
        assert not job.lost and job.epoch == 1
        check_end(job, STEPS)
        for worker in job.workers:
            assert worker.unsaved == [2] and 4 in worker.saved
            assert worker.steps_run == list(range(STEPS)), "a step was run again for it"


def test_a_recovery_after_which_no_step_is_run_is_reported_too(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        job.workers[1].hooks["save", STEPS - 1] = fail
        job.run(steps=STEPS, between=save_after(STEPS - 1))
        check_end(job, STEPS)
        assert {report.worker for report in job.recovered[1]} == {0, 1, 2}
        assert all("first_step" not in report.marks_s for report in job.recovered[1])


def test_a_worker_that_comes_later_leaves_out_what_failed_before(tmp_path: Path) -> None:
    with job_of(tmp_path, stages=2, rows=2) as job:
        job.workers[1].hooks["save", 2] = fail
        job.workers[3].hooks["between", 2] = lambda: job.wait(lambda: job.epoch == 1, "that the save has failed")
        job.run(steps=STEPS, between=save_after(2))
        check_end(job, STEPS)
        assert [worker.unsaved for worker in job.workers] == [[2]] * 4
        assert [worker.saved for worker in job.workers] == [[]] * 4


@pytest.mark.parametrize("lost", [0, 1], ids=["another", "the-failing-one"])
def test_a_loss_in_the_recovery_from_a_failed_save_is_recovered_from(lost: int, tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        job.workers[1].hooks["save", 2] = fail
        job.workers[lost].hooks["recovery", 3] = job.workers[lost].vanish
        job.run(steps=STEPS, between=save_after(2))
        assert job.lost == {lost} and job.epoch == 2
        check_end(job, STEPS)
        outcomes = [(job.workers[worker].saved, job.workers[worker].unsaved) for worker in job.survivors]
        # If the failing worker is lost before anybody was told to do without the save, it is done without that worker.
        assert outcomes == [([], [2])] * 2 or (lost == 1 and outcomes == [([2], [])] * 2)


def test_an_error_that_a_save_makes_of_the_end_of_the_membership_is_no_failed_save(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        saving, (survivor, victim) = threading.Event(), (job.workers[0], job.workers[2])

        def end_with_another_error() -> None:
            saving.set()
            job.wait(lambda: survivor.transport.cancelled, "that the epoch has ended")
            raise OSError("what a writer may make of it")

        def vanish_then() -> None:
            assert saving.wait(PATIENCE_S)
            victim.vanish()

        survivor.hooks["save", 2], victim.hooks["save", 2] = end_with_another_error, vanish_then
        job.run(steps=STEPS, between=save_after(2))
        assert job.lost == {2} and job.epoch == 1
        check_end(job, STEPS)
        assert [job.workers[worker].saved for worker in job.survivors] == [[2], [2]]
        assert [job.workers[worker].unsaved for worker in job.survivors] == [[], []]


@pytest.mark.parametrize("second", [1, 3])
def test_a_second_worker_lost_during_the_recovery_is_recovered_from(second: int, tmp_path: Path) -> None:
    with job_of(tmp_path, rows=4) as job:
        # Workers 0 and 2 are lost, or 1 and 3: never an owner together with its backup.
        first = (second + 2) % 4
        job.workers[first].hooks["forward", 2] = job.workers[first].vanish
        for step in (1, 2):  # it may still have been in the barrier before
            job.workers[second].hooks["recovery", step] = job.workers[second].vanish
        job.run(steps=STEPS)
        assert job.lost == {first, second}
        check_end(job, STEPS)


@pytest.mark.parametrize("place", ["settled", "ordered", "write"])
def test_a_second_worker_lost_at_any_place_of_a_recovery_is_recovered_from(place: str, tmp_path: Path) -> None:
    with job_of(tmp_path, stages=2, rows=2) as job:
        cut, second = job.workers[0], job.workers[3]

        def lose_the_second() -> None:
            second.fall_silent()
            if place == "write":  # this worker's state is nothing now: rebuilt, and not yet written
                raise EpochChanged("cut short")

        copied = threading.Event()

        def wait_for_copies() -> None:
            wait_until(lambda: holds_copy(job, 1, 2) and holds_copy(job, 3, 2))
            copied.set()

        cut.hooks["forward", 2] = wait_for_copies  # so all go on from the version that they have in use
        job.workers[1].hooks["forward", 2] = vanish_after(copied, job.workers[1])
        cut.hooks[place, 1] = lose_the_second
        job.run(steps=STEPS)
        assert job.lost == {1, 3} and max(job.orders) == 2
        check_end(job, STEPS)


def test_losing_an_owner_and_its_backup_in_one_recovery_ends_the_job_instead_of_going_on_without_their_state(
    tmp_path: Path,
) -> None:
    with job_of(tmp_path) as job:
        backup = job.plan.backup_of(2)
        assert backup is not None
        job.workers[2].hooks["forward", 2] = job.workers[2].vanish
        job.workers[backup].hooks["ordered", 1] = job.workers[backup].vanish
        with pytest.raises(StateInvalid, match="no step's state is whole"):
            job.run(steps=STEPS)


def before_checks(worker: ToyWorker, act: Callable[[], None]) -> None:
    """Act before the first checks of a recovery, whichever step the worker's loop is in then."""
    acted: list[bool] = []

    def act_once() -> None:
        if not acted:
            acted.append(True)
            act()

    for step in range(STEPS + 1):
        worker.hooks["recovery-verify", step] = act_once


def test_an_owner_and_its_backup_lost_together_lead_back_to_the_checkpoint(tmp_path: Path) -> None:
    with job_of(tmp_path, rows=4) as job:
        backup = job.plan.backup_of(2)
        assert backup is not None
        job.workers[2].hooks["forward", 4] = job.workers[2].vanish
        job.workers[backup].hooks["ordered", 1] = job.workers[backup].vanish
        job.run(steps=STEPS, between=save_after(1))
        assert job.lost == {2, backup}
        check_end(job, STEPS)
        for worker in job.survivors:
            toy = job.workers[worker]
            assert toy.loaded == [2]
            first = [0, 1, 2, 3, 4] if 4 in toy.steps_run[:5] else [0, 1, 2, 3]  # it may be cut before it gets so far
            assert toy.steps_run == [*first, 2, 3, 4, 5], "steps since the checkpoint are run again"
            assert toy.saved == [1], "and nothing else is"


@pytest.mark.parametrize("lost", [0, 1])
def test_another_loss_while_a_checkpoint_is_read_leads_back_to_it_once_more(lost: int, tmp_path: Path) -> None:
    with job_of(tmp_path, rows=5) as job:
        backup = job.plan.backup_of(2)
        assert backup == 3
        job.workers[2].hooks["forward", 4] = job.workers[2].vanish
        job.workers[backup].hooks["ordered", 1] = job.workers[backup].vanish
        before_checks(job.workers[lost], job.workers[lost].vanish)
        job.run(steps=STEPS, between=save_after(1))
        assert job.lost == {2, backup, lost}
        check_end(job, STEPS)


def spoil_shard(worker: ToyWorker) -> Callable[[], None]:
    """A hook that changes one moment of the state in use."""

    def spoil() -> None:
        worker.shard[len(worker.shard) // 2] += 1

    return spoil


def test_a_shard_that_does_not_stand_the_checks_is_replaced_by_the_checkpoint(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        job.workers[2].hooks["forward", 3] = job.workers[2].vanish
        before_checks(job.workers[0], spoil_shard(job.workers[0]))
        job.run(steps=STEPS, between=save_after(1))
        assert [error.check for error in job.unverified] == ["contents"]
        assert "exp_avg in use on worker 0 is not what it got" in str(job.unverified[0])
        assert [job.workers[worker].loaded for worker in job.survivors] == [[2], [2]]
        check_end(job, STEPS)


def test_a_shard_that_does_not_stand_the_checks_ends_a_job_without_a_checkpoint(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        job.workers[2].hooks["forward", 3] = job.workers[2].vanish
        before_checks(job.workers[0], spoil_shard(job.workers[0]))
        with pytest.raises(StateInvalid, match="exp_avg in use on worker 0 is not what it got"):
            job.run(steps=STEPS)


def test_a_shard_that_does_not_stand_the_checks_is_restored_from_the_second_backup(tmp_path: Path) -> None:
    with job_of(tmp_path, rows=4, copies=2) as job:
        job.workers[2].hooks["forward", 3] = job.workers[2].vanish
        before_checks(job.workers[0], spoil_shard(job.workers[0]))
        job.run(steps=STEPS, between=save_after(1))
        assert [(error.check, error.another_source) for error in job.unverified] == [("contents", True)]
        backups = job.plan.backups_of(2)
        first, second = (dict(job.orders[epoch].settlement.holders)[2] for epoch in (1, 2))
        assert {first, second} == set(backups) and len(backups) == 2
        assert [job.workers[worker].loaded for worker in job.survivors] == [[], [], []], "no checkpoint is read"
        check_end(job, STEPS)


def test_a_copy_that_differs_from_its_owner_is_made_anew(tmp_path: Path) -> None:
    with job_of(tmp_path, stages=2, rows=2) as job:
        keeper = job.workers[1]

        def spoil() -> None:
            state = keeper.session._state
            assert state is not None
            copies = max(state.stores.items())[1][1].wards[0]
            copies.get(max(copies.held))[3] += 1

        job.workers[3].hooks["forward", 3] = job.workers[3].vanish
        before_checks(keeper, spoil)
        job.run(steps=STEPS)
        assert [error.mirrors for error in job.unverified] == [((0, 1),)]
        assert max(job.orders) == 2
        check_end(job, STEPS)


@pytest.mark.parametrize("mode", SnapshotMode)
@pytest.mark.parametrize("copies", [1, 2])
def test_a_copy_that_came_to_differ_is_found_while_training_goes_on_and_can_be_gone_on_from_then(
    copies: int, mode: SnapshotMode, tmp_path: Path
) -> None:
    with job_of(tmp_path, mode=mode, copies=copies, verify_interval=2) as job:
        owner = 2
        backup = job.plan.backup_of(owner)
        assert backup is not None
        keeper = job.workers[backup]

        def spoil() -> None:
            state, pool = keeper.session._state, keeper.session._pool
            assert state is not None and pool is not None
            pool.wait()  # whole copies on their way
            pool._end_following()
            kept = state.store.wards[owner]
            kept.get(max(kept.held))[1] += 0.5

        keeper.hooks["forward", 2] = spoil
        job.workers[owner].hooks["forward", 4] = job.workers[owner].vanish
        job.run(steps=STEPS)
        assert job.replaced == [(backup, owner, 2, "master")]
        check_end(job, STEPS)


def test_copies_that_do_not_differ_are_not_replaced(tmp_path: Path) -> None:
    with job_of(tmp_path, stages=2, rows=2, verify_interval=1) as job:
        job.workers[3].hooks["forward", 3] = job.workers[3].vanish
        job.run(steps=STEPS)
        assert job.replaced == []
        check_end(job, STEPS)


def test_a_cancelled_step_keeps_nothing_in_memory_while_others_are_waited_for(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        alive: list[object] = []
        job.workers[0].hooks["settled", 1] = lambda: alive.append(job.workers[0].activations())
        job.workers[2].hooks["forward", 2] = job.workers[2].vanish
        job.run(steps=STEPS)
        check_end(job, STEPS)
        assert alive == [None]


def test_workers_are_lost_one_after_the_other_down_to_one(tmp_path: Path) -> None:
    with job_of(tmp_path, rows=4) as job:
        for step, worker in ((1, 3), (2, 0), (4, 2)):
            job.workers[worker].hooks["forward", step] = job.workers[worker].vanish
        job.run(steps=STEPS)
        assert job.survivors == [1]
        check_end(job, STEPS)


def test_a_stage_that_lost_nobody_goes_on_with_the_layout_it_has(tmp_path: Path) -> None:
    with job_of(tmp_path, stages=2, rows=2) as job:
        job.workers[3].hooks["forward", 2] = job.workers[3].vanish
        job.run(steps=STEPS)
        check_end(job, STEPS)
        reports = {report.worker: report.moved_bytes for report in job.recovered[1]}
        assert reports.keys() == {0, 1, 2} and reports[0] == reports[1] == 0


def test_a_recovery_is_reported_with_the_marks_of_its_phases_in_order(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        job.workers[2].hooks["forward", 2] = job.workers[2].vanish
        job.run(steps=STEPS)
        for report in job.recovered[1]:
            marks = [
                report.marks_s[name]
                for name in ("quiesce", "settle", "groups", "restore", "rebuild", "verify", "first_step")
            ]
            assert marks == sorted(marks)
