"""The block that a migration prints: its numbers add up, and say what happened."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megatron_elas.control.migration_block import find_slowest, moves_of, phases_ms, show_migration
from megatron_elas.control.recovery_block import RULE, add_step_times
from megatron_elas.control.states import Migration
from megatron_elas.control.step_meter import EpochTimes
from megatron_elas.planner.plan import initial_plan
from megatron_elas.spec.migration import MIGRATION_PHASES, MigrationReport
from tests.control.jobs import make_job, shift_layer

PLAN = initial_plan(make_job(pipeline=3, data=2, layers=(4, 3, 3)), {worker: f"worker{worker}" for worker in range(6)})
PHASES_S = {"drain": 0.0012, "groups": 0.0005, "rebuild": 0.0301, "gather": 0.0021}
REPORT = MigrationReport(
    worker=0,
    epoch=4,
    step=17,
    streamed_steps=3,
    streamed_bytes=2_000_000,
    gradient_bytes=500_000,
    hand_over_s=0.002,
    moved_bytes=100_000,
    blocked_s=sum(PHASES_S.values()),
    verify_s=0.0061,
    phases_s=PHASES_S,
)


def migration_of(*reports: MigrationReport, leaving: tuple[int, ...] = ()) -> Migration:
    target = replace(shift_layer(PLAN, 4, leaving), predicted_s=0.4)
    return Migration(
        before=PLAN,
        target=target,
        plan_s=0.5,
        in_force_s=0.5,
        leaving=leaving,
        reports={report.worker: report for report in reports},
    )


def test_the_block_says_what_moved_and_what_it_took() -> None:
    slowest = replace(REPORT, worker=1, hand_over_s=0.004, phases_s={**PHASES_S, "rebuild": 0.0401}, blocked_s=0.0439)
    block = show_migration(migration_of(REPORT, slowest, leaving=(5,)))
    assert block.text.splitlines() == [
        "---- migrated: epoch 4 " + "-" * 60,
        "drained  worker 5",
        "before   stage 0 (layers 0-3): [0] [1] | stage 1 (layers 4-6): [2] [3] | stage 2 (layers 7-9): [4] [5]",
        "now      stage 0 (layers 0-4): [0] [1] | stage 1 (layers 5-6): [2] [3] | stage 2 (layers 7-9): [4]",
        "moved    layer 4 from stage 1 to 0",
        "compared a step of 400.0 ms predicted, and 500.0 ms for the plan before by the same costs",
        "beside   4.0 MB of state and 1.0 MB of gradients in 3 steps, their exchanges 4.0 ms longer",
        "switched before step 17, blocked 43.9 ms, 0.2 MB moved then, verified in 6.1 ms of that step",
        "ms       drain  assemble  groups  rebuild  gather  total",
        "           1.2       0.0     0.5     40.1     2.1   43.9  (worker 1, the slowest)",
        RULE,
    ]
    assert block.facts["moved"] == [{"layers": [4, 5], "from": 1, "to": 0}]
    assert (block.facts["streamed_bytes"], block.facts["moved_bytes"], block.facts["slowest"]) == (
        4_000_000,
        200_000,
        1,
    )
    assert block.phases_ms["total"] == 43.9


def test_what_is_nothing_is_left_out() -> None:
    report = replace(REPORT, worker=1, streamed_bytes=0, gradient_bytes=0, moved_bytes=1000)
    migration = migration_of(report, leaving=(5,))
    block = show_migration(replace(migration, target=replace(migration.target, layers=PLAN.layers, predicted_s=None)))
    assert [line.split()[0] for line in block.text.splitlines()] == [
        *("----", "drained", "before", "now", "switched", "ms", "1.2", RULE)
    ]
    assert "blocked 33.9 ms, verified in 6.1 ms of that step" in block.text
    assert (block.facts["moved"], block.facts["moved_bytes"]) == ([], 1000)
    some = show_migration(migration_of(replace(report, streamed_bytes=60_000))).text
    assert "\nbeside   0.1 MB of state in 3 steps, their exchanges 2.0 ms longer\n" in some


def test_what_steps_take_is_added() -> None:
    summary = (
        EpochTimes(epoch=3, reports=8, measured_s=0.5, predicted_s=0.48),
        EpochTimes(epoch=4, reports=0, measured_s=None, predicted_s=0.4),
    )
    block = add_step_times(show_migration(migration_of(REPORT)), summary)
    *_, line, rule = block.text.splitlines()
    assert (
        line == "step     400.0 ms predicted, before 500.0 ms measured, 480.0 ms predicted, ratio 1.04" and rule == RULE
    )
    assert block.facts["step_s"] == {"predicted": 0.4, "predicted_before": 0.48, "measured_before": 0.5}


@given(st.dictionaries(st.sampled_from(MIGRATION_PHASES), st.floats(0, 10)))
def test_the_columns_add_up_to_the_total(phases_s: dict[str, float]) -> None:
    lengths = phases_ms(replace(REPORT, phases_s=phases_s))
    assert list(lengths) == [*MIGRATION_PHASES, "total"]
    assert round(sum(lengths[phase] for phase in MIGRATION_PHASES), 1) == lengths["total"]
    assert abs(lengths["total"] - 1e3 * sum(phases_s.values())) <= 0.0501


def test_of_several_that_are_slowest_the_first_one_is_shown() -> None:
    assert find_slowest([replace(REPORT, worker=worker) for worker in (3, 1, 2)]).worker == 1


def test_runs_of_layers_are_told_by_where_they_come_from_and_where_they_go() -> None:
    before = replace(PLAN, layers=((0, 4), (4, 7), (7, 10)))
    after = replace(PLAN, layers=((0, 2), (2, 3), (3, 10)))
    assert moves_of(before, after) == ((2, 3, 0, 1), (3, 4, 0, 2), (4, 7, 1, 2))
    assert moves_of(before, before) == ()
