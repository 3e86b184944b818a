"""When costs are fitted to measured steps, what a failing fit does, and what it costs to hear of a step."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from megatron_elas.config import ControlTimeouts
from megatron_elas.control.launch import Launch
from megatron_elas.control.outlook import Outlook
from megatron_elas.control.step_meter import KEPT
from megatron_elas.planner.plan import initial_plan, replan
from megatron_elas.spec.job_profile import JobProfile, load_job
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.step_report import PassTotal, StepReport


def make_profile(data: int = 2) -> JobProfile:
    profile = load_job("llama2-7b").with_grid(pipeline_parallel=2, data_parallel=data, num_microbatches=8 * data)
    return replace(profile, spec=replace(profile.spec, tensor_parallel=1, stage_layers=profile.shape.layers))


PROFILE = make_profile()
PLAN = initial_plan(PROFILE.spec, {})
LAUNCH = Launch(nnodes=1, workers_per_node=4, timeouts=ControlTimeouts(), cluster="npu-96")


def make_report(plan: ElasticPlan, worker: int, step: int, step_s: float = 9.0) -> StepReport:
    stage = plan.placement.seat(worker).stage
    first, last = plan.layers[stage]
    return StepReport(
        worker=worker, epoch=plan.epoch, step=step, first_layer=first, last_layer=last,
        cells=len(plan.placement.stages[stage]), step_s=step_s,
        passes=(
            PassTotal(kind="forward", passes=8, samples=8, seconds=2.0),
            PassTotal(kind="backward", passes=8, samples=8, seconds=4.0),
        ),
    )  # fmt: skip


def hear(outlook: Outlook, plan: ElasticPlan, *steps: int) -> None:
    for step in steps:
        for worker in plan.placement.workers:
            outlook.take(make_report(plan, worker, step))


def follow(outlook: Outlook, plan: ElasticPlan = PLAN) -> Outlook:
    outlook.follow(plan, PROFILE)
    return outlook


def test_costs_are_fitted_when_every_stage_was_measured_and_then_after_some_rounds() -> None:
    outlook = follow(Outlook(LAUNCH))
    first, second, third, last = PLAN.placement.workers
    for worker in (first, second, first, second, third):
        outlook.take(make_report(PLAN, worker, 1))
        assert not outlook.is_fit_due, "of the last stage there are no two reports"
    outlook.take(make_report(PLAN, last, 1))
    assert outlook.is_fit_due
    estimate = outlook.reckon(PROFILE)
    asyncio.run(outlook.fit())
    assert not outlook.is_fit_due and outlook.reckon(PROFILE) != estimate
    hear(outlook, PLAN, *range(3, 2 + KEPT))
    assert not outlook.is_fit_due
    hear(outlook, PLAN, 2 + KEPT)
    assert outlook.is_fit_due


def test_the_first_epochs_forecast_is_made_anew_once_and_those_of_later_ones_stay() -> None:
    outlook = follow(Outlook(LAUNCH))
    assert outlook.take(make_report(PLAN, 0, 0)).predicted_s is None  # the plan was made without costs here
    hear(outlook, PLAN, 1, 2)
    asyncio.run(outlook.fit())
    forecast = outlook.take(make_report(PLAN, 0, 3)).predicted_s
    assert forecast is not None and 5.0 < forecast < 15.0  # 6 s of passes, and the pipeline's ends
    hear(outlook, PLAN, *range(4, 5 + KEPT))
    asyncio.run(outlook.fit())
    assert outlook.take(make_report(PLAN, 0, 20)).predicted_s == forecast
    later = replan(PROFILE.spec, PLAN, [3], 1, {}, outlook.reckon(PROFILE))
    follow(outlook, later)
    hear(outlook, later, *range(21, 23 + KEPT))
    assert outlook.is_fit_due
    asyncio.run(outlook.fit())
    assert later.predicted_s is not None
    assert outlook.take(make_report(later, 0, 50)).predicted_s == later.predicted_s


def test_reports_of_before_a_recovery_do_not_make_a_fit_due_after_it() -> None:
    outlook = follow(Outlook(LAUNCH))
    hear(outlook, PLAN, 1)
    follow(outlook, replan(PROFILE.spec, PLAN, [3], 1, {}))
    hear(outlook, PLAN, 2)
    assert not outlook.is_fit_due


def test_a_fit_that_fails_changes_nothing_and_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outlook = follow(Outlook(LAUNCH))
    hear(outlook, PLAN, 1, 2)
    before = outlook.reckon(PROFILE)

    def fail(*arguments: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(outlook._costing, "reckon", fail)
    asyncio.run(outlook.fit())
    assert "plans do not go by measured steps" in caplog.text and "a bug" in caplog.text
    monkeypatch.undo()
    assert outlook.reckon(PROFILE) == before
    hear(outlook, PLAN, *range(3, 4 + KEPT))
    assert outlook.is_fit_due, "it is tried again"


def test_without_a_plan_in_force_a_report_is_kept_by_nobody() -> None:
    outlook = Outlook(LAUNCH)
    report = replace(make_report(PLAN, 0, 1), epoch=10**9)
    assert outlook.take(report) == report
    hear(follow(outlook), PLAN, 1, 2)
    assert outlook.is_fit_due


def test_hearing_of_a_step_takes_as_long_whatever_the_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: reports are looked through only when a fit runs."""
    profile = make_profile(data=64)
    plan = initial_plan(profile.spec, {})
    outlook = Outlook(LAUNCH)
    outlook.follow(plan, profile)
    monkeypatch.setattr(outlook.meter, "reports", lambda *arguments: pytest.fail("all reports were looked through"))
    for worker in plan.placement.workers[:64]:  # one stage only, so that no fit is due
        for step in range(2 * KEPT):
            outlook.take(make_report(plan, worker, step))
            assert not outlook.is_fit_due
