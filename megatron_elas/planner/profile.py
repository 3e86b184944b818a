"""Costs fitted to what a running job measured.

Measurements are of whole stages, so they cannot tell every unit from every other. The fit therefore starts from an
estimate (``planner.cost_model``) and looks for one factor for each of the three passes of each of the three kinds of
units: embedding, layers, head with loss. What the measurements leave open keeps the estimate's proportions.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_elas.spec.cost import JobCost, UnitCost, Work
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.step_report import StepReport

GROUPS = ("embedding", "layer", "head")
GRADIENTS = ("input_gradient", "weight_gradient")
FACTORS = tuple((group, kind) for group in GROUPS for kind in ("forward", *GRADIENTS))
PULL = 1e-4
"""Weight of the estimate's proportions against the measurements, both as squares of relative deviations."""
SMALLEST = 0.02
"""Of a factor, relative to the common one: no unit is fitted to take no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fitted cost and how well it says what was measured."""

    cost: JobCost
    factors: tuple[tuple[str, str, float], ...]
    """(kind of unit, pass, measured over estimated time)."""
    deviation: float
    """Of the fitted times of passes from the measured ones: median, relative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One measured time, and what the estimate says each factor's part in it is."""

    parts: tuple[float, ...]
    measured_s: float


def fit_cost(estimate: JobCost, reports: Sequence[StepReport]) -> Fit:
    """Fit an estimate to a job's reports.

    Args:
        estimate: Of the same model.
        reports: Of any steps and workers; medians are taken over those that ran the same.

    Raises:
        BadUsage: No report says how long its passes took, or one has layers that the model does not have.
    """
    rows = _rows(estimate, reports)
    if not rows:
        raise BadUsage("no report has times of passes: measure some steps first")
    common = statistics.median(row.measured_s / sum(row.parts) for row in rows)
    factors = dict(zip(FACTORS, _solve(rows, common), strict=True))
    scaled = replace(
        estimate,
        embedding=_scale(estimate.embedding, "embedding", factors),
        layers=_scale_layers(estimate, factors),
        head=_scale(estimate.head, "head", factors),
        loss=_scale(estimate.loss, "head", factors),
    )
    values = tuple(factors.values())
    deviation = statistics.median(abs(_dot(row.parts, values) / row.measured_s - 1) for row in rows)
    return Fit(
        cost=_fit_optimizer(scaled, reports),
        factors=tuple((group, kind, factor) for (group, kind), factor in factors.items()),
        deviation=deviation,
    )


def _rows(estimate: JobCost, reports: Sequence[StepReport]) -> list[_Row]:
    measured: dict[tuple[int, int, str, float, float], list[float]] = defaultdict(list)
    for report in reports:
        for total in report.passes:
            key = (report.first_layer, report.last_layer, total.kind, total.samples / total.passes, report.clock)
            measured[key].append(total.seconds / total.passes)
    rows = []
    for (first, last, kind, samples, clock), seconds in measured.items():
        parts = dict.fromkeys(FACTORS, 0.0)
        for group, unit in _grouped(estimate, first, last):
            for name in GRADIENTS if kind == "backward" else (kind,):
                work: Work = getattr(unit, name)
                parts[group, name] += work.seconds(samples, clock)
        if any(parts.values()):
            rows.append(_Row(parts=tuple(parts.values()), measured_s=statistics.median(seconds)))
    return rows


def _grouped(estimate: JobCost, first: int, last: int) -> list[tuple[str, UnitCost]]:
    units = estimate.units(first, last)
    before = 1 if first == 0 else 0
    groups = ["embedding"] * before + ["layer"] * (last - first)
    return list(zip([*groups, *["head"] * (len(units) - len(groups))], units, strict=True))


def _solve(rows: Sequence[_Row], common: float) -> list[float]:
    """Factors with the least squares of relative deviations, drawn a little towards the common one."""
    size = len(FACTORS)
    matrix = [[PULL if i == j else 0.0 for j in range(size)] + [PULL] for i in range(size)]
    for row in rows:
        # In units of the common factor, so that the pull weighs the same whatever the times are.
        shares = [part * common / row.measured_s for part in row.parts]
        for i in range(size):
            for j in range(size):
                matrix[i][j] += shares[i] * shares[j]
            matrix[i][size] += shares[i]
    return [value * common for value in _solve_bounded(matrix)]


def _solve_bounded(matrix: list[list[float]]) -> list[float]:
    """As ``_eliminate``, with no value below SMALLEST: those that would be are held there, the others fit the rest."""
    held: set[int] = set()
    while True:
        free = [i for i in range(len(matrix)) if i not in held]
        reduced = [
            [matrix[i][j] for j in free] + [matrix[i][-1] - SMALLEST * sum(matrix[i][j] for j in held)] for i in free
        ]
        found = dict(zip(free, _eliminate(reduced), strict=True))
        small = {i for i, value in found.items() if value < SMALLEST}
        if not small:
            return [found.get(i, SMALLEST) for i in range(len(matrix))]
        held |= small


def _eliminate(matrix: list[list[float]]) -> list[float]:
    """The solution of linear equations whose last column is the right-hand side; symmetric, positive definite."""
    size = len(matrix)
    for i in range(size):
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            for k in range(i, size + 1):
                matrix[j][k] -= factor * matrix[i][k]
    solution = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(matrix[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (matrix[i][size] - rest) / matrix[i][i]
    return solution


def _scale(unit: UnitCost, group: str, factors: dict[tuple[str, str], float]) -> UnitCost:
    return replace(
        unit,
        forward=unit.forward.scaled(factors[group, "forward"]),
        input_gradient=unit.input_gradient.scaled(factors[group, "input_gradient"]),
        weight_gradient=unit.weight_gradient.scaled(factors[group, "weight_gradient"]),
    )


def _scale_layers(estimate: JobCost, factors: dict[tuple[str, str], float]) -> tuple[UnitCost, ...]:
    # Layers that are one object stay one.
    scaled = {id(layer): _scale(layer, "layer", factors) for layer in estimate.layers}
    return tuple(scaled[id(layer)] for layer in estimate.layers)


def _fit_optimizer(cost: JobCost, reports: Sequence[StepReport]) -> JobCost:
    ratios = []
    for report in reports:
        expected = cost.optimizer_s(report.first_layer, report.last_layer, report.cells)
        if report.optimizer_s is not None and expected > 0:
            ratios.append(report.optimizer_s / expected)
    if not ratios:
        return cost
    factor = statistics.median(ratios)
    scaled = {id(unit): replace(unit, optimizer_s=unit.optimizer_s * factor) for unit in cost.units(0, cost.num_layers)}
    return replace(
        cost,
        embedding=scaled[id(cost.embedding)],
        layers=tuple(scaled[id(layer)] for layer in cost.layers),
        head=scaled[id(cost.head)],
        loss=scaled[id(cost.loss)],
    )


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
