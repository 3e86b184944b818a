"""What the tests think will become of a job is what the job's own planner makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_elas.spec.step_report import read_step_reports
from tests.fault.runs import run_job
from tests.fault.settings import BY_PROFILE, Outlook, Setting

pytestmark = [pytest.mark.process, pytest.mark.timeout(500), pytest.mark.slow]


@pytest.mark.parametrize(
    ("setting", "lost"),
    [
        pytest.param(Setting(pipeline=3, data=2, replicas=2, bf16=True, recompute=True), (2, 3), id="stage"),
        pytest.param(Setting(tensor=2, pipeline=2, data=2, tied=True, sequence_parallel=True), (5, 2), id="spares"),
    ],
)
def test_an_outlook_has_the_plans_of_the_job(setting: Setting, lost: tuple[int, ...], tmp_path: Path) -> None:
    faults = [f"kill:worker={worker}@step={4 + 6 * number},phase=forward" for number, worker in enumerate(lost)]
    logs = tmp_path / "logs"
    run = run_job(
        tmp_path / "run", setting.flags, workers=setting.workers, faults=faults, model=setting.model,
        batch=setting.batch, launcher_flags=(*BY_PROFILE, f"--log-dir={logs}", "--heartbeat-interval-s=0.1"),
        timeout_s=200,
    )  # fmt: skip
    output = "".join(path.read_text() for path in sorted(logs.glob("worker*.log")))
    run = replace(run, output=run.output + output)
    assert run.code == 0 and sorted(run.fired) == sorted(faults), run.output[-8000:]
    predicted = {report.epoch: report.predicted_s for report in read_step_reports(logs / "steps.jsonl")}
    outlook = Outlook.of(setting)
    for worker in lost:
        assert predicted[outlook.plan.epoch] == outlook.plan.predicted_s
        outlook = outlook.without(worker).recovered
        assert f"now      {outlook.plan.placement.describe()}" in run.output
    assert predicted[outlook.plan.epoch] == outlook.plan.predicted_s
