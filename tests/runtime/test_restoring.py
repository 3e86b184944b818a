"""Optimizer state that moves beside the first step after a loss, with sessions on threads: what is on its way counts
nowhere before it is complete, and every survivor ends with the state of an undisturbed run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_elas.planner.plan import initial_plan, replan
from megatron_elas.runtime import restoring
from megatron_elas.runtime.replicator import Replicator
from megatron_elas.runtime.snapshots import SnapshotMode
from megatron_elas.spec.errors import StateInvalid
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.moves import Move
from megatron_elas.spec.remap import keeps_model
from megatron_elas.spec.transaction import StepPhase
from tests.runtime.jobs import PATIENCE_S, Job, ToyWorker, check_end, job_of, value_of
from tests.runtime.workers import wait_until

STEPS = 6
AT = 2
"""The step in which the first worker is lost."""

both_modes = pytest.mark.parametrize("mode", list(SnapshotMode))


class Gate:
    """Holds moves and new copies up on some workers, from epoch 1 on, until it is opened or the epoch ends."""

    def __init__(
        self, job: Job, monkeypatch: pytest.MonkeyPatch, *, moves: Sequence[int], seeds: Sequence[int]
    ) -> None:
        self.open = threading.Event()
        self.reached: set[tuple[str, int]] = set()
        """What was held up, and where."""
        self._job = job
        real_moves, real_exchange = restoring.apply_moves, Replicator._exchange
        owners = {id(worker.transport): worker for worker in job.workers}

        def apply_moves(plan: Sequence[Move], me: int, *args: Any) -> int:
            if me in moves:
                self._hold("moves", job.workers[me])
            return real_moves(plan, me, *args)

        def exchange(replicator: Replicator, store: Any, version: int, renew: bool) -> None:
            worker = owners[id(replicator._transport)]
            if renew and worker.id in seeds:
                self._hold("seeds", worker)
            real_exchange(replicator, store, version, renew)

        monkeypatch.setattr(restoring, "apply_moves", apply_moves)
        monkeypatch.setattr(Replicator, "_exchange", exchange)

    def _hold(self, what: str, worker: ToyWorker) -> None:
        if self._job.epoch == 1:
            with self._job.changed:
                self.reached.add((what, worker.id))
                self._job.changed.notify_all()
                done = self._job.changed.wait_for(lambda: self.open.is_set() or worker.transport.cancelled, PATIENCE_S)
            assert done, f"{what} of worker {worker.id} were waited for where they should not be"

    def let_go(self) -> None:
        """Open it."""
        with self._job.changed:
            self.open.set()
            self._job.changed.notify_all()

    def wait(self, *held: tuple[str, int]) -> None:
        """Until these are held up."""
        with self._job.changed:
            assert self._job.changed.wait_for(lambda: self.reached >= set(held), PATIENCE_S), self.reached


def after_recovery(worker: ToyWorker, phase: str, step: int, act: Callable[[], None]) -> None:
    """Act there when the worker comes there in epoch 1, and not before."""

    def look() -> None:
        if worker.session.plan.epoch == 1:
            act()
        else:
            worker.hooks[phase, step] = look

    worker.hooks[phase, step] = look


def lose_first(job: Job, worker: int, phase: str = "backward", step: int = AT) -> None:
    """Lose the worker there, when all others are where it is: in the step, or behind it."""
    victim = job.workers[worker]
    others = [other for other in job.workers if other is not victim]

    def are_here() -> bool:
        if phase == "between":
            return all(other.session._running is None and other.session._activity > step for other in others)
        here = all(other.session._running == step for other in others)
        return here and (job.mode is SnapshotMode.REPLAY or holds_copy(job, worker, step))

    def vanish() -> None:
        wait_until(are_here)
        victim.vanish()

    victim.hooks[phase, step] = vanish


def knows_norm(worker: ToyWorker) -> bool:
    """Whether it knows the norm of step ``AT``."""
    state = worker.session._state
    assert state is not None
    behind = state.live is not None and state.live > AT
    return state.plan.epoch == 1 and (behind or worker.session._phase not in (StepPhase.COMPUTE, StepPhase.REDUCE))


def holds_copy(job: Job, owner: int, version: int) -> bool:
    """Whether all backups have all of the owner's copy of the version, and it all of its own wards'."""
    states = {worker.id: worker.session._state for worker in job.workers}
    return all(
        version in states[backup].store.wards[ward].held  # type: ignore[union-attr]
        for ward, backup in job.plan.backups
    )


@both_modes
def test_the_first_step_after_a_loss_runs_while_state_moves(
    mode: SnapshotMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job_of(tmp_path, rows=4, mode=mode, lazy=False) as job:
        gate = Gate(job, monkeypatch, moves=[0, 1, 3], seeds=[])
        together = threading.Barrier(3, action=gate.let_go)
        for worker in (0, 1, 3):
            after_recovery(job.workers[worker], "reduce", AT, lambda: together.wait(PATIENCE_S) and None)
        lose_first(job, 2, "snapshot")  # all are in the barrier of the step or past it
        job.run(steps=STEPS)
        check_end(job, STEPS)
        assert gate.reached == {("moves", 0), ("moves", 1), ("moves", 3)}
        assert job.orders[1].settlement.parameters_whole
        reports = job.recovered[1]
        assert len(reports) == 3 and all(report.background_s > 0 for report in reports)
        assert sum(report.moved_bytes for report in reports) > 0


def test_state_is_in_its_place_before_the_step_when_that_is_asked_for(tmp_path: Path) -> None:
    with job_of(tmp_path, rows=4, lazy=False, beside=False) as job:
        lose_first(job, 2, "snapshot")
        job.run(steps=STEPS)
        check_end(job, STEPS)
        assert job.orders[1].settlement.parameters_whole
        assert all(report.background_s == 0 for report in job.recovered[1])
        assert sum(report.moved_bytes for report in job.recovered[1]) > 0


@both_modes
@pytest.mark.parametrize("phase", ["forward", "backward", "reduce"])
@pytest.mark.parametrize("held", ["moves", "seeds"])
@pytest.mark.parametrize("second", [0, 2])
def test_a_second_worker_is_lost_while_state_moves(
    second: int, held: str, phase: str, mode: SnapshotMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 3 is lost, whose copy 0 has, and then it is: with two copies of each. 2 sends and gets parts, and keeps 1's copy.
    with job_of(tmp_path, rows=4, copies=2, mode=mode, lazy=False) as job:
        everybody = [0, 1, 2]
        gate = Gate(job, monkeypatch, **{"moves": [], "seeds": [], held: everybody})
        victim = job.workers[second]

        def vanish() -> None:
            gate.wait(*((held, worker) for worker in everybody))
            victim.vanish()

        after_recovery(victim, phase, AT, vanish)
        lose_first(job, 3, "snapshot")
        job.run(steps=STEPS)
        assert job.lost == {second, 3} and gate.reached == {(held, worker) for worker in everybody}
        check_end(job, STEPS)
        first, then = job.orders[1].settlement, job.orders[2].settlement
        assert first.parameters_whole and then.parameters_whole
        assert (then.base_epoch, then.resume_step) == (0, AT), "a layout that was not complete was taken for one"
        for report in job.reports[2].values():
            assert [holding.epoch for holding in report.holdings] == [0]
        assert not gate.open.is_set()


@both_modes
@pytest.mark.parametrize("phase", ["snapshot", "norm", "optimizer", "gather", "stepped"])
@pytest.mark.parametrize("second", [0, 2])
def test_a_second_worker_is_lost_at_the_end_of_the_first_step_after(
    second: int, phase: str, mode: SnapshotMode, tmp_path: Path
) -> None:
    with job_of(tmp_path, rows=4, copies=2, mode=mode, lazy=False) as job:
        victim = job.workers[second]
        others = [other for other in job.workers if other.id not in (second, 3)]

        def vanish() -> None:
            if phase in ("gather", "stepped"):  # what only the victim knows would be lost with it
                wait_until(lambda: any(knows_norm(other) for other in others))
            victim.vanish()

        after_recovery(victim, phase, AT, vanish)
        lose_first(job, 3, "snapshot")
        job.run(steps=STEPS)
        assert job.lost == {second, 3}
        check_end(job, STEPS)
        assert job.orders[1].settlement.parameters_whole
        assert all(report.background_s > 0 for report in job.recovered[1])
        if mode is SnapshotMode.REPLAY and phase in ("gather", "stepped"):
            settlement = job.orders[2].settlement
            assert (settlement.base_epoch, settlement.resume_step) == (1, AT + 1)
        if mode is SnapshotMode.REPLAY and phase in ("snapshot", "norm"):
            assert job.orders[2].settlement.resume_step == AT


def end_with(step: int, act: Callable[[ToyWorker, int], None]) -> Callable[[ToyWorker, int], None]:
    def between(worker: ToyWorker, at: int) -> None:
        if at == step:
            act(worker, at)

    return between


@both_modes
@pytest.mark.parametrize("what", ["evaluate", "save"])
@pytest.mark.parametrize("place", ["between", "inside"])
def test_what_runs_between_steps_after_a_recovery_waits_for_the_state(
    place: str, what: str, mode: SnapshotMode, tmp_path: Path
) -> None:
    with job_of(tmp_path, mode=mode, lazy=False) as job:
        if place == "between":
            lose_first(job, 2, "between")
        else:
            victim = job.workers[2]

            def vanish() -> None:  # all others are out of the step, too
                wait_until(lambda: all(worker.session._running is None for worker in job.workers))
                victim.vanish()

            victim.hooks[what, AT] = vanish
        whole: dict[int, bool] = {}

        def note(worker: ToyWorker) -> Callable[[], None]:
            def look() -> None:
                if worker.session.plan.epoch == 0:
                    worker.hooks[what, AT] = look
                else:
                    whole[worker.id] = bool((worker.shard[:-1] == value_of(AT + 1)).all())

            return look

        for worker in (0, 1):
            job.workers[worker].hooks[what, AT] = note(job.workers[worker])
        job.run(steps=STEPS, between=end_with(AT, getattr(ToyWorker, what)))
        assert job.lost == {2}
        check_end(job, STEPS)
        if mode is SnapshotMode.REPLAY:
            assert job.orders[1].settlement.parameters_whole
            assert whole == {0: True, 1: True}
            assert all(report.background_s > 0 for report in job.recovered[1])


@both_modes
def test_a_worker_lost_at_the_end_of_training_leaves_complete_state(mode: SnapshotMode, tmp_path: Path) -> None:
    with job_of(tmp_path, mode=mode, lazy=False) as job:
        lose_first(job, 2, "between", STEPS - 1)
        job.run(steps=STEPS)
        check_end(job, STEPS)
        assert len(job.recovered[1]) == 2
        if mode is SnapshotMode.REPLAY:  # with copies the last step is run again, from older parameters
            assert all(report.background_s > 0 for report in job.recovered[1])


@both_modes
def test_workers_are_lost_in_every_step_down_to_one(mode: SnapshotMode, tmp_path: Path) -> None:
    with job_of(tmp_path, rows=4, mode=mode, lazy=False) as job:
        for step, worker, phase in ((1, 3, "reduce"), (2, 0, "backward"), (4, 2, "forward")):
            job.workers[worker].hooks[phase, step] = job.workers[worker].vanish
        job.run(steps=STEPS)
        assert job.survivors == [1]
        check_end(job, STEPS)


@pytest.mark.parametrize("phase", ["forward", "backward", "gather"])
def test_parameters_that_were_not_gathered_are_restored_before_the_step(phase: str, tmp_path: Path) -> None:
    with job_of(tmp_path, lazy=phase == "forward") as job:
        if phase == "gather":
            job.workers[2].hooks[phase, AT] = job.workers[2].vanish
        else:
            lose_first(job, 2, phase)
        job.run(steps=STEPS)
        check_end(job, STEPS)
        beside = phase == "backward"
        assert job.orders[1].settlement.parameters_whole == beside
        assert all((report.background_s > 0) == beside for report in job.recovered[1])


def test_masters_that_are_not_those_of_the_parameters_end_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = restoring.apply_moves

    def apply_moves(moves: Sequence[Move], me: int, sources: Any, target: Any, *more: Any) -> int:
        sent = real(moves, me, sources, target, *more)
        if me == 1:
            target[0] += 1
        return sent

    monkeypatch.setattr(restoring, "apply_moves", apply_moves)
    with job_of(tmp_path, lazy=False) as job:
        lose_first(job, 2)
        with pytest.raises(StateInvalid, match="the check of replicas failed before step 2"):
            job.run(steps=STEPS)
        assert not job.recovered[1]


def test_a_worker_keeps_its_model_with_its_layers_and_lane() -> None:
    job = JobSpec(
        tensor_parallel=1, pipeline_parallel=3, data_parallel=2, micro_batch_size=1, num_microbatches=4,
        stage_layers=(2, 2, 2), snapshot_replicas=1,
    )  # fmt: skip
    base = initial_plan(job, {})
    smaller = replan(job, base, [1], 1, {})
    assert [worker for worker in range(6) if keeps_model(base, smaller, worker)] == [0, 2, 3, 4, 5]
    fewer = replan(job, base, [0, 1, 2], 1, {})  # one stage is lost
    assert not all(keeps_model(base, fewer, worker) for worker in fewer.placement.workers)
