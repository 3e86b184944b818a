"""At ``--elastic-consistency bitwise`` a run to which anything happens is equal to the undisturbed one, bit for bit.

Layouts, features and events are random, and follow from a seed (``bitwise_cases.py``). All with dropout.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_elas.spec.faults import parse_fault
from tests.fault.bitwise import assert_equal
from tests.fault.bitwise_cases import Case, draw_case, undisturbed
from tests.fault.migrations import answers, events
from tests.fault.runs import Run
from tests.fault.warm_launcher import WarmLauncher

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

SEEDS = range(10)
QUICK = 1
"""The seed of the quick test."""


def train(case: Case, documents: Path, folder: Path, warm: WarmLauncher) -> Run:
    """Run the case's job to its end."""
    flags = tuple(flag.replace("DOCUMENTS", str(documents)) for flag in case.job.data_flags)
    return replace(case.job, data_flags=flags).run(
        folder, warm, *case.asked, faults=case.faults, environ={"ELAS_TEST_TRACE": "1"}
    )


def assert_happened(case: Case, run: Run) -> None:
    """Every fault has fired, and each was recovered from; what was asked for was answered."""
    assert sorted(run.fired) == sorted(case.faults), run.output[-8000:]
    assert len(answers(run)) == len(case.asked), f"answered: {answers(run)}"
    lost = {each["worker"] for event in events(run, "recovery") for each in event["lost"]}
    assert all(event["lost"] for event in events(run, "recovery")), "a recovery in which nobody was lost"
    assert lost == {parse_fault(fault).worker for fault in case.faults}, "somebody else was lost"
    assert events(run, "recovery") or events(run, "migration"), f"nothing happened; answers: {answers(run)}"


@pytest.mark.parametrize("seed", [pytest.param(s, marks=() if s == QUICK else pytest.mark.slow) for s in SEEDS])
def test_whatever_happens_no_bit_changes(seed: int, documents: Path, warm: WarmLauncher, tmp_path: Path) -> None:
    case = draw_case(seed)
    print(case)
    assert case.faults or case.asked
    calm = train(undisturbed(case), documents, tmp_path / "calm", warm)
    run = train(case, documents, tmp_path / "run", warm)
    assert_happened(case, run)
    assert_equal(run, calm)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 4, 9])
def test_two_undisturbed_runs_are_equal(seed: int, documents: Path, warm: WarmLauncher, tmp_path: Path) -> None:
    case = undisturbed(draw_case(seed))
    print(case)
    one, other = (train(case, documents, tmp_path / name, warm) for name in ("one", "other"))
    assert_equal(other, one)
