"""Outcomes as a table for people, and as values for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_elas.simulator.outcome import CAUSES, Outcome
from megatron_elas.simulator.plots import time_shares
from megatron_elas.simulator.times import format_duration

JOULES_PER_MWH = 3.6e9


def table_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """A heading and a row per policy. ``dropped`` and ``redone`` are samples, ``mean`` and ``worst`` lengths of
    recoveries; ``of own`` is left out where losses make a policy faster; causes are in percent of the time, and
    those that no policy spent time on have no column.
    """
    shares = [time_shares(outcome) for outcome in outcomes]
    kinds = ["slower", *CAUSES[1:]]
    kinds = [kind for kind in kinds if any(part[kind] > 0 for part in shares)]
    samples, recoveries = ["dropped", "redone"], ["recoveries", "restarts", "mean", "worst"]
    head = ["policy", "goodput", "of own", *samples, *recoveries, *(f"{kind} %" for kind in kinds), "energy"]
    rows = [head]
    for outcome, part in zip(outcomes, shares, strict=True):
        recovered = outcome.recoveries > 0
        rows.append(
            [
                outcome.policy,
                f"{outcome.goodput:.4f}",
                f"{outcome.own_goodput:.4f}" if outcome.own_goodput <= 1 else "-",
                _format_count(outcome.dropped),
                _format_count(outcome.redone),
                str(outcome.recoveries),
                str(outcome.restarts),
                format_duration(outcome.mean_recovery_s) if recovered else "-",
                format_duration(outcome.worst_recovery_s) if recovered else "-",
                *(_format_share(part[kind]) for kind in kinds),
                "-" if outcome.energy_j is None else f"{outcome.energy_j / JOULES_PER_MWH:.4g} MWh",
            ]
        )
    return rows


def format_table(outcomes: Sequence[Outcome]) -> str:
    """Columns of equal width, the first to the left, numbers to the right."""
    rows = table_rows(outcomes)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            word.ljust(width) if column == 0 else word.rjust(width)
            for column, (word, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def as_values(outcome: Outcome) -> dict[str, Any]:
    """An outcome for JSON, without its segments."""
    values = {
        name: getattr(outcome, name) for name in Outcome.__dataclass_fields__ if name not in {"segments", "energy_j"}
    }
    return {
        **values,
        "seconds_by_cause": dict(outcome.seconds_by_cause),
        "seconds_by_phase": dict(outcome.seconds_by_phase),
        "energy_j": outcome.energy_j,
        "goodput": outcome.goodput,
        "own_goodput": outcome.own_goodput,
    }


def _format_count(samples: float) -> str:
    return f"{samples:.0f}" if samples < 1e6 else f"{samples:.3g}"


def _format_share(share: float) -> str:
    if share == 0:
        return "0"
    return f"{100 * share:.2f}" if share >= 5e-5 else f"{100 * share:.0e}".replace("e-0", "e-")
