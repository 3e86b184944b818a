"""What holds for every policy under any trace."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf
from random import Random

import pytest

from megatron_elas.planner.policies import POLICIES
from megatron_elas.planner.prediction import Predictor
from megatron_elas.planner.search import stay
from megatron_elas.simulator.engine import simulate
from megatron_elas.simulator.outcome import CAUSES, Outcome
from megatron_elas.simulator.rates import StepRates
from megatron_elas.simulator.recovery import RecoveryCosts, load_recovery
from megatron_elas.simulator.traces import Event, Failure, Slowdown, Trace
from tests.simulator.small_jobs import failure, small_cluster, small_job

QUICK = ("elaswave", "torchft", "oobleck", "restart")
"""Policies that are asked about a situation in milliseconds."""
JOB = small_job(rows=4)
CLUSTER = small_cluster(JOB, per_node=2, spare_nodes=1)
SECONDS = 30_000.0


@cache
def rates_of(policy: str) -> StepRates:
    return StepRates(JOB, CLUSTER, policy, exact=policy in QUICK)


def draw(seed: int, failures: int = 12) -> Trace:
    """Devices, nodes and slow devices; repairs from a minute to never."""
    random = Random(seed)
    events: list[Event] = []
    for _ in range(failures):
        device = random.randrange(CLUSTER.num_devices)
        devices = random.choice([(device,), (device,), (device // 2 * 2, device // 2 * 2 + 1)])
        repair_s = random.choice([60.0, 2000.0, 8000.0, float("inf")])
        events.append(failure(random.uniform(0, SECONDS), *devices, repair_s=repair_s))
    for _ in range(3):
        events.append(
            Slowdown(
                at_s=random.uniform(0, SECONDS),
                device=random.randrange(CLUSTER.num_devices),
                factor=random.uniform(1.1, 3.0),
                seconds=random.uniform(10, 5000),
            )
        )
    return Trace(name=f"seed {seed}", seconds=SECONDS, events=tuple(sorted(events, key=lambda event: event.at_s)))


def run(policy: str, events: Trace, costs: RecoveryCosts | None = None) -> Outcome:
    return simulate(JOB, CLUSTER, events, policy, recovery=costs, rates=rates_of(policy))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_time_and_samples_are_accounted_for(policy: str, seed: int) -> None:
    outcome = run(policy, draw(seed))
    assert outcome.failures >= outcome.recoveries > 0
    assert list(outcome.seconds_by_cause) == list(CAUSES)
    assert sum(outcome.seconds_by_cause.values()) == pytest.approx(SECONDS, abs=1e-6)
    ends = [0.0]
    for segment in outcome.segments:
        assert segment.begin_s == ends[-1] < segment.end_s
        assert segment.cause in CAUSES and 0 <= segment.devices <= CLUSTER.num_devices
        assert (segment.samples_per_s > 0) == (segment.cause in {"training", "redone"})
        ends.append(segment.end_s)
    assert ends[-1] == SECONDS
    computed = sum(segment.seconds * segment.samples_per_s for segment in outcome.segments)
    assert computed == pytest.approx(outcome.trained + outcome.redone)
    assert (outcome.dropped > 0) <= (policy == "torchft")


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_computes_more_than_the_cells_that_are_left_can(policy: str) -> None:
    # Without any bubble, reduction or optimizer, as a policy could come near to at best.
    begin = rates_of(policy).begin
    predictor = Predictor(begin, exact=True, staggered=False)
    candidate = stay(begin)
    prediction = predictor.predict(candidate, 0)
    busy_s = predictor.time(candidate, prediction.schedule).busy_s
    per_cell = begin.batch_samples / sum(busy_s) / begin.job.data_parallel
    for seed in range(3):
        outcome = run(policy, draw(seed))
        for segment in outcome.segments:
            assert segment.samples_per_s <= segment.cells * per_cell * 1.001
            # ReCycle's own schedules are for what failures leave: without a failure it is stock 1F1B, which is slower.
            if policy != "recycle":
                assert segment.samples_per_s <= outcome.own_samples_per_s * 1.001
                assert outcome.own_goodput <= 1


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_trace_has_the_same_outcome(policy: str) -> None:
    assert run(policy, draw(1)) == run(policy, draw(1))
    fresh = StepRates(JOB, CLUSTER, policy, exact=policy in QUICK)
    assert simulate(JOB, CLUSTER, draw(1), policy, rates=fresh) == run(policy, draw(1))
    assert run(policy, draw(2)) != run(policy, draw(1))


@pytest.mark.parametrize("policy", POLICIES)
def test_faster_recoveries_never_train_less(policy: str) -> None:
    costs = load_recovery(policy)
    one = Trace(name="one", seconds=SECONDS, events=(failure(5000.5, 3, repair_s=4000.0),))
    trained = [run(policy, one, costs.times(factor)).trained for factor in (0.1, 1.0, 3.0, 30.0)]
    assert trained == sorted(trained, reverse=True) and trained[0] > trained[-1]
    # With many failures a shorter recovery may let the next one strike later in a step: a step for each at most.
    # Without repairs: those that come back while a recovery lasts are seated in it, so that a longer one may gain.
    for seed in range(4):
        events = tuple(replace(event, repair_s=inf) for event in draw(seed).events if isinstance(event, Failure))[:4]
        many = Trace(name="many", seconds=SECONDS, events=events)
        fast, slow = (run(policy, many, costs.times(factor)) for factor in (1.0, 10.0))
        assert fast.trained >= slow.trained - len(events) * rates_of(policy).own.samples


@pytest.mark.parametrize("policy", POLICIES)
def test_fewer_failures_never_train_less(policy: str) -> None:
    events = draw(5)
    less = Trace(name="less", seconds=SECONDS, events=events.events[:4])
    assert run(policy, less).trained > run(policy, events).trained
