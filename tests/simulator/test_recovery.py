"""What recoveries cost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron_elas.planner.policies import POLICIES
from megatron_elas.planner.situation import Situation
from megatron_elas.simulator.recovery import (
    Phase,
    Sizes,
    checkpoint_interval_s,
    load_recovery,
    load_restart,
)
from megatron_elas.spec.cluster import load_cluster
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.job_profile import load_job


def sizes(workers: int = 96) -> Sizes:
    job, cluster = load_job("llama2-34b"), load_cluster("npu-96")
    return replace(Sizes.of(Situation.of(job, cluster), cluster, 122e6), workers=workers)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_has_costs_that_say_where_they_are_from(policy: str) -> None:
    found = load_recovery(policy)
    assert found.name == policy
    assert bool(found.phases) == bool(found.join) == (policy != "restart")
    assert sum(phase.seconds(sizes()) for phase in (*found.phases, *load_restart().phases)) > 0


def test_a_phase_adds_up() -> None:
    phase = Phase(name="x", fixed_s=1, per_doubling_s=2, per_worker_s=0.5, power_s=7, power=0.5, carries="cell")
    known = Sizes(workers=4000, load_s={"cell": 10.0})
    assert phase.seconds(known) == pytest.approx(1 + 2 * math.log2(4000) + 2000 + 14 + 10)
    assert phase.times(3).seconds(known) - 10 == pytest.approx(3 * (phase.seconds(known) - 10))
    with pytest.raises(BadUsage, match="carries is 'everything'"):
        Phase(name="x", carries="everything")


def test_what_is_carried_is_as_large_as_the_job() -> None:
    # 34B on TP 4 x PP 4 x DP 6: 12 layers and the head on the last stage, 12 bytes of state for each parameter.
    cost = Situation.of(load_job("llama2-34b"), load_cluster("npu-96")).cost
    parameters = cost.parameters(36, 48)
    load_s = sizes().load_s
    assert load_s["shard"] == pytest.approx(20e-6 + parameters * 12 / 6 / 25e9)
    assert load_s["cell"] == pytest.approx(20e-6 + parameters * (2 + 12 / 6) / 25e9)
    assert load_s["checkpoint"] == pytest.approx(parameters * (2 + 12 / 6) / 122e6)


def test_a_restart_takes_what_was_published() -> None:
    phases, detect_s = load_restart().phases, load_recovery("restart").detect_s
    small, large = (sum(phase.seconds(sizes(workers)) for phase in phases[:1]) for workers in (96, 100_000))
    assert small == pytest.approx(50, rel=0.01)
    assert large + phases[1].fixed_s + phases[2].fixed_s + detect_s == pytest.approx(600, rel=0.05)


def test_the_interval_of_checkpoints_is_best_where_failures_come_by_chance() -> None:
    save_s, between_s = 5.0, 2000.0

    def efficiency(interval_s: float) -> float:
        # Of Poisson failures: time for an interval with its save is between (e^((interval + save) / between) - 1).
        return interval_s / (between_s * math.expm1((interval_s + save_s) / between_s))

    best = checkpoint_interval_s(save_s, between_s)
    assert best == pytest.approx(math.sqrt(2 * save_s * between_s), rel=0.05)
    for factor in (0.8, 0.95, 1.05, 1.25):
        assert efficiency(best) > efficiency(best * factor)
    assert checkpoint_interval_s(100.0, 20.0) == 20.0
