"""A job traces its steps around a loss pass by pass, which changes nothing of its training and takes it no longer."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_elas.cli.chrome_trace import make_chrome_trace
from megatron_elas.cli.report_facts import read_job_log
from megatron_elas.cli.report_traces import shown_steps
from megatron_elas.planner.plan import initial_plan
from megatron_elas.spec.step_report import read_step_reports
from megatron_elas.spec.step_trace import KINDS, StepTrace, read_step_traces
from tests.fault.conftest import GRID
from tests.fault.runs import MODEL, Run, assert_same_training, launcher, run_command, run_job
from tests.fault.test_steps_are_measured import JOB, OFTEN

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(500)]

LOST, AT = 2, 8
FAULT = f"kill:worker={LOST}@step={AT},phase=backward,microbatch=1"
ASKED = 3
ALTERNATING = Path(__file__).parent / "alternating_tracer.py"
PAIRS = 45
"""Steps with and without tracing; ``steps.jsonl`` takes the first 100 reports of a worker."""


def assert_whole(trace: StepTrace) -> None:
    """One thing at a time, within the step; every item once forward and once backward; an exchange, an update."""
    assert all(before.end_s <= after.start_s for before, after in pairwise(trace.spans))
    assert trace.spans[0].start_s >= 0 and trace.spans[-1].end_s <= trace.step_s + 1e-6
    assert trace.left_out == 0
    passes = {kind: [span.item for span in trace.spans if span.kind == kind] for kind in KINDS}
    forward, split = passes["forward"], passes["weight_gradient"]
    assert len(set(forward)) == len(forward) > 0
    assert sorted(passes["backward"] + passes["input_gradient"]) == sorted(forward)
    assert sorted(passes["input_gradient"]) == sorted(split)
    cells = 1 if trace.epoch and trace.stage == 1 else 2
    assert sum(span.samples for span in trace.spans if span.kind == "forward") == 8 // cells
    if trace.epoch == 0:
        assert forward == [item.number for item in initial_plan(JOB, {}).items[trace.stage][trace.cell]]
    assert passes["exchange"] and passes["optimizer"]


def test_steps_before_and_after_a_loss_are_traced_by_all_who_live(calm: Run, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    run = run_job(
        tmp_path / "run", (*GRID, f"--elastic-trace-steps={ASKED}"), workers=4, faults=[FAULT], timeout_s=200,
        launcher_flags=[f"--log-dir={logs}", OFTEN],
    )  # fmt: skip
    output = "".join(path.read_text() for path in sorted(logs.glob("worker*.log")))
    run = replace(run, output=run.output + output)
    assert run.fired == [FAULT], run.output[-6000:]
    assert_same_training(run, calm)

    traces = read_step_traces(logs / "traces.jsonl")
    for trace in traces:
        assert_whole(trace)
    told = {(epoch, step): {t.worker for t in traces if (t.epoch, t.step) == (epoch, step)}
            for epoch, step in {(t.epoch, t.step) for t in traces}}  # fmt: skip
    everybody, living = {0, 1, 2, 3}, {0, 1, 3}
    assert told == {
        (0, 1): everybody, (0, ASKED): everybody, (0, 6): everybody, (0, AT - 1): living,
        (1, AT + 1): living, (1, AT + 6): living,
    }  # fmt: skip
    assert len(traces) == sum(map(len, told.values())), "each is told once"
    # All on this machine's clock: of a step, nobody is done before the last one has begun.
    for key in told:
        own = [t for t in traces if (t.epoch, t.step) == key]
        assert max(t.began_s for t in own) < min(t.began_s + t.end_s for t in own)

    log = read_job_log(logs)
    before, after = shown_steps(log)
    assert (before.epoch, after.epoch, after.step) == (0, 1, AT + 1) and before.step in (6, AT - 1)
    assert [cell.trace.worker for cell in before.cells if cell.lost] == [LOST]
    assert [cell.trace.worker for cell in after.cells] == [0, 1, 3] and len(after.gone) == 1
    events = make_chrome_trace(log)["traceEvents"]
    assert sum(event.get("cat") == "forward" for event in events) == sum(
        span.kind == "forward" for trace in traces for span in trace.spans
    )
    assert {event["cat"] for event in events if event["ph"] == "i"} == {"loss"}


def test_steps_before_and_after_layers_move_are_traced(calm: Run, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    run = run_job(
        tmp_path / "run", (*GRID, "--elastic-migration=async"), workers=4, timeout_s=200,
        launcher_flags=[f"--log-dir={logs}", OFTEN, "--rebalance=5:3,1"],
    )  # fmt: skip
    output = "".join(path.read_text() for path in sorted(logs.glob("worker*.log")))
    run = replace(run, output=run.output + output)
    assert run.code == 0, run.output[-6000:]
    assert run.losses == pytest.approx(calm.losses, rel=1e-5) and run.samples == calm.samples
    log = read_job_log(logs)
    (migration,) = log.migrations
    before, after = shown_steps(log)
    assert (before.epoch, after.epoch) == (0, 1) and after.why == "after the migration of layer 2 from stage 1 to 0"
    assert before.step < migration.resume_step < after.step == migration.resume_step + 1
    assert before.layers == ((0, 2, 2), (2, 4, 2)) and after.layers == ((0, 3, 2), (3, 4, 2))
    for step in (before, after):
        assert [cell.trace.worker for cell in step.cells if cell.same_step] == [0, 1, 2, 3]
        for cell in step.cells:
            assert all(one.end_s <= other.start_s for one, other in pairwise(cell.trace.spans))
            assert sum(span.samples for span in cell.trace.spans if span.kind == "forward") == 4


def test_tracing_takes_no_time(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    command = [
        *launcher(4), f"--log-dir={logs}", OFTEN, "--preload=megatron_elas.pretrain_gpt:preload", str(ALTERNATING),
        *MODEL, f"--train-iters={2 * PAIRS}", "--global-batch-size=8", "--elastic", *GRID,
    ]  # fmt: skip
    run = run_command(command, tmp_path / "run", (), 200)
    assert run.code == 0, run.output[-6000:]
    times: dict[bool, list[float]] = {True: [], False: []}
    for report in read_step_reports(logs / "steps.jsonl"):
        if report.step >= 4:
            times[report.step % 2 == 0].append(report.step_s)
    assert min(map(len, times.values())) > PAIRS
    assert {trace.step % 2 for trace in read_step_traces(logs / "traces.jsonl")} == {0}
    # The quarter that others on the machine have disturbed least.
    quick = {traced: statistics.quantiles(own)[0] for traced, own in times.items()}
    ratio = quick[True] / quick[False]
    print(f"step time with tracing / without: {ratio:.3f}")
    assert ratio < 1.1, "on a busy machine it differs by some hundredths from 1"
