"""Jobs on emulated accelerators train as ever through losses, and their steps take the time that schedules predict."""

from __future__ import annotations

import datetime
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_elas.planner.job_costs import JobCosts
from megatron_elas.planner.plan import initial_plan, predict_step_s, replan
from megatron_elas.planner.time_model import make_time_model
from megatron_elas.spec.emulation import EmulatedTime
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.job_profile import JobProfile, load_job
from megatron_elas.spec.plan import ElasticPlan
from tests.fault.runs import Run, assert_nothing_stale, assert_same_training, run_job
from tests.fault.settings import BY_PROFILE
from tests.fault.test_a_stage_is_lost import assert_same_model
from tests.schedule.plan_orders import make_orders

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]

TIME = EmulatedTime(hardware="npu-96", model="llama2-7b", speed=4.0)
FLAGS = (
    f"--elastic-emulate={TIME.hardware}",
    f"--elastic-emulate-model={TIME.model}",
    f"--elastic-emulate-speed={TIME.speed}",
)
BATCH, AT = 8, 8
STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+)\] iteration +(\d+)/")
OFF = 0.1
"""How far the median step may be from the prediction on a machine that others use too; alone it is 0.002."""


def describe(stages: int, rows: int) -> JobSpec:
    return JobSpec(
        tensor_parallel=1,
        pipeline_parallel=stages,
        data_parallel=rows,
        micro_batch_size=1,
        num_microbatches=BATCH,
        stage_layers=(4 // stages,) * stages,
        split_backward=True,
    )


def costs_of(job: JobSpec) -> JobCosts:
    """That the job plans with, before it has measured anything."""
    model = load_job("llama2-7b")
    own = JobProfile(name="own", spec=job, shape=replace(model.shape, layers=job.stage_layers), training=model.training)
    return replace(make_time_model(own, TIME).costs, clock=None)


def predict_s(job: JobSpec, plan: ElasticPlan) -> float:
    """Seconds of a step."""
    return predict_step_s(job, plan, costs_of(job))


def step_times_s(run: Run) -> dict[int, float]:
    """From the line of each iteration to that of the next one."""
    stamps = {int(number): datetime.datetime.fromisoformat(text) for text, number in STAMP.findall(run.output)}
    return {i: (stamps[i + 1] - stamps[i]).total_seconds() for i in stamps if i + 1 in stamps}


def assert_takes(run: Run, steps: range, predicted_s: float) -> None:
    """The median of these iterations."""
    times = step_times_s(run)
    measured_s = statistics.median(times[i] for i in steps)
    assert measured_s == pytest.approx(predicted_s, rel=OFF), f"{times}, predicted {predicted_s}"


def test_a_replica_is_lost(tmp_path: Path) -> None:
    job, fault = describe(2, 2), f"kill:worker=3@step={AT},phase=forward,microbatch=1"
    flags = ("--pipeline-model-parallel-size=2",)
    calm = run_job(tmp_path / "calm", flags, workers=4)
    run = run_job(tmp_path / "run", (*flags, *FLAGS), workers=4, faults=(fault,), launcher_flags=BY_PROFILE)
    assert run.fired == [fault]
    assert_same_training(run, calm)
    assert_nothing_stale(run)
    plan = initial_plan(job, {})
    assert_takes(run, range(2, AT), predict_s(job, plan))
    assert_takes(run, range(AT + 2, 16), predict_s(job, replan(job, plan, (3,), 1, {}, costs_of(job))))


def test_orders_of_a_plan_take_the_time_that_is_predicted(tmp_path: Path) -> None:
    job, flags = describe(4, 1), ("--pipeline-model-parallel-size=4",)
    calm = run_job(tmp_path / "calm", flags, workers=4)
    run = run_job(tmp_path / "run", (*flags, *FLAGS), workers=4, environ={"ELAS_TEST_ORDERS": "split"})
    assert all("W" in record["order"] for record in run.records("final").values())
    assert_same_training(run, calm)
    plan = initial_plan(job, {})
    ordered = replace(plan, orders=make_orders(plan.items, "split"))
    assert predict_s(job, ordered) < 0.95 * predict_s(job, plan), (
        "in the order of the plan without one it would be as fast"
    )
    assert_takes(run, range(2, 16), predict_s(job, ordered))


def test_a_stage_is_lost(tmp_path: Path) -> None:
    job, fault = describe(4, 1), f"kill:worker=2@step={AT},phase=backward,microbatch=1"
    flags = ("--pipeline-model-parallel-size=4",)
    calm = run_job(tmp_path / "calm", flags, workers=4)
    run = run_job(tmp_path / "run", (*flags, *FLAGS), workers=4, faults=(fault,))
    assert run.fired == [fault]
    assert_same_model(run, calm)
    assert_nothing_stale(run)
    before_s = predict_s(job, initial_plan(job, {}))
    assert_takes(run, range(2, AT), before_s)
    after_s = statistics.median(step_times_s(run)[i] for i in range(AT + 2, 16))
    assert after_s > 1.2 * before_s, "one of the stages has twice the layers"
