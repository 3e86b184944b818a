"""Outcomes that are easy to reckon with."""

from __future__ import annotations

from megatron_elas.simulator.outcome import CAUSES, Outcome, Segment


def make_outcome(policy: str = "ours", segments: tuple[Segment, ...] | None = None, **changes: object) -> Outcome:
    """100 s of a job that trains 10 samples in a second: 50 s whole, 10 s recovering, 40 s with four fifths of it."""
    found = segments or (
        Segment(begin_s=0, end_s=50, cause="training", samples_per_s=10, cells=10),
        Segment(begin_s=50, end_s=52, cause="detecting"),
        Segment(begin_s=52, end_s=60, cause="recovering", phase="regroup"),
        Segment(begin_s=60, end_s=100, cause="training", samples_per_s=8, cells=8),
    )
    by_cause = dict.fromkeys(CAUSES, 0.0)
    for segment in found:
        by_cause[segment.cause] += segment.seconds
    fields: dict[str, object] = {
        "policy": policy,
        "job": "llama2-34b",
        "cluster": "npu-96",
        "trace": "a trace",
        "seconds": found[-1].end_s,
        "stock_samples_per_s": 10.0,
        "own_samples_per_s": 10.0,
        "trained": sum(segment.seconds * segment.samples_per_s for segment in found),
        "dropped": 0.0,
        "redone": 12.0,
        "seconds_by_cause": by_cause,
        "seconds_by_phase": {"regroup": 8.0},
        "energy_j": 7.2e9,
        "failures": 1,
        "recoveries": 1,
        "mean_recovery_s": 10.0,
        "worst_recovery_s": 10.0,
        "restarts": 0,
        "joins": 0,
        "segments": found,
        **changes,
    }
    return Outcome(**fields)  # type: ignore[arg-type]
