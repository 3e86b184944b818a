"""Workers go over to other plans while everybody lives: all state that ends up anywhere is an undisturbed run's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch

from megatron_elas.spec.migration import MIGRATION_PHASES, MigrationMode
from megatron_elas.spec.transaction import Update
from tests.runtime.jobs import Job, ToyWorker, check_end, job_of

BOTH = pytest.mark.parametrize("mode", ["async", "blocking"])


def spans(*counts: int) -> tuple[tuple[int, int], ...]:
    """Layers of every stage, by how many each has."""
    return tuple(pairwise(accumulate(counts, initial=0)))


def order_in(job: Job, step: int, order: Callable[[], object], worker: int = 0) -> None:
    """Have the controller give an order while this worker is in the step."""
    job.workers[worker].hooks["forward", step] = lambda: (order(), None)[1]


def check_copies(job: Job, steps: int) -> None:
    """Every copy is what its owner has, and nobody keeps an older layout."""
    for worker in job.survivors:
        state = job.workers[worker].session._state
        assert state is not None
        assert list(state.stores) == [state.plan.epoch]
        for ward, copies in state.store.wards.items():
            assert torch.equal(copies.get(steps), job.workers[worker].expected_shard(state.plan, steps, ward))


def check_migrated(job: Job, epoch: int, mode: MigrationMode) -> None:
    """All seated workers have told of it, in the same step, with all phases."""
    reports = job.migrated[epoch]
    assert reports.keys() == set(job.plans[epoch].placement.workers)
    assert len({report.step for report in reports.values()}) == 1
    for report in reports.values():
        assert tuple(report.phases_s) == MIGRATION_PHASES
        assert report.blocked_s == pytest.approx(sum(report.phases_s.values()))
        assert bool(report.streamed_steps) == (mode == "async")
        assert not (report.moved_bytes and mode == "async"), "state moved at the switch that was streamed before"


@BOTH
@pytest.mark.parametrize(
    ("launch", "rows", "sequence"),
    [
        ((8, 8, 7, 7), 1, [(7, 8, 8, 7), (9, 7, 7, 7), (1, 13, 15, 1)]),
        ((4, 3), 2, [(3, 4), (6, 1), (1, 6)]),
        ((15, 14, 14), 2, [(14, 15, 14), (10, 16, 17)]),
        ((2, 2), 3, [(1, 3), (2, 2)]),
    ],
    ids=["30-over-4", "7-over-2", "43-over-3", "4-over-2"],
)
def test_layers_move_again_and_again(
    launch: Sequence[int], rows: int, sequence: Sequence[Sequence[int]], mode: MigrationMode, tmp_path: Path
) -> None:
    steps = 4
    with job_of(tmp_path, stages=len(launch), rows=rows, layers=launch, patterned=True, migration=mode) as job:
        for number, counts in enumerate(sequence):
            most = max(abs(a - b) for a, b in zip((launch, *sequence)[number], counts, strict=True))
            order_in(job, steps - 2, lambda counts=counts: job.migrate(spans(*counts)))
            steps += 6 + (most if mode == "async" else 0)
        job.run(steps=steps, between=ToyWorker.log)
        assert not job.lost and job.epoch == 0
        check_end(job, steps)
        check_copies(job, steps)
        for epoch in range(1, len(sequence) + 1):
            check_migrated(job, epoch, mode)
        assert job.in_force.layers == spans(*sequence[-1])
        for worker in job.workers:
            assert worker.steps_run == list(range(steps)), "a step was run again"
            assert worker.prebuilt == list(range(1, len(sequence) + 1))


@BOTH
def test_cells_move_with_their_layers(mode: MigrationMode, tmp_path: Path) -> None:
    with job_of(tmp_path, stages=2, rows=3, layers=(3, 4), patterned=True, migration=mode) as job:
        order_in(job, 1, lambda: job.migrate(spans(2, 5), [(0, 1), (3, 4, 5, 2)]))
        order_in(job, 9, lambda: job.migrate(spans(5, 2), [(0, 1, 5, 4), (3, 2)]))
        order_in(job, 17, lambda: job.migrate(spans(1, 6), [(2, 4), (3, 1, 5, 0)]))
        job.run(steps=28, between=ToyWorker.log)
        check_end(job, 28)
        check_copies(job, 28)
        for epoch in (1, 2, 3):
            check_migrated(job, epoch, mode)
        assert job.in_force.placement.workers == (2, 4, 3, 1, 5, 0)


@BOTH
def test_two_stages_become_one_and_two_again(mode: MigrationMode, tmp_path: Path) -> None:
    with job_of(tmp_path, stages=2, rows=2, layers=(2, 3), patterned=True, migration=mode) as job:
        order_in(job, 1, lambda: job.migrate(spans(5), [(0, 2, 1, 3)]))
        order_in(job, 9, lambda: job.migrate(spans(4, 1), [(0, 2, 1), (3,)]))
        job.run(steps=18, between=ToyWorker.log)
        check_end(job, 18)
        check_copies(job, 18)
        for epoch in (1, 2):
            check_migrated(job, epoch, mode)


@BOTH
def test_two_stages_change_places(mode: MigrationMode, tmp_path: Path) -> None:
    with job_of(tmp_path, stages=2, rows=2, layers=(2, 2), patterned=True, migration=mode) as job:
        order_in(job, 1, lambda: job.migrate(spans(2, 2), [(2, 3), (0, 1)]))
        job.run(steps=10)
        check_end(job, 10)
        check_copies(job, 10)
        check_migrated(job, 1, mode)


@BOTH
@pytest.mark.parametrize("lazy", [True, False])
def test_nothing_moves_where_only_items_change(mode: MigrationMode, lazy: bool, tmp_path: Path) -> None:
    with job_of(tmp_path, stages=2, rows=2, layers=(2, 2), patterned=True, migration=mode, lazy=lazy) as job:
        order_in(job, 1, lambda: job.migrate(spans(2, 2)))
        job.run(steps=8)
        check_end(job, 8)
        check_copies(job, 8)
        check_migrated(job, 1, mode)
        assert not any(report.streamed_bytes + report.moved_bytes for report in job.migrated[1].values())


@BOTH
def test_only_parameters_are_gathered_that_not_all_replicas_had(mode: MigrationMode, tmp_path: Path) -> None:
    """Two layers go from stage 1 to stage 0, then a cell of stage 2 goes to stage 1, which gets layer 5 too."""
    with job_of(tmp_path, stages=3, rows=2, layers=(2, 4, 2), patterned=True, migration=mode, lazy=False) as job:
        order_in(job, 1, lambda: job.migrate(spans(4, 2, 2)))
        order_in(job, 9, lambda: job.migrate(spans(4, 3, 1), [(0, 1), (2, 3, 5), (4,)]))
        job.run(steps=18)
        check_end(job, 18)
        check_copies(job, 18)
        first, second = {"2", "3"}, {"4", "5", "6"}
        asked = [[set(names) for names in worker.asked] for worker in job.workers]
        assert asked == [
            [first, set()],
            [first, set()],
            [set(), second],
            [set(), second],
            [set(), set()],
            [set(), second],
        ]


@BOTH
def test_a_drained_worker_gives_its_state_away_and_leaves(mode: MigrationMode, tmp_path: Path) -> None:
    with job_of(tmp_path, stages=2, rows=2, layers=(3, 3), patterned=True, migration=mode) as job:
        order_in(job, 1, lambda: job.migrate(spans(4, 2), [(0, 1), (3,)], drain=(2,)))
        order_in(job, 9, lambda: job.migrate(spans(6), [(0, 3)], drain=(1,)))
        job.run(steps=18, between=ToyWorker.log)
        assert job.left == {1, 2} and job.epoch == 0
        check_end(job, 18)
        check_copies(job, 18)
        check_migrated(job, 1, mode)
        check_migrated(job, 2, mode)
        switch = {report.step for report in job.migrated[1].values()}
        assert job.workers[2].steps_run == list(range(*switch)), "it ran a step after the switch, or missed one before"


def test_an_order_that_some_hear_of_later_waits_for_them(tmp_path: Path) -> None:
    with job_of(tmp_path, stages=2, rows=2, layers=(2, 2), patterned=True, migration="blocking") as job:
        order_in(job, 1, lambda: job.migrate(spans(1, 3)))
        deaf = job.workers[3]
        deaf.hears_from = 4
        job.run(steps=8)
        check_end(job, 8)
        assert {report.step for report in job.migrated[1].values()} == {5}
        assert deaf.prebuilt == [1]


@BOTH
def test_what_cannot_be_made_ahead_is_declined_and_training_goes_on(mode: MigrationMode, tmp_path: Path) -> None:
    with job_of(tmp_path, stages=2, rows=2, layers=(2, 2), patterned=True, migration=mode) as job:
        job.spoils_prebuild = True
        order_in(job, 1, lambda: job.migrate(spans(1, 3)))
        job.run(steps=8)
        check_end(job, 8)
        assert job.in_force.layers == spans(2, 2) and not job.migrated[1] and not job.lost
        assert {(epoch, sentence) for _, epoch, sentence in job.declined} == {
            (1, "MemoryError: no room for another layer")
        }
        assert sorted(worker for worker, _, _ in job.declined) == [0, 1, 2, 3], "one told it twice, or not at all"


def test_evaluations_and_saves_between_steps_are_run_under_the_plan_of_the_step_before(tmp_path: Path) -> None:
    epochs: dict[int, set[int]] = {}

    def between(worker: ToyWorker, step: int) -> None:
        epochs.setdefault(step, set()).add(worker.session.plan.epoch)
        worker.evaluate(step)
        worker.save(step)
        worker.log(step)

    with job_of(tmp_path, stages=2, rows=2, layers=(2, 2), patterned=True, migration="async") as job:
        order_in(job, 1, lambda: job.migrate(spans(1, 3)))
        job.run(steps=10, between=between)
        check_end(job, 10)
        check_copies(job, 10)
        (switch,) = {report.step for report in job.migrated[1].values()}
        assert epochs == {step: {int(step >= switch)} for step in range(10)}
        for worker in job.workers:
            assert worker.saved == worker.logged == [step for step, _ in worker.evaluated] == list(range(10))


SLOW_ROLES = ("target", "bystander")
PLACES = ("stream", "hand-over", "switch", "enter", "rebuild", "resume", "verify")


@pytest.mark.parametrize("role", ["source", *(pytest.param(role, marks=pytest.mark.slow) for role in SLOW_ROLES)])
@pytest.mark.parametrize("place", PLACES)
@BOTH
def test_a_worker_lost_anywhere_in_a_migration_is_made_up_for(
    mode: MigrationMode, place: str, role: str, tmp_path: Path
) -> None:
    """Layers go from stage 1 to stage 0, and nothing of stage 2 moves."""
    if mode == "blocking" and place in ("stream", "hand-over"):
        pytest.skip("nothing is streamed")
    with job_of(tmp_path, stages=3, rows=2, layers=(2, 4, 2), patterned=True, migration=mode) as job:
        victim = job.workers[{"source": 2, "target": 0, "bystander": 5}[role]]
        struck = strike_in(victim, place)
        order_in(job, 1, lambda: job.migrate(spans(4, 2, 2)))
        job.run(steps=12, between=ToyWorker.log)
        assert struck == [place] and job.lost == {victim.id}
        check_end(job, 12)
        check_copies(job, 12)
        base = job.orders[2].settlement.base_epoch
        assert base == 0, "nobody had finished a step under the new plan"
        for worker in job.survivors:
            assert job.workers[worker].logged == list(range(12))
        assert job.in_force.epoch == 2


def strike_in(victim: ToyWorker, place: str) -> list[str]:
    """Lose the worker when it first comes to this place of a migration; gives where it was struck."""
    struck: list[str] = []

    def vanish() -> None:
        struck.append(place)
        victim.vanish()

    victim.anywhere[f"migrate-{place}"] = vanish
    return struck


@pytest.mark.parametrize("place", ["optimizer", "gather", "commit", "between"])
@BOTH
def test_a_worker_lost_at_the_end_of_the_first_step_under_the_plan_leaves_the_plan_in_force(
    mode: MigrationMode, place: str, tmp_path: Path
) -> None:
    with job_of(tmp_path, stages=2, rows=2, layers=(2, 4), patterned=True, migration=mode) as job:
        victim = job.workers[3]

        def arm() -> None:
            """In the first step under the plan, before its end."""
            victim.anywhere[place] = victim.vanish

        victim.anywhere["migrate-verify"] = arm
        order_in(job, 1, lambda: job.migrate(spans(3, 3)))
        job.run(steps=12, between=ToyWorker.log)
        assert job.lost == {3}
        check_end(job, 12)
        check_copies(job, 12)
        # The victim alone may have known the norm; then nobody has finished a step under the plan.
        bases = {order.settlement.base_epoch for order in job.orders.values()}
        assert bases == {1}, "the newest layout that all hold"


@BOTH
def test_a_second_worker_lost_in_the_recovery_from_a_loss_in_the_switch_is_made_up_for(
    mode: MigrationMode, tmp_path: Path
) -> None:
    with job_of(tmp_path, stages=2, rows=3, layers=(2, 4), patterned=True, migration=mode) as job:
        struck = strike_in(job.workers[3], "rebuild")
        second = job.workers[1]
        second.anywhere["recovery-rebuild"] = second.vanish
        second.anywhere["recovery-restore"] = lambda: None
        order_in(job, 1, lambda: job.migrate(spans(4, 2)))
        job.run(steps=12)
        assert struck and job.lost == {1, 3}
        check_end(job, 12)
        check_copies(job, 12)


@BOTH
@pytest.mark.parametrize("place", ["switch", "enter", "resume", "verify"])
def test_a_loss_while_a_drained_worker_is_still_there_may_give_it_a_seat_again(
    mode: MigrationMode, place: str, tmp_path: Path
) -> None:
    with job_of(tmp_path, stages=2, rows=3, layers=(3, 3), patterned=True, migration=mode) as job:
        victim = job.workers[0]
        if place == "enter":
            victim = job.workers[5]
        struck = strike_in(victim, place)
        order_in(job, 1, lambda: job.migrate(spans(3, 3), [(0, 1, 2), (3, 4)], drain=(5,)))
        job.run(steps=12)
        assert struck and job.lost == {victim.id} and not job.left
        check_end(job, 12)
        check_copies(job, 12)


@BOTH
def test_after_a_loss_another_order_is_followed(mode: MigrationMode, tmp_path: Path) -> None:
    with job_of(tmp_path, stages=3, rows=2, layers=(2, 4, 2), patterned=True, migration=mode) as job:
        struck = strike_in(job.workers[2], "resume")
        order_in(job, 1, lambda: job.migrate(spans(4, 2, 2)))
        order_in(job, 12, lambda: job.migrate(spans(3, 3, 2)))
        job.run(steps=22)
        assert struck and job.lost == {2}
        check_end(job, 22)
        check_copies(job, 22)
        check_migrated(job, 3, mode)
        assert job.in_force.layers == spans(3, 3, 2)


@pytest.mark.parametrize("element", ["a-moment", "the-count-of-updates"])
def test_a_copy_that_went_bad_on_its_way_ends_the_migration_and_nothing_else(element: str, tmp_path: Path) -> None:
    with job_of(tmp_path, stages=2, rows=2, layers=(2, 4), patterned=True, migration="async") as job:
        target, spoilt = job.workers[0], []

        def spoil() -> None:
            streaming = target.session._migrating_in_use.streaming
            assert streaming is not None
            streaming._wait()
            copy = streaming._copies[0]
            at = copy.stream.layout.numel if element == "a-moment" else -1
            copy.flat[at] += 1.0
            spoilt.append(copy.stream)

        target.anywhere["migrate-switch"] = spoil
        order_in(job, 1, lambda: job.migrate(spans(4, 2)))
        job.run(steps=12, between=ToyWorker.log)
        assert spoilt and not job.lost and len(job.void) == 1
        check_end(job, 12)
        check_copies(job, 12)
        assert job.orders[2].settlement.base_epoch == 0 and job.in_force.layers == spans(2, 4)


def test_a_worker_whose_update_of_a_streamed_copy_fails_is_lost_alone(tmp_path: Path) -> None:
    with job_of(tmp_path, stages=2, rows=3, layers=(2, 6), patterned=True, migration="async") as job:
        target, failed = job.workers[0], []

        class Failing:
            def apply(self, gradients: torch.Tensor, update: Update, settings: object) -> None:
                failed.append(update.step)
                raise OverflowError("as the bias correction of an absurd step")

        def arm() -> None:
            streaming = target.session._migrating_in_use.streaming
            assert streaming is not None
            streaming._copies[0].mirror = Failing()

        target.anywhere["migrate-hand-over"] = arm
        target.crashes = OverflowError
        order_in(job, 1, lambda: job.migrate(spans(4, 4)))
        order_in(job, 10, lambda: job.migrate(spans(3, 5)), worker=1)
        job.run(steps=22, between=ToyWorker.log)
        assert failed and job.lost == {0}
        check_end(job, 22)
        check_copies(job, 22)
        check_migrated(job, 3, "async")


@pytest.mark.parametrize("place", ["norm", "optimizer", "gather", "commit", "between"])
@pytest.mark.parametrize("victim", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_worker_lost_at_the_end_of_a_step_that_streams_is_made_up_for(
    victim: int, place: str, tmp_path: Path
) -> None:
    with job_of(tmp_path, stages=2, rows=3, layers=(2, 6), patterned=True, migration="async") as job:
        lost = job.workers[victim]

        def arm() -> None:
            lost.anywhere[place] = lost.vanish

        lost.anywhere["migrate-hand-over"] = arm
        order_in(job, 1, lambda: job.migrate(spans(4, 4)))
        order_in(job, 10, lambda: job.migrate(spans(3, 5)), worker=1)
        job.run(steps=22, between=ToyWorker.log)
        assert job.lost == {victim}
        check_end(job, 22)
        check_copies(job, 22)
        check_migrated(job, 3, "async")
