"""The grammar of faults."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.faults import (
    MIGRATION_PHASES,
    PHASES_WITH_MICROBATCH,
    RECOVERY_PHASES,
    Fault,
    FaultKind,
    FaultPhase,
    check_faults,
    explain_unreachable,
    parse_fault,
)

counts = st.integers(0, 10**9)


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    phase = draw(st.sampled_from(FaultPhase))
    microbatch = draw(st.none() | counts) if phase in PHASES_WITH_MICROBATCH else None
    kind = draw(st.sampled_from(FaultKind))
    return Fault(kind=kind, worker=draw(counts), step=draw(counts), phase=phase, microbatch=microbatch)


@given(faults())
def test_the_text_of_a_fault_is_read_back(fault: Fault) -> None:
    assert parse_fault(str(fault)) == fault


def test_the_example_of_the_documentation_is_read() -> None:
    assert parse_fault("kill:worker=3@step=5,phase=forward,microbatch=2") == Fault(
        kind=FaultKind.KILL, worker=3, step=5, phase=FaultPhase.FORWARD, microbatch=2
    )


@pytest.mark.parametrize("phase", FaultPhase)
def test_a_fault_strikes_in_its_step_and_in_a_recovery_also_one_ahead_or_behind(phase: FaultPhase) -> None:
    fault = parse_fault(f"kill:worker=0@step=5,phase={phase}")
    struck = [step for step in range(10) if fault.strikes_at(step, phase)]
    if phase in MIGRATION_PHASES:  # nobody knows when one begins
        assert struck == [5, 6, 7, 8, 9]
    else:
        assert struck == ([4, 5, 6] if phase in RECOVERY_PHASES else [5])
    assert not any(fault.strikes_at(5, other) for other in FaultPhase if other is not phase)


def test_spaces_and_the_order_of_the_place_do_not_matter() -> None:
    assert parse_fault(" stop:worker=1@phase=commit, step=7 ") == parse_fault("stop:worker=1@step=7,phase=commit")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read"),
        ("kill", "cannot be read"),
        ("kill:worker=1", "cannot be read"),
        ("murder:worker=1@step=1,phase=commit", "unknown kind 'murder'"),
        ("kill:worker=1@step=1,phase=lunch", "unknown phase 'lunch'"),
        ("kill:worker=x@step=1,phase=commit", "worker must be a number from 0 up, got 'x'"),
        ("kill:worker=-1@step=1,phase=commit", "worker must be a number"),
        ("kill:worker=1@step=1.5,phase=commit", "step must be a number"),
        ("kill:worker=1@step=²,phase=commit", "step must be a number"),
        ("kill:worker=1@phase=commit", "step is missing"),
        ("kill:rank=1@step=1,phase=commit", "unknown field rank"),
        ("kill:worker=1@step=1,phase=commit,step=2", "step is given twice"),
        ("kill:worker=1@step=1,phase", "'phase' is not name=value"),
        ("kill:worker=1@step=1,phase=commit,microbatch=0", "phase commit has no micro-batches"),
    ],
)
def test_text_that_cannot_be_read_is_bad_usage_and_shows_the_grammar(text: str, words: str) -> None:
    with pytest.raises(BadUsage) as refused:
        parse_fault(text)
    assert words in str(refused.value)
    assert "KIND:worker=W@step=S,phase=P[,microbatch=M]" in str(refused.value)


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_fault(text)
    except BadUsage as error:
        assert len(str(error).splitlines()) == 1, "one sentence, whatever the text holds"


def test_a_fault_of_an_unknown_worker_is_refused() -> None:
    fault = parse_fault("kill:worker=4@step=1,phase=commit")
    check_faults([fault], 5)
    with pytest.raises(BadUsage, match=r"no worker 4, the job has workers 0 to 3$"):
        check_faults([fault], 4)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("step=49,phase=save", None),
        ("step=50,phase=save", "the last step of training is 49"),
        ("step=0,phase=forward,microbatch=7", None),
        ("step=0,phase=forward,microbatch=8", "the last micro-batch that a worker may run in a step is 7"),
        ("step=0,phase=backward,microbatch=8", "the last micro-batch that a worker may run in a step is 7"),
        ("step=0,phase=evaluate,microbatch=8", None),
        ("step=51,phase=recovery-verify", None),
        ("step=52,phase=recovery-verify", "the last step of training is 49"),
        ("step=50,phase=migrate-switch", None),
        ("step=51,phase=migrate-switch", "the last step of training is 49"),
    ],
)
def test_a_fault_whose_place_does_not_exist_is_told(place: str, reason: str | None) -> None:
    fault = parse_fault(f"kill:worker=1@{place}")
    wanted = [] if reason is None else [f"fault '{fault}' will never strike: {reason}"]
    assert explain_unreachable([fault], 50, 8) == wanted
    if fault.step > 0:
        assert explain_unreachable([fault], None, 8) == [], "there is no last step that is known"
