"""The planner as the controller runs it: whose policy plans, and what is said when it cannot go on."""

from __future__ import annotations

import pytest

from megatron_elas.cli.launch_flags import read_options
from megatron_elas.control.commands import MakePlan
from megatron_elas.control.events import PlanMade, PlanRefused
from megatron_elas.control.service import make_plan
from megatron_elas.planner.plan import initial_plan
from megatron_elas.spec.errors import BadUsage, ExitCode
from megatron_elas.spec.job import JobSpec

JOB = JobSpec(
    tensor_parallel=1, pipeline_parallel=2, data_parallel=2, micro_batch_size=1, num_microbatches=4, stage_layers=(2, 2)
)


def after(*lost: int) -> MakePlan:
    return MakePlan(job=JOB, epoch=1, old=initial_plan(JOB, {}), lost=lost, domains={})


def test_the_job_is_planned_for_by_the_policy_that_was_launched() -> None:
    ours, theirs = make_plan(after(0)), make_plan(after(0), policy="torchft")
    assert isinstance(ours, PlanMade) and ours.plan.placement.spares == ()
    assert isinstance(theirs, PlanMade) and theirs.plan.placement.spares == (2,)


def test_a_policy_that_cannot_go_on_ends_the_job_with_a_sentence() -> None:
    assert isinstance(make_plan(after(0, 1)), PlanMade)
    refused = make_plan(after(0, 1), policy="recycle")
    assert isinstance(refused, PlanRefused) and refused.exit_code == ExitCode.GAVE_UP
    assert "stage 0 lost all its cells" in refused.sentence


def test_the_policy_is_a_flag_of_elasrun() -> None:
    line = ["--nproc-per-node=4", "-m", "megatron_elas.pretrain_gpt"]
    assert read_options(line, {}).launch.policy == "ours"
    assert read_options(["--policy=recycle", *line], {}).launch.policy == "recycle"
    with pytest.raises(BadUsage, match="invalid choice: 'oobleck'"):
        read_options(["--policy", "oobleck", *line], {})
