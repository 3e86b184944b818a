"""The benchmarks of throughput and of migrations: what they make of what jobs have written."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_elas.spec.migration import MIGRATION_PHASES
from megatron_elas.spec.step_report import StepReport


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a program of the benchmarks as a module; they find their neighbours in their own folder."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module


def report(worker: int, epoch: int, step: int, step_s: float, *, ended_s: float, first: bool = False) -> StepReport:
    return StepReport(
        worker=worker, epoch=epoch, step=step, first_layer=0, last_layer=2, cells=2, step_s=step_s,
        predicted_s=1.0 + epoch, ended_s=ended_s, first=first,
    )  # fmt: skip


def course_of(bench: Any, times_s: Sequence[tuple[int, float]], events: Sequence[dict[str, Any]] = ()) -> Any:
    """A job of two workers whose steps have these epochs and times."""
    reports, at_s, before = [], 100.0, -1
    for step, (epoch, seconds) in enumerate(times_s):
        at_s += seconds
        for worker in (0, 1):
            one = report(worker, epoch, step, seconds + 0.01 * worker, ended_s=at_s, first=epoch != before)
            reports.append(one)
        before = epoch
    jobs = bench("emulated_jobs")
    return jobs.Course(steps=tuple(jobs.gather_steps(reports)), events=tuple(events), slow=())


BEFORE, RECOVERED, MIGRATED = [(0, 9.0), (0, 1.0), (0, 1.1)], [(1, 5.0), (1, 2.0)], [(3, 4.0), (3, 1.5), (3, 1.5)]


def test_a_step_takes_the_median_of_its_workers_and_ends_with_the_last(bench: Any) -> None:
    reports = [report(worker, 0, 4, 1.0 + worker, ended_s=10.0 + worker) for worker in range(3)]
    (step,) = bench("emulated_jobs").gather_steps(reports)
    assert (step.seconds, step.ended_s, step.predicted_s, step.is_steady) == (2.0, 12.0, 1.0, True)


def test_steps_count_under_the_newest_plan_before_the_next_loss(bench: Any) -> None:
    course = course_of(bench, [*BEFORE, *RECOVERED, *MIGRATED])
    before, after = course.stretches([3])
    assert (before.epoch, [step.step for step in before.steps]) == (0, [1, 2])
    assert (after.epoch, [step.step for step in after.steps]) == (3, [6, 7])
    assert before.step_s == pytest.approx(1.055)
    assert after.predicted_s == 4.0


def test_a_job_without_steady_steps_is_no_measurement(bench: Any) -> None:
    course = course_of(bench, [*BEFORE, *RECOVERED, *MIGRATED[:1]])
    with pytest.raises(SystemExit, match="no steady step from step 3 on, in the last epoch"):
        course.stretches([3])


def test_what_a_job_says_is_put_together(bench: Any) -> None:
    events = [
        {"event": "loss", "time_s": 111.35},
        {"event": "recovery", "epoch": 1, "total": 5100.0, "detect": 50.0},
        {"event": "migration"},
    ]
    measured = bench("throughput").measure_course(course_of(bench, [*BEFORE, *RECOVERED, *MIGRATED], events), [3])
    assert measured.recovery_s == (5.1,)
    assert measured.resumed_s == pytest.approx((2.005,))
    assert measured.struck_after_s == pytest.approx(0.2)
    assert measured.migrations == 1


def test_a_recovery_that_nobody_scripted_is_refused(bench: Any) -> None:
    course = course_of(bench, [*BEFORE, *RECOVERED], [{"event": "recovery"}] * 2)
    with pytest.raises(SystemExit, match="1 workers were lost, and there were 2 recoveries"):
        bench("throughput").measure_course(course, [3])


def test_two_rows_lose_workers_of_one_row_so_that_a_replica_is_left(bench: Any) -> None:
    throughput, grid = bench("throughput"), bench("training_jobs").Grid
    assert throughput.victims(grid(stages=8, rows=2)) == (8, 0)
    assert throughput.victims(grid(stages=4, rows=3)) == (6, 1)
    assert throughput.losses_under("torchft", grid(stages=8, rows=2), (4, 10)) == (4,)
    assert throughput.losses_under("torchft", grid(stages=4, rows=3), (4, 10)) == (4, 10)
    assert throughput.losses_under("ours", grid(stages=8, rows=2), (4, 10)) == (4, 10)


def test_samples_of_the_real_torchft_are_counted_as_they_are(bench: Any) -> None:
    case = next(case for case in bench("throughput").CASES.values() if case.grid.rows == 3)
    share = case.row_batches * case.size
    told = [
        {"event": "commit", "at_s": at_s, "replica": replica, "step": step, "replicas": replicas}
        for step, (at_s, replicas) in enumerate([(1.0, 3), (3.0, 3), (5.0, 3), (14.0, 2), (16.0, 2), (18.0, 2)])
        for replica in range(3 - replicas, 3)
    ]
    found = bench("throughput_torchft").read_run(case, told, [6.0])
    assert found.step_s == (2.0, 2.0)
    assert found.samples_per_s == (1.5 * share, 1.0 * share)
    assert found.recovery_s == (8.0,)
    assert found.series.samples == (3 * share,) * 3 + (2 * share,) * 3


def test_the_torchft_replicas_take_the_time_of_the_emulated_pipeline(bench: Any) -> None:
    throughput = bench("throughput")
    for case in throughput.CASES.values():
        tails_s = [case.tail_s(rows) for rows in range(1, case.grid.rows + 1)]
        assert 0 < tails_s[0] < tails_s[-1] < 0.1 * case.step_s()


def test_the_picture_has_a_panel_with_every_step_and_loss_of_a_system(bench: Any) -> None:
    plot = bench("throughput_plot")
    one = plot.Series(name="ours", ends_s=(5.0, 7.0, 11.0), samples=(8, 8, 8), losses_s=(8.0,))
    assert one.rates() == [(0.0, 2.0, 4.0), (2.0, 6.0, 2.0)]
    svg = plot.plot_rates(
        "a title", [one, plot.Series(name="other", ends_s=(1.0, 3.0), samples=(4, 4), losses_s=())]
    ).svg()
    assert svg.count("a worker is lost") == 1
    assert "a title" in svg and ">ours<" in svg and ">other<" in svg


def migration_event(**more: Any) -> dict[str, Any]:
    return {
        "event": "migration", "resume_step": 3, "moved": [{"layers": [5, 7], "from": 1, "to": 2}], "streamed_steps": 2,
        "streamed_bytes": 3e6, "gradient_bytes": 1e6, "moved_bytes": 0, "total": 30.0, "verify_ms": 4.0,
        "hand_over_ms": 6.0, **dict.fromkeys(MIGRATION_PHASES, 6.0), **more,
    }  # fmt: skip


def test_a_migration_is_blocked_also_by_comparing_and_handing_over(bench: Any) -> None:
    migration = bench("migration")
    course = course_of(bench, [(0, 1.0), (0, 1.0), (0, 1.1), (1, 2.0), (1, 1.5)], [migration_event()])
    found = migration.read_migration(course, "async", 2)
    assert (found.blocked_ms, found.streamed_steps, found.moved_mb) == (40.0, 2, 4.0)


def test_another_migration_than_the_one_asked_for_is_no_measurement(bench: Any) -> None:
    course = course_of(bench, [(0, 1.0), (0, 1.0), (1, 2.0), (1, 1.5)], [migration_event()])
    with pytest.raises(SystemExit, match="one migration of 3 layers was to be made; made were"):
        bench("migration").read_migration(course, "async", 3)


@pytest.mark.slow
@pytest.mark.process
def test_a_policy_is_measured_with_a_real_job(bench: Any, tmp_path: Path) -> None:
    jobs, throughput, grid = bench("emulated_jobs"), bench("throughput"), bench("training_jobs").Grid
    case = jobs.Case(grid=grid(stages=2, rows=2), model="llama2-7b", hardware="npu-96", row_batches=4, size=1)
    options = argparse.Namespace(first_loss=3, apart=(4, 6), tries=1)
    found = throughput.measure_policy(case, "recycle", tmp_path, options)
    before, first, second = found.stretches
    assert [len(one.steps) for one in found.stretches] == [2, 3, 3]
    # Of what was predicted, since how long steps take is also up to what else runs on the machine.
    assert 1.2 * before.predicted_s < min(first.predicted_s, second.predicted_s)
    assert len(found.recovery_s) == 2
