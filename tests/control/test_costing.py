"""What the controller plans with follows the job's own steps once there are some, and the profile before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_elas.config import ControlTimeouts
from megatron_elas.control.costing import Costing
from megatron_elas.control.launch import CostSource, Launch
from megatron_elas.planner.job_costs import JobCosts
from megatron_elas.planner.time_model import make_time_model
from megatron_elas.spec.cluster import load_cluster
from megatron_elas.spec.emulation import EmulatedTime
from megatron_elas.spec.job_profile import load_job
from megatron_elas.spec.step_report import PassTotal, StepReport

PROFILE = load_job("llama2-7b")
ESTIMATE = replace(JobCosts.of(PROFILE, load_cluster("npu-96")), clock=None)


def costing(costs: CostSource = "measured", cluster: str = "npu-96") -> Costing:
    return Costing(Launch(nnodes=1, workers_per_node=4, timeouts=ControlTimeouts(), cluster=cluster, costs=costs))


def report(first: int, last: int, factor: float) -> StepReport:
    times = ESTIMATE.cost.stage_times(first, last)
    backward_s = times.input_gradient.seconds(1) + times.weight_gradient.seconds(1)
    seconds = {"forward": times.forward.seconds(1), "backward": backward_s}
    return StepReport(
        worker=first, epoch=0, step=3, first_layer=first, last_layer=last, cells=1, step_s=1.0,
        passes=tuple(
            PassTotal(kind=kind, passes=8, samples=8, seconds=8 * factor * value) for kind, value in seconds.items()
        ),
    )  # fmt: skip


REPORTS = [report(0, 16, 3.0), report(16, 32, 3.0)]


def test_the_profile_decides_before_anything_is_measured() -> None:
    found = costing().reckon(PROFILE, [])
    assert (found.costs, found.source, found.problem) == (ESTIMATE, "profile", None)


def test_measured_steps_correct_the_profile() -> None:
    found = costing().reckon(PROFILE, REPORTS)
    assert found.costs is not None and found.source == "measured"
    assert found.deviation == pytest.approx(0.0, abs=1e-3)
    layer, estimated = found.costs.cost.layers[5], ESTIMATE.cost.layers[5]
    assert layer.forward.seconds(1) == pytest.approx(3 * estimated.forward.seconds(1), rel=0.01)
    assert layer.full_backward_s == pytest.approx(3 * estimated.full_backward_s, rel=0.01)
    assert found.costs.memory_bytes == ESTIMATE.memory_bytes


def test_the_profile_alone_decides_where_it_was_asked_for() -> None:
    assert costing("profile").reckon(PROFILE, REPORTS).costs == ESTIMATE


def test_reports_without_passes_measure_nothing() -> None:
    empty = [replace(each, passes=()) for each in REPORTS]
    assert costing().reckon(PROFILE, empty).source == "profile"


def test_reports_of_layers_that_the_model_does_not_have_are_told_and_left_out() -> None:
    found = costing().reckon(PROFILE, [replace(REPORTS[0], last_layer=99)])
    assert found.costs == ESTIMATE and found.source == "profile"
    assert found.problem is not None and "99" in found.problem and "32" in found.problem


def test_of_an_unknown_model_there_are_no_costs() -> None:
    assert costing().reckon(None, REPORTS).costs is None


def test_the_profile_of_cpus_costs_a_small_job_something() -> None:
    found = costing(cluster="cpu").reckon(PROFILE, []).costs
    assert found is not None and found.cost.stage_times(0, 1).sample_s > 0 and found.power is None


def test_an_emulated_job_is_reckoned_with_what_it_emulates() -> None:
    emulated = EmulatedTime(hardware="npu-96", model="llama2-13b", speed=5.0)
    found = costing(cluster="cpu").reckon(replace(PROFILE, emulated=emulated), [])
    assert found.costs == replace(make_time_model(PROFILE, emulated).costs, clock=None)
