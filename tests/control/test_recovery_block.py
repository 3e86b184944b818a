"""The block that a recovery prints: its numbers add up, and say what happened."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megatron_elas.control.commands import ShowRecovery
from megatron_elas.control.recovery_block import (
    RULE,
    add_step_times,
    facts_of,
    find_slowest,
    format_block,
    phases_ms,
)
from megatron_elas.control.states import Outage
from megatron_elas.control.step_meter import EpochTimes
from megatron_elas.planner.plan import initial_plan, replan
from megatron_elas.spec.events import ActivityFailed, LossReason, WorkerLost
from megatron_elas.spec.report import PHASES, RecoveryReport
from tests.control.jobs import make_job

JOB = make_job(pipeline=2, data=2)
DOMAINS = {worker: f"worker{worker}" for worker in range(4)}
OLD = initial_plan(JOB, DOMAINS)
NEW = replan(JOB, OLD, [3], 1, DOMAINS)
MARKS = {
    "quiesce": 10.0040,
    "settle": 10.0120,
    "groups": 10.0125,
    "restore": 10.0225,
    "rebuild": 10.0230,
    "verify": 10.0250,
    "first_step": 10.0850,
}


def make_loss(at_s: float = 10.002, fault_s: float | None = 10.0) -> WorkerLost:
    return WorkerLost(worker=3, reason=LossReason.EXITED, detail="killed by SIGKILL", at_s=at_s, fault_s=fault_s)


def outage_of(*losses: WorkerLost) -> Outage:
    return Outage(began_in=OLD.placement, plans={0: OLD}, losses=losses)


def make_report(worker: int = 0, **changes: float) -> RecoveryReport:
    return RecoveryReport(worker=worker, epoch=1, resume_step=5, marks_s=MARKS | changes, moved_bytes=1_500_000)


def test_every_phase_ends_where_its_mark_says() -> None:
    lengths = phases_ms(outage_of(make_loss()), make_report(), plan_s=0.003)
    assert lengths == {
        "detect": 2.0,
        "quiesce": 2.0,
        "settle": 5.0,
        "plan": 3.0,
        "groups": 0.5,
        "restore": 10.0,
        "rebuild": 0.5,
        "verify": 2.0,
        "first_step": 60.0,
        "total": 85.0,
    }


def test_planning_that_was_hidden_behind_unwinding_is_not_counted_again() -> None:
    lengths = phases_ms(outage_of(make_loss()), make_report(), plan_s=0.5)
    assert (lengths["settle"], lengths["plan"], lengths["total"]) == (0.0, 8.0, 85.0)


def test_without_a_known_fault_the_clock_starts_at_detection() -> None:
    lengths = phases_ms(outage_of(make_loss(fault_s=None)), make_report(), plan_s=0.0)
    assert (lengths["detect"], lengths["total"]) == (0.0, 83.0)


def test_phases_that_were_not_marked_have_no_length_and_the_sum_stays() -> None:
    report = RecoveryReport(worker=0, epoch=1, resume_step=5, marks_s={"first_step": 10.085})
    lengths = phases_ms(outage_of(make_loss()), report, plan_s=0.003)
    assert (lengths["restore"], lengths["first_step"], lengths["total"]) == (0.0, 83.0, 85.0)


times = st.floats(0, 100)


@given(st.dictionaries(st.sampled_from(PHASES), times), times, st.none() | times, st.floats(0, 10))
def test_the_columns_always_add_up_to_the_total(
    marks: dict[str, float], at_s: float, fault_s: float | None, plan_s: float
) -> None:
    report = RecoveryReport(worker=0, epoch=1, resume_step=5, marks_s=marks)
    lengths = phases_ms(outage_of(make_loss(at_s, fault_s)), report, plan_s)
    tenths = [round(value * 10) for value in lengths.values()]
    assert all(value >= 0 for value in tenths)
    assert sum(tenths[:-1]) == tenths[-1]
    assert list(lengths) == [*PHASES, "total"]


def test_the_slowest_worker_is_the_one_whose_first_step_ended_last() -> None:
    reports = [make_report(0), make_report(1, first_step=10.2), make_report(2)]
    assert find_slowest(reports).worker == 1


def test_the_block_says_who_why_where_and_what_now() -> None:
    outage = Outage(began_in=OLD.placement, plans={0: OLD, 1: NEW}, losses=(make_loss(),))
    text = format_block(outage, NEW, [make_report(0), make_report(1), make_report(2)], plan_s=0.003)
    assert "epoch 1" in text
    assert "worker 3 (stage 1, cell 1, lane 0): exited, killed by SIGKILL" in text
    assert "before   stage 0: [0] [1] | stage 1: [2] [3]" in text
    assert "now      stage 0: [0] [1] | stage 1: [2]" in text
    assert "step 5 on 3 of 4 workers, 85.0 ms after the fault, 4.5 MB moved" in text
    header, numbers = text.splitlines()[-3:-1]
    assert header.split()[1:] == [*PHASES, "total"]
    assert numbers.split("(")[0].split() == ["2.0", "2.0", "5.0", "3.0", "0.5", "10.0", "0.5", "2.0", "60.0", "85.0"]


def test_the_step_time_is_compared_with_that_before_where_there_is_a_forecast() -> None:
    recovery = ShowRecovery(epoch=2, text=f"first\n{RULE}", phases_ms={}, facts={"resume_step": 5})
    measured = EpochTimes(epoch=0, reports=8, measured_s=0.5, predicted_s=0.4)
    unmeasured = EpochTimes(epoch=1, reports=0, measured_s=None, predicted_s=0.6)
    unpredicted = EpochTimes(epoch=2, reports=1, measured_s=0.9, predicted_s=None)
    now = replace(unpredicted, predicted_s=0.8)
    assert add_step_times(recovery, ()) is recovery
    assert add_step_times(recovery, (measured, unmeasured, unpredicted)) is recovery
    block = add_step_times(recovery, (measured, unmeasured, now))
    line = "step     800.0 ms predicted, before 500.0 ms measured, 400.0 ms predicted, ratio 1.25"
    assert block.text == f"first\n{line}\n{RULE}"
    assert block.facts == {
        "resume_step": 5,
        "step_s": {"predicted": 0.8, "predicted_before": 0.4, "measured_before": 0.5},
    }
    alone = add_step_times(recovery, (now,))
    assert alone.text == f"first\nstep     800.0 ms predicted\n{RULE}"
    assert alone.facts["step_s"] == {"predicted": 0.8, "predicted_before": None, "measured_before": None}


def test_the_line_of_the_step_time_goes_before_the_last_one() -> None:
    outage = Outage(began_in=OLD.placement, plans={0: OLD}, losses=(make_loss(),))
    text = format_block(outage, NEW, [make_report()], plan_s=0.003)
    recovery = ShowRecovery(epoch=1, text=text, phases_ms={}, facts={})
    now = EpochTimes(epoch=1, reports=0, measured_s=None, predicted_s=0.25)
    assert add_step_times(recovery, (now,)).text.splitlines() == [
        *text.splitlines()[:-1],
        "step     250.0 ms predicted",
        text.splitlines()[-1],
    ]


def test_what_was_left_out_is_named_without_a_loss() -> None:
    failure = ActivityFailed(worker=2, detail="could not save the checkpoint of iteration 4: OSError: full", at_s=10.0)
    outage = Outage(began_in=OLD.placement, plans={0: OLD}, failures=(failure,))
    text = format_block(outage, OLD, [make_report()], plan_s=0.0)
    assert "left out worker 2 could not save the checkpoint of iteration 4: OSError: full" in text
    assert "lost " not in text and "after it was noticed" in text and "on 4 of 4 workers" in text
    assert facts_of(outage, OLD, make_report())["left_out"] == [{"worker": 2, "detail": failure.detail}]


def test_the_facts_for_programs_are_those_of_the_block() -> None:
    job = make_job(pipeline=1, data=2, tensor=2)
    old = initial_plan(job, DOMAINS)
    new = replan(job, old, [3], 1, DOMAINS)
    outage = Outage(began_in=new.placement, plans={1: new}, losses=(replace(make_loss(), worker=2), make_loss()))
    assert facts_of(outage, new, make_report()) == {
        "lost": [
            {
                "worker": worker,
                "stage": None,
                "cell": None,
                "lane": None,
                "reason": "exited",
                "detail": "killed by SIGKILL",
            }
            for worker in (2, 3)
        ],
        "left_out": [],
        "before": "stage 0: [0,1] | spare: 2",
        "after": "stage 0: [0,1] | spare: 2",
        "failed_checks": [],
        "checkpoint": None,
        "resume_step": 5,
        "beside": {"background_s": 0.0},
        "survivors": [0, 1, 2],
    }
    outage = Outage(began_in=OLD.placement, plans={0: OLD}, losses=(make_loss(),))
    [loss] = facts_of(outage, NEW, make_report())["lost"]
    assert (loss["stage"], loss["cell"], loss["lane"]) == (1, 1, 0)
