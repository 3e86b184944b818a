"""A job says how long its steps take, on every worker, before and after a loss, and trains as it did."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_elas.planner.plan import initial_plan, replan
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.step_report import StepReport, read_step_reports
from tests.fault.conftest import GRID
from tests.fault.runs import STEPS, Run, assert_same_training, run_job

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

JOB = JobSpec(
    tensor_parallel=1, pipeline_parallel=2, data_parallel=2, micro_batch_size=1, num_microbatches=8, stage_layers=(2, 2)
)
LOST, AT = 2, 8
FAULT = f"kill:worker={LOST}@step={AT},phase=backward,microbatch=1"
OFTEN = "--heartbeat-interval-s=0.02"
"""Most steps are told, though they take only some hundredths of a second."""


def assert_fits(report: StepReport, plan: ElasticPlan) -> None:
    """The report says what the plan gives its worker to do, and its parts find room in the step."""
    seat = plan.placement.seat(report.worker)
    cells = len(plan.placement.stages[seat.stage])
    assert (report.stage, report.cells) == (seat.stage, cells)
    assert (report.first_layer, report.last_layer) == plan.layers[seat.stage]
    items = plan.items_of(report.worker)
    samples = sum(item.samples for item in items)
    # How a lost row's samples are dealt follows from what was measured before; of one cell it changes their items only.
    passes = report.passes[0].passes if plan.epoch else len(items)
    assert samples % passes == 0
    told = {total.kind: (total.passes, total.samples) for total in report.passes}
    none = (0, 0)
    assert told["forward"] == (passes, samples)
    both, split = told.get("backward", none), told.get("input_gradient", none)
    assert (both[0] + split[0], both[1] + split[1]) == (passes, samples)
    assert told.get("weight_gradient", none) == split
    assert report.optimizer_s is not None and report.waited_s is not None
    assert report.optimizer_s > 0 and report.waited_s > 0, "both stages wait for the other"
    assert sum(total.seconds for total in report.passes) + report.optimizer_s + report.waited_s <= report.step_s


def test_every_worker_tells_what_it_computed_under_every_plan(calm: Run, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    run = run_job(tmp_path / "run", GRID, workers=4, faults=[FAULT], launcher_flags=[f"--log-dir={logs}", OFTEN])
    output = "".join(path.read_text() for path in sorted(logs.glob("worker*.log")))
    run = replace(run, output=run.output + output)
    assert run.fired == [FAULT], run.output[-6000:]
    assert_same_training(run, calm)
    assert run.losses[:AT] == calm.losses[:AT]

    before = initial_plan(JOB, {})
    plans = {0: before, 1: replan(JOB, before, [LOST], 1, {})}
    told: dict[tuple[int, int], list[StepReport]] = {}
    for report in read_step_reports(logs / "steps.jsonl"):
        assert_fits(report, plans[report.epoch])
        told.setdefault((report.epoch, report.worker), []).append(report)
    assert told.keys() == {(epoch, worker) for epoch, plan in plans.items() for worker in plan.placement.workers}
    for (epoch, worker), reports in told.items():
        steps = [report.step for report in reports]
        assert steps == sorted(set(steps)), (epoch, worker)
        first = 0 if epoch == 0 else AT
        assert [report.first for report in reports] == [step == first for step in steps]
        assert [report.again for report in reports] == [epoch == 1 and step == AT for step in steps]
        assert len(steps) > 1, "the newest is told with each heartbeat"
        assert epoch == 0 or steps[-1] == STEPS - 1, "the last step is told before the job ends"
