"""Every phase x kind of fault x role once on two grids, compared with one undisturbed run of each.

``make campaign`` runs all of it, well over a hundred jobs; ``make test`` a few jobs that have every phase and kind.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_elas.spec.errors import ExitCode
from megatron_elas.spec.faults import MIGRATION_PHASES, RECOVERY_PHASES, FaultKind, FaultPhase
from tests.fault.campaign import STEPS, Job, Role, Target, all_targets, pack
from tests.fault.runs import Run
from tests.fault.scenarios import KINDS, Scenario, judge_scenario, run_scenario
from tests.fault.settings import Outlook, Setting
from tests.fault.warm_launcher import WarmLauncher

SETTINGS = (Setting(pipeline=2, data=2), Setting(tensor=2, pipeline=2, data=2))
PHASES = tuple(phase for phase in FaultPhase if phase not in MIGRATION_PHASES)
"""Of steps and recoveries; migrations have tests of their own."""
process = [pytest.mark.process, pytest.mark.timeout(400)]


def full(setting: Setting) -> list[Job]:
    """The jobs of the whole campaign."""
    return pack(setting, all_targets(setting, PHASES))[0]


def quick(setting: Setting) -> list[Job]:
    """A few jobs: each phase and each kind once or more, with roles in turn."""
    roles = [Role.LOGGING, Role.WORKER_0, Role.FIRST_STAGE, Role.LAST_STAGE]
    kinds = list(KINDS)
    targets = [
        Target(phase=phase, kind=kinds[number % len(kinds)], role=roles[number // 2 % len(roles)])
        for number, phase in enumerate(PHASES)
    ]
    if setting.tensor > 1:
        targets = [Target(phase=FaultPhase.RECOVERY, kind=FaultKind.KILL, role=Role.SPARE)]
    return pack(setting, targets)[0]


def named(make: Callable[[Setting], list[Job]], *marks: pytest.MarkDecorator) -> list[object]:
    """Parameters of a test."""
    return [
        pytest.param(job, id=f"{job.scenario.setting}: {' '.join(map(str, job.targets))}", marks=[*process, *marks])
        for setting in SETTINGS
        for job in make(setting)
    ]


@pytest.fixture(scope="module")
def undisturbed(warm: WarmLauncher, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Setting], Run]:
    """The run of a setting without a fault."""
    runs: dict[Setting, Run] = {}

    def run(setting: Setting) -> Run:
        if setting not in runs:
            calm = Scenario(setting=setting, faults=(), steps=STEPS)
            runs[setting] = run_scenario(calm, tmp_path_factory.mktemp("calm"), warm)
        return runs[setting]

    return run


def assert_survived(job: Job, warm: WarmLauncher, undisturbed: Callable[[Setting], Run], folder: Path) -> None:
    run = run_scenario(job.scenario, folder, warm)
    verdict = judge_scenario(job.scenario, run, undisturbed(job.scenario.setting))
    assert verdict.good, f"{job.scenario}\n{verdict}\n{run.output[-4000:]}"


@pytest.mark.parametrize("job", named(quick))
def test_any_phase_kind_and_role(
    job: Job, warm: WarmLauncher, undisturbed: Callable[[Setting], Run], tmp_path: Path
) -> None:
    assert_survived(job, warm, undisturbed, tmp_path)


@pytest.mark.parametrize("job", named(full, pytest.mark.slow))
def test_every_phase_kind_and_role(
    job: Job, warm: WarmLauncher, undisturbed: Callable[[Setting], Run], tmp_path: Path
) -> None:
    assert_survived(job, warm, undisturbed, tmp_path)


# ---------------------------------------------------------------- of the campaign itself


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_every_target_is_struck_once(setting: Setting) -> None:
    targets = all_targets(setting, PHASES)
    jobs, left = pack(setting, targets)
    assert not left
    struck = [target for job in jobs for target in job.targets]
    assert sorted(map(str, struck)) == sorted(map(str, targets))
    for job in jobs:
        phases = [(fault.kind, fault.phase) for fault in job.scenario.faults]
        assert all((target.kind, target.phase) in phases for target in job.targets)
        # Only the loss of an owner with its backup ends a job.
        fatal = any(t.role is Role.BACKUP and t.phase in RECOVERY_PHASES for t in job.targets)
        assert (job.scenario.code is not ExitCode.FINISHED) == fatal


def test_the_quick_ones_have_every_phase_and_kind() -> None:
    targets = [target for setting in SETTINGS for job in quick(setting) for target in job.targets]
    assert {target.phase for target in targets} == {*PHASES}
    assert {target.kind for target in targets} == {*KINDS}
    assert {target.role for target in targets} == {*Role} - {Role.BACKUP}


def test_an_outlook_knows_who_is_left_and_when_a_job_ends() -> None:
    outlook = Outlook.of(Setting(tensor=2, pipeline=2, data=2))
    assert outlook.without(1).spares == (0,) and outlook.without(1).seated == (2, 3, 4, 5, 6, 7)
    assert outlook.without(1).without(0).exit_code is ExitCode.FINISHED, "the mate is a spare, its copy is at worker 2"
    after = outlook.without(1).recovered
    assert after.plan.epoch == 1 and after.exit_code is ExitCode.FINISHED
    three_rows = Outlook.of(Setting(pipeline=1, data=3))
    (backup,) = three_rows.backups_of(0)
    assert three_rows.without(0).without(backup).exit_code is ExitCode.STATE_INVALID
    assert three_rows.without(0).recovered.without(backup).exit_code is ExitCode.FINISHED
