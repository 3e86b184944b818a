"""At ``--elastic-consistency bitwise`` a run to which anything happens is equal to the undisturbed one, bit for bit.

Layouts, features and events are random, and follow from a seed: ``bitwise_cases.py`` for a job that goes on to its end,
``bitwise_lives.py`` for one that is started again from its checkpoints, on other grids. All with dropout.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_elas.spec.faults import parse_fault
from tests.fault.bitwise import assert_equal, assert_lives_equal
from tests.fault.bitwise_cases import Case, draw_case, undisturbed
from tests.fault.bitwise_lives import EXIT, WORKERS, Life, calm_case, draw_lives
from tests.fault.migrations import answers, events
from tests.fault.runs import Run
from tests.fault.warm_launcher import WarmLauncher

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

SEEDS = range(10)
QUICK = 1
"""The seed of the quick test."""
SEEDS_OF_LIVES = range(12)
CODES = {"": 0, EXIT: 0, WORKERS: 3, "SIGKILL": -9, "SIGTERM": 143}


def train(case: Case, documents: Path, folder: Path, warm: WarmLauncher, *flags: str, **environ: str) -> Run:
    """Run the case's job to its end."""
    data = tuple(flag.replace("DOCUMENTS", str(documents)) for flag in case.job.data_flags)
    return replace(case.job, data_flags=data).run(
        folder, warm, *case.asked, faults=case.faults, flags=flags, environ={"ELAS_TEST_TRACE": "1", **environ}
    )


def live(life: Life, documents: Path, folder: Path, warm: WarmLauncher, saved: Path) -> Run:
    """Start the job, from what the last life has left in ``saved``, and let the life come to its end."""
    for iteration in life.saves.failing:
        if not (place := saved / f"iter_{iteration:07d}").exists():
            saved.mkdir(exist_ok=True)
            place.write_text("a file where the folder belongs")
    flags = [
        *life.flags,
        f"--save={saved}",
        *([f"--load={saved}", "--exit-on-missing-checkpoint"] if life.begin else []),
    ]
    environ = {"ELAS_TEST_KILL_JOB": ";".join(life.kills), "ELAS_TEST_KILL_CONTROLLER": ",".join(life.controller)}
    return train(life.case, documents, folder, warm, *flags, **environ)


def assert_lived(life: Life, run: Run, saved: Path) -> None:
    """All that should happen has, and it ended as it should, from where the next life begins."""
    told = run.output[-8000:]
    assert run.code == CODES[life.how.split()[0 if life.how.startswith(WORKERS) else -1] if life.how else ""], told
    assert sorted(run.fired) == sorted(life.case.faults), told
    assert sorted(re.findall(r"killed before step \d+: (.*)", run.output)) == sorted(life.kills), told
    assert sorted(re.findall(r"controller killed: (\S+)", run.output)) == sorted(life.controller), told
    assert len(answers(run)) == len(life.case.asked), f"answered: {answers(run)}"
    recoveries = events(run, "recovery")
    lost = {each["worker"] for event in recoveries for each in event["lost"]}
    assert lost == life.lost, f"lost were {lost}"
    returns = [event["checkpoint"] for event in recoveries if event["checkpoint"] is not None]
    assert returns == list(life.returns), f"back to the checkpoints of {returns}"
    failed = {int(match) for match in re.findall(r"could not save the checkpoint of iteration (\d+)", run.output)}
    assert failed == {each for each in life.saves.failing if life.begin < each <= life.end}, f"not saved: {failed}"
    assert int((saved / "latest_checkpointed_iteration.txt").read_text()) == life.goes_on_from


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
@pytest.mark.parametrize("seed", SEEDS_OF_LIVES)
def test_started_again_from_checkpoints_no_bit_changes(
    seed: int, documents: Path, warm: WarmLauncher, tmp_path: Path
) -> None:
    lives, saved = draw_lives(seed), tmp_path / "saved"
    print("\n".join(map(str, lives)))
    calm = train(calm_case(lives), documents, tmp_path / "calm", warm)
    runs = []
    for number, life in enumerate(lives):
        runs.append(live(life, documents, tmp_path / f"life{number}", warm, saved))
        assert_lived(life, runs[-1], saved)
    assert_lives_equal(runs, [life.begin for life in lives], calm)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 4, 9])
def test_two_undisturbed_runs_are_equal(seed: int, documents: Path, warm: WarmLauncher, tmp_path: Path) -> None:
    case = undisturbed(draw_case(seed))
    print(case)
    one, other = (train(case, documents, tmp_path / name, warm) for name in ("one", "other"))
    assert_equal(other, one)
