"""The meter keeps the newest reports of all workers, and compares them with the forecast."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_elas.control.step_meter import ENOUGH, EPOCHS, KEPT, StepMeter
from megatron_elas.planner.plan import initial_plan
from megatron_elas.spec.step_report import StepReport
from tests.control.jobs import make_job

PLAN = initial_plan(make_job(pipeline=2, data=2), {worker: f"n{worker}" for worker in range(4)})


def report(worker: int, step: int, step_s: float = 1.0, epoch: int = 0, *, first: bool = False) -> StepReport:
    stage = worker // 2
    return StepReport(
        worker=worker,
        epoch=epoch,
        step=step,
        first_layer=stage,
        last_layer=stage + 1,
        cells=2,
        step_s=step_s,
        first=first,
    )


def test_a_report_comes_back_with_the_newest_forecast_of_its_epoch() -> None:
    meter = StepMeter()
    assert meter.take(report(0, 0)).predicted_s is None
    meter.set_forecast(0, 0.5)
    assert meter.take(report(0, 1)) == replace(report(0, 1), predicted_s=0.5)
    meter.set_forecast(0, 0.8)
    assert meter.take(report(0, 2)).predicted_s == 0.8
    meter.set_forecast(1, 2.0)
    assert (meter.take(report(0, 3)).predicted_s, meter.take(report(0, 3, epoch=1)).predicted_s) == (0.8, 2.0)


def test_the_newest_reports_of_every_worker_are_kept() -> None:
    meter = StepMeter()
    for step in range(3 * KEPT):
        meter.take(report(1, step))
    meter.take(report(0, 5))
    assert [(kept.worker, kept.step) for kept in meter.reports()] == [
        (0, 5),
        *((1, step) for step in range(2 * KEPT, 3 * KEPT)),
    ]
    meter.take(report(1, 3 * KEPT, epoch=1))
    assert [kept.step for kept in meter.reports(epoch=1)] == [3 * KEPT]
    assert len(meter.reports()) == KEPT + 1


def test_a_first_step_is_completed_and_not_kept() -> None:
    meter = StepMeter()
    meter.set_forecast(0, 0.5)
    assert meter.take(report(0, 0, 9.0, first=True)).ratio == 18.0
    assert meter.reports() == () and meter.now(0).measured_s is None
    assert meter.summary()[0].reports == 0


def test_an_epoch_is_measured_when_every_stage_of_its_plan_has_enough_reports() -> None:
    meter = StepMeter()
    first, second = (cells[0].workers[0] for cells in PLAN.placement.stages)
    for step in range(ENOUGH):
        meter.take(report(first, step))
        meter.take(report(second, step, first=step == 0))
    assert not meter.is_measured(0), "nobody has said what the stages are"
    meter.follow(PLAN)
    assert not meter.is_measured(0), "of the second stage one step is missing"
    meter.take(report(PLAN.placement.stages[1][1].workers[0], 7))
    assert meter.is_measured(0)
    assert not meter.is_measured(1)
    meter.follow(replace(PLAN, epoch=1))
    assert not meter.is_measured(1)


def test_what_a_plan_predicts_is_the_forecast_of_its_epoch_until_another_one_is_set() -> None:
    meter = StepMeter()
    plan = replace(PLAN, predicted_s=0.5)
    meter.follow(plan)
    assert meter.predicted_s(0) == 0.5
    meter.set_forecast(0, 0.75)
    meter.follow(plan)
    assert meter.predicted_s(0) == 0.75
    meter.follow(replace(plan, epoch=1))
    assert (meter.predicted_s(0), meter.predicted_s(1)) == (0.75, 0.5)


def test_the_step_time_now_is_the_median_over_the_workers_newest_reports() -> None:
    meter = StepMeter()
    for worker, times in enumerate([(9.0, 1.0), (9.0, 2.0), (9.0, 4.0)]):
        for step, step_s in enumerate(times):
            meter.take(report(worker, step, step_s))
    assert (meter.now(0).reports, meter.now(0).measured_s) == (3, 2.0)
    meter.take(report(0, 2, 3.0, epoch=1))
    assert meter.now(1).measured_s == 3.0


def test_times_are_said_in_words_as_far_as_they_are_known() -> None:
    meter = StepMeter()
    assert meter.now(0).describe() == ""
    meter.set_forecast(0, 0.04)
    assert meter.now(0).describe() == "40.0 ms predicted"
    meter.take(report(0, 1, 0.05))
    assert meter.now(0).describe() == "50.0 ms measured, 40.0 ms predicted, ratio 1.25"
    meter.take(report(0, 1, 31.5, epoch=1))
    assert meter.now(1).describe() == "31.50 s measured"


def test_the_summary_compares_every_epoch_with_its_forecast() -> None:
    meter = StepMeter()
    assert meter.summary() == ()
    meter.set_forecast(0, 1.0)
    for step, step_s in enumerate([1.0, 2.0, 3.0]):
        meter.take(report(0, step, step_s))
    meter.set_forecast(1, 4.0)
    before, after = meter.summary()
    assert (before.epoch, before.reports, before.measured_s, before.ratio) == (0, 3, 2.0, 2.0)
    assert (after.epoch, after.reports, after.measured_s, after.ratio) == (1, 0, None, None)


@pytest.mark.parametrize("late", [report(0, 2, 99.0), report(0, 2, 99.0, first=True)])
def test_what_comes_late_does_not_change_an_epoch_that_is_over(late: StepReport) -> None:
    meter = StepMeter()
    meter.set_forecast(0, 1.0)
    meter.take(report(0, 1, 2.0))
    meter.take(report(0, 3, 3.0, epoch=1))
    before = meter.summary()
    assert meter.take(late).predicted_s == 1.0
    meter.set_forecast(0, 5.0)
    assert meter.summary() == before
    assert {kept.step for kept in meter.reports()} == {1, 3}


def test_an_epoch_begins_with_its_plan_whatever_a_worker_says() -> None:
    meter = StepMeter()
    meter.follow(PLAN)
    meter.take(report(0, 1, epoch=7))
    meter.take(report(0, 1))
    assert [(kept.epoch, kept.step) for kept in meter.reports()] == [(0, 1)]


def test_memory_is_bounded_however_long_the_job_runs() -> None:
    meter = StepMeter()
    for epoch in range(2 * EPOCHS):
        meter.take(report(0, epoch, epoch=epoch))
    assert len(meter.reports()) == KEPT
    assert len(meter.summary()) == EPOCHS + 1


@pytest.mark.parametrize("strange", [{"worker": 9}, {"last_layer": 5}, {"cells": 1}, {"clock": 5e-324}])
def test_a_report_that_does_not_fit_the_plan_is_not_kept(strange: dict[str, Any]) -> None:
    meter = StepMeter()
    meter.follow(PLAN)
    meter.set_forecast(0, 0.5)
    assert meter.take(replace(report(0, 1), **strange)).predicted_s == 0.5
    assert meter.reports() == ()


def test_a_fit_takes_the_newest_of_workers_spread_over_all() -> None:
    meter = StepMeter()
    for worker in range(10):
        for step in range(4):
            meter.take(report(worker, step))
    assert [(each.worker, each.step) for each in meter.sample(5)] == [
        (worker, step) for worker in range(0, 10, 2) for step in (2, 3)
    ]
    assert len(meter.sample(100)) == 20
