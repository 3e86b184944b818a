"""A fit finds what a job's measurements say, and keeps to the estimate where they say nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron_elas.planner.cost_model import estimate_job
from megatron_elas.planner.profile import SMALLEST, _solve_bounded, fit_cost
from megatron_elas.spec.cluster import load_cluster
from megatron_elas.spec.cost import JobCost, UnitCost
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.job_profile import load_job
from megatron_elas.spec.step_report import PassTotal, StepReport

ESTIMATE = estimate_job(load_job("llama2-7b"), load_cluster("npu-96"))
STAGES = ((0, 8), (8, 16), (16, 24), (24, 32))


def slower(unit: UnitCost, forward: float, backward: float) -> UnitCost:
    return replace(
        unit,
        forward=unit.forward.scaled(forward),
        input_gradient=unit.input_gradient.scaled(backward),
        weight_gradient=unit.weight_gradient.scaled(backward),
        optimizer_s=unit.optimizer_s * 3,
    )


TRUTH = replace(
    ESTIMATE,
    embedding=slower(ESTIMATE.embedding, 2.0, 2.0),
    layers=(slower(ESTIMATE.layers[0], 1.3, 1.1),) * ESTIMATE.num_layers,
    head=slower(ESTIMATE.head, 0.9, 0.8),
    loss=slower(ESTIMATE.loss, 0.9, 0.8),
)


def measure(cost: JobCost, first: int, last: int, *, split: bool, noise: random.Random | None = None) -> StepReport:
    times = cost.stage_times(first, last)
    seconds = {"forward": times.forward.seconds(2)}
    gradients = (times.input_gradient.seconds(2), times.weight_gradient.seconds(2))
    if split:
        seconds |= {"input_gradient": gradients[0], "weight_gradient": gradients[1]}
    else:
        seconds["backward"] = sum(gradients)
    return StepReport(
        worker=first, epoch=0, step=0, first_layer=first, last_layer=last, cells=4, step_s=1.0,
        passes=tuple(
            PassTotal(
                kind=kind, passes=5, samples=10, seconds=5 * value * (noise.uniform(0.98, 1.02) if noise else 1)
            )
            for kind, value in seconds.items()
        ),
        optimizer_s=cost.optimizer_s(first, last, 4),
    )  # fmt: skip


@pytest.mark.parametrize("split", [False, True])
def test_a_fit_predicts_stages_that_were_measured_and_layers_moved_between_them(split: bool) -> None:
    fit = fit_cost(ESTIMATE, [measure(TRUTH, *stage, split=split) for stage in STAGES])
    assert fit.deviation < 0.01
    for first, last in (*STAGES, (0, 6), (8, 19), (26, 32)):
        fitted, true = fit.cost.stage_times(first, last), TRUTH.stage_times(first, last)
        assert fitted.forward.seconds(2) == pytest.approx(true.forward.seconds(2), rel=0.02)
        assert fitted.sample_s == pytest.approx(true.sample_s, rel=0.02)
        assert fit.cost.optimizer_s(first, last, 3) == pytest.approx(TRUTH.optimizer_s(first, last, 3))


def test_noise_is_averaged_out_by_medians() -> None:
    noise = random.Random(0)
    reports = [measure(TRUTH, *stage, split=False, noise=noise) for stage in STAGES for _ in range(30)]
    fitted = fit_cost(ESTIMATE, reports).cost.stage_times(8, 16)
    assert fitted.sample_s == pytest.approx(TRUTH.stage_times(8, 16).sample_s, rel=0.01)


def test_what_was_not_measured_keeps_its_proportion_to_what_was() -> None:
    doubled = replace(ESTIMATE, layers=(slower(ESTIMATE.layers[0], 2.0, 2.0),) * ESTIMATE.num_layers)
    fit = fit_cost(ESTIMATE, [measure(doubled, 8, 16, split=True)])
    head = fit.cost.head.forward.seconds(1) / ESTIMATE.head.forward.seconds(1)
    assert head == pytest.approx(2.0, rel=0.01)
    assert dict(((group, kind), factor) for group, kind, factor in fit.factors)["layer", "forward"] == pytest.approx(
        2.0, rel=0.01
    )


def test_reports_without_passes_are_refused() -> None:
    empty = StepReport(worker=0, epoch=0, step=0, first_layer=0, last_layer=8, cells=1, step_s=1.0)
    with pytest.raises(BadUsage, match="no report has times of passes: measure some steps first"):
        fit_cost(ESTIMATE, [empty])


def test_reports_of_another_model_are_refused() -> None:
    report = replace(measure(TRUTH, 24, 32, split=False), last_layer=40)
    with pytest.raises(BadUsage, match=r"layers \[24, 40\) are not within the model's 32"):
        fit_cost(ESTIMATE, [report])


def test_factors_that_would_be_below_the_least_are_held_there_and_the_others_fit_the_rest() -> None:
    """Against all values of a grid. Without bounds the second factor would be -2.3, and the first one 2.7."""
    a, b = ((2.0, 1.9), (1.9, 2.0)), (1.0, 0.5)

    def error(x: float, y: float) -> float:
        return a[0][0] * x * x + 2 * a[0][1] * x * y + a[1][1] * y * y - 2 * (b[0] * x + b[1] * y)

    found = _solve_bounded([[*row, right] for row, right in zip(a, b, strict=True)])
    assert found == pytest.approx([(1.0 - 1.9 * SMALLEST) / 2.0, SMALLEST])
    grid = [SMALLEST + step / 100 for step in range(200)]
    assert error(*found) <= min(error(x, y) for x in grid for y in grid) + 1e-9
