"""Survivors go on from the newest state that is whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_elas.planner.plan import initial_plan, replan
from megatron_elas.planner.settle import settle
from megatron_elas.spec.errors import StateInvalid
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.report import Holding, SettleReport
from megatron_elas.spec.transaction import Update

JOB = JobSpec(tensor_parallel=1, pipeline_parallel=2, data_parallel=3, micro_batch_size=1, num_microbatches=6)
FIRST = initial_plan(JOB, {})
SECOND = replan(JOB, FIRST, [5], 1, {})


def report(
    worker: int, step: int, live: int | None, kept: tuple[int, ...], wards: dict[int, tuple[int, ...]], epoch: int = 0
) -> SettleReport:
    holding = Holding(epoch=epoch, live=live, kept=kept, wards=wards)
    return SettleReport(worker=worker, epoch=epoch + 1, step=step, activity=step, holdings=(holding,))


def survivors(step: int, live: int | None, kept: tuple[int, ...], ward: tuple[int, ...]) -> list[SettleReport]:
    """All of the first plan but worker 5, whose copy is on worker 3."""
    backed_up = {backup: owner for owner, backup in FIRST.backups}
    return [report(w, step, live, kept, {backed_up[w]: ward if w == 3 else kept}) for w in range(5)]


def test_a_fault_in_the_forward_pass_runs_the_same_step_again() -> None:
    settlement = settle(survivors(7, 7, (6, 7), (6, 7)), {0: FIRST})
    assert (settlement.base_epoch, settlement.resume_step, settlement.lead_activity) == (0, 7, 7)


def test_a_copy_that_had_not_arrived_takes_everybody_one_step_back() -> None:
    assert settle(survivors(7, 7, (6, 7), (6,)), {0: FIRST}).resume_step == 6


def test_a_fault_in_the_optimizer_falls_back_to_the_state_before_the_step() -> None:
    reports = survivors(7, None, (6, 7), (6, 7))
    assert settle(reports, {0: FIRST}).resume_step == 7


def test_a_step_that_one_survivor_committed_counts_for_all_when_the_lost_copy_is_there() -> None:
    reports = survivors(8, 8, (7, 8), (7, 8))
    reports[0] = report(0, 7, 8, (6, 7), {2: (6, 7)})
    settlement = settle(reports, {0: FIRST})
    assert (settlement.resume_step, settlement.lead_activity) == (8, 8)


def test_a_lost_shard_without_a_copy_is_named() -> None:
    with pytest.raises(StateInvalid, match=r"the shard of worker 5 \(at its backup, worker 3\) has versions \[\]"):
        settle(survivors(7, 7, (6, 7), ()), {0: FIRST})


def test_a_second_fault_during_a_recovery_goes_back_to_the_layout_that_all_still_hold() -> None:
    old = {w: Holding(epoch=0, live=None, kept=(6, 7), wards={5: (6, 7)} if w == 3 else {}) for w in range(5)}
    new = Holding(epoch=1, live=7, kept=(7,), wards={})
    backed_up = {backup: owner for owner, backup in FIRST.backups}
    reports = []
    for worker in (0, 2, 3, 4):
        held = old[worker]
        held = Holding(epoch=0, live=None, kept=(6, 7), wards={backed_up[worker]: (6, 7), **held.wards})
        holdings = (new, held) if worker in (0, 2) else (held,)
        reports.append(SettleReport(worker=worker, epoch=2, step=7, activity=7, holdings=holdings))
    settlement = settle(reports, {0: FIRST, 1: SECOND})
    assert (settlement.base_epoch, settlement.resume_step) == (0, 7)


def test_a_spare_that_is_behind_is_in_nobodys_way() -> None:
    job = JobSpec(tensor_parallel=2, pipeline_parallel=1, data_parallel=3, micro_batch_size=1, num_microbatches=6)
    first = initial_plan(job, {})
    second = replan(job, first, [0], 1, {})
    third = replan(job, second, [2, 3], 2, {})
    assert third.placement.describe() == "stage 0: [4,5] | spare: 1"
    fresh = Holding(epoch=2, live=9, kept=(8, 9), wards={})
    reports = [SettleReport(worker=worker, epoch=3, step=9, activity=9, holdings=(fresh,)) for worker in (4, 5)]
    late = Holding(epoch=1, live=None, kept=(), wards={})
    reports.append(SettleReport(worker=1, epoch=3, step=3, activity=3, holdings=(late,)))
    settlement = settle(reports, {1: second, 2: third})
    assert (settlement.base_epoch, settlement.resume_step, settlement.lead_activity) == (2, 9, 9)


def test_survivors_without_a_common_version_cannot_go_on() -> None:
    reports = survivors(7, 7, (6, 7), (6, 7))
    reports[1] = report(1, 9, 9, (8, 9), {0: (8, 9)})
    with pytest.raises(StateInvalid, match="worker 1 has versions"):
        settle(reports, {0: FIRST})


# ---------------------------------------------------------------- an open step, with copies that follow by gradients


def norm(step: int) -> Update:
    return Update.of(step, norm=1.5)


def position(
    worker: int,
    live: int | None,
    ward: tuple[int, ...],
    *,
    ready: int | None = None,
    update: Update | None = None,
    kept: tuple[int, ...] = (),
    epoch: int = 0,
    plan: ElasticPlan = FIRST,
) -> Holding:
    """A worker's copies under the plan; ``ward`` of all of its wards."""
    wards = dict.fromkeys(plan.wards_of(worker), ward)
    return Holding(epoch=epoch, live=live, kept=kept, wards=wards, ready=ready, update=update)


def reported(*holdings: tuple[int, Holding], step: int = 7) -> list[SettleReport]:
    return [
        SettleReport(worker=worker, epoch=holding.epoch + 1, step=step, activity=step, holdings=(holding,))
        for worker, holding in holdings
    ]


def between_reduce_and_norm(*prepared: int) -> list[SettleReport]:
    """Survivors of worker 5's loss: all have their wards' gradients of step 7, these also know its norm."""
    return reported(
        *(
            (w, position(w, 8, (8,), ready=7, update=norm(7)) if w in prepared else position(w, 7, (7,), ready=7))
            for w in range(5)
        )
    )


@pytest.mark.parametrize("prepared", [(0,), (3,), (0, 4), (0, 1, 2, 3, 4)])
def test_a_step_commits_when_one_survivor_is_prepared_for_it(prepared: tuple[int, ...]) -> None:
    settlement = settle(between_reduce_and_norm(*prepared), {0: FIRST})
    assert (settlement.resume_step, settlement.commit) == (8, norm(7))
    assert settlement.holders == ((5, 3),)


def test_a_step_aborts_when_no_survivor_is_prepared_for_it() -> None:
    settlement = settle(between_reduce_and_norm(), {0: FIRST})
    assert (settlement.resume_step, settlement.commit) == (7, None)


def test_gradients_that_have_not_come_in_everywhere_abort_the_step() -> None:
    reports = reported(*((w, position(w, 7, (7,), ready=7 if w < 3 else None)) for w in range(5)))
    assert settle(reports, {0: FIRST}).resume_step == 7


def test_prepared_but_not_applied_is_prepared() -> None:
    reports = reported(
        (0, position(0, 7, (7,), ready=7, update=norm(7))),
        *((w, position(w, 7, (7,), ready=7)) for w in range(1, 5)),
    )
    assert settle(reports, {0: FIRST}).commit == norm(7)


def test_workers_that_are_in_the_next_step_already_go_back_to_its_beginning() -> None:
    ahead = position(0, 8, (8,), ready=8, update=norm(7))
    late = position(2, 7, (7,), ready=7)
    done = [(w, position(w, 8, (8,), update=norm(7))) for w in (1, 3, 4)]
    settlement = settle(reported((0, ahead), (2, late), *done), {0: FIRST})
    assert (settlement.resume_step, settlement.commit) == (8, norm(7))


def test_a_commit_that_no_survivor_knows_any_more_is_kept() -> None:
    reports = between_reduce_and_norm()
    assert settle(reports, {0: FIRST}).resume_step == 7
    settlement = settle(reports, {0: FIRST}, decided=norm(7))
    assert (settlement.resume_step, settlement.commit) == (8, norm(7))


def test_a_commit_is_kept_also_when_some_have_followed_it_and_forgotten_the_gradients() -> None:
    followed = [(w, position(w, 8, (8,), kept=(8,))) for w in (0, 1, 3)]
    waiting = [(w, position(w, 7, (7,), ready=7)) for w in (2, 4)]
    settlement = settle(reported(*followed, *waiting), {0: FIRST}, decided=norm(7))
    assert (settlement.resume_step, settlement.commit) == (8, norm(7))


def test_an_older_commit_does_not_hide_a_newer_step() -> None:
    settlement = settle(between_reduce_and_norm(0), {0: FIRST}, decided=norm(6))
    assert (settlement.resume_step, settlement.commit) == (8, norm(7))


def test_a_step_that_all_have_finished_is_no_open_one() -> None:
    reports = reported(*((w, position(w, 8, (8,), update=norm(7))) for w in range(5)), step=8)
    settlement = settle(reports, {0: FIRST})
    assert (settlement.resume_step, settlement.lead_activity) == (8, 8)
    reports = reported(*((w, position(w, 7, (7,))) for w in range(5)))
    assert settle(reports, {0: FIRST}).commit is None


def test_gradients_do_not_make_a_version_without_the_copy_that_they_belong_to() -> None:
    reports = between_reduce_and_norm(0)
    reports[3] = reported((3, position(3, 7, (), ready=7)))[0]
    with pytest.raises(StateInvalid, match=r"the shard of worker 5 .* has versions \[\]"):
        settle(reports, {0: FIRST})


def test_copies_that_do_not_follow_by_gradients_take_everybody_back_to_the_step() -> None:
    """PREPARED, but nobody has gradients of others, so that only the kept version is whole."""
    reports = reported(*((w, position(w, 8 if w else None, (6, 7), kept=(6, 7), update=norm(7))) for w in range(5)))
    settlement = settle(reports, {0: FIRST})
    assert (settlement.resume_step, settlement.commit) == (7, None)


def test_a_step_that_is_open_under_the_new_layout_commits_there() -> None:
    seated = SECOND.placement.workers
    new = {
        w: position(w, 8, (8,), ready=7, update=norm(7), kept=(7,), epoch=1, plan=SECOND)
        if w == 1
        else position(w, 7, (7,), ready=7, kept=(7,), epoch=1, plan=SECOND)
        for w in seated
    }
    old = {w: position(w, None, (7,), kept=(7,)) for w in seated}
    reports = [SettleReport(worker=w, epoch=2, step=7, activity=7, holdings=(new[w], old[w])) for w in seated if w != 4]
    settlement = settle(reports, {0: FIRST, 1: SECOND})
    assert (settlement.base_epoch, settlement.resume_step, settlement.commit) == (1, 8, norm(7))


def test_settling_the_same_reports_again_decides_the_same() -> None:
    reports = between_reduce_and_norm(0)
    first = settle(reports, {0: FIRST})
    assert settle(reports[::-1], {0: FIRST}) == first
    assert settle(reports, {0: FIRST}, decided=first.commit) == first


def test_parameters_are_whole_when_all_with_a_seat_have_those_of_the_resume_version() -> None:
    def settled(versions: dict[int, int | None]) -> bool:
        found = [
            replace(r, holdings=(replace(r.holdings[0], parameters=versions.get(r.worker, 7)),))
            for r in survivors(7, 7, (6, 7), (6, 7))
        ]
        return settle(found, {0: FIRST}).parameters_whole

    assert settled({})
    assert not settled({2: None}) and not settled({0: 6}) and not settled({4: 8})
