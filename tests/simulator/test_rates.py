"""Step times by symmetry against exact ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random

import pytest

from megatron_elas.planner import policies
from megatron_elas.planner.policies import POLICIES, ours
from megatron_elas.planner.step_plan import Effort
from megatron_elas.simulator import rates as rates_module
from megatron_elas.simulator.engine import simulate
from megatron_elas.simulator.rates import StepRates
from megatron_elas.simulator.seats import Seats
from megatron_elas.simulator.traces import Trace
from megatron_elas.spec.cluster import Cluster, load_cluster
from megatron_elas.spec.job_profile import JobProfile, load_job
from tests.simulator.small_jobs import failure, small_cluster, small_job

TOLERANCE = dict.fromkeys(POLICIES, 0.025) | {"elaswave": 0.07}
"""Of goodput. Measured on the slow ones: up to 0.9 % (ours), 2.0 % (recycle), 6.7 % (elaswave), others below 0.1 %."""


def draw(devices: int, seconds: float, failures: int, seed: int = 3) -> Trace:
    """Failures by chance, repaired in a day on average."""
    random = Random(seed)
    events = sorted(
        (random.uniform(0, seconds), random.randrange(devices), random.expovariate(1 / 86400)) for _ in range(failures)
    )
    return Trace(
        name=f"seed {seed}",
        seconds=seconds,
        events=tuple(failure(at_s, device, repair_s=repair_s) for at_s, device, repair_s in events),
    )


def large_job(rows: int, steps: int = 64, stages: int = 16) -> JobProfile:
    job = load_job("llama2-70b").with_grid(
        pipeline_parallel=stages, data_parallel=rows, num_microbatches=rows * steps, micro_batch_size=1
    )
    return replace(job, spec=replace(job.spec, tensor_parallel=8))


def nodes_for(job: JobProfile) -> Cluster:
    return replace(load_cluster("npu-96"), nodes=-(-job.spec.world_size // 8))


@pytest.mark.parametrize(
    ("stages", "rows", "steps", "size"),
    [
        (3, 6, 8, 2),
        pytest.param(4, 6, 16, 2, marks=pytest.mark.slow),
        pytest.param(4, 6, 32, 1, marks=pytest.mark.slow),
        pytest.param(8, 6, 16, 1, marks=pytest.mark.slow),
        pytest.param(4, 24, 16, 1, marks=pytest.mark.slow),
    ],
)
def test_a_simulation_by_symmetry_is_near_the_exact_one(
    stages: int, rows: int, steps: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load_job("llama2-34b").with_grid(
        pipeline_parallel=stages, data_parallel=rows, num_microbatches=steps * rows, micro_batch_size=size
    )
    cluster = nodes_for(job)
    events = draw(cluster.num_devices, 10 * 86400.0, 12 if steps > 8 else 6)
    for policy in POLICIES:
        monkeypatch.setattr(policies, "EXACT_ITEMS", 10**9)
        thorough = partial(ours, effort=Effort(evaluations=30, exact=True)) if policy == "ours" else None
        exact = simulate(job, cluster, events, policy, rates=StepRates(job, cluster, policy, exact=True, step=thorough))
        monkeypatch.setattr(policies, "EXACT_ITEMS", 0)
        quick = simulate(job, cluster, events, policy, exact=False)
        assert exact.recoveries > 3
        assert quick.goodput == pytest.approx(exact.goodput, rel=TOLERANCE[policy]), policy


@pytest.mark.parametrize("policy", POLICIES)
def test_fewer_rows_stand_for_many(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # None of them, one cell of each stage, or some cells of two stages missing.
    stages, rows = 4, 1300
    job = large_job(rows, stages=stages)
    cluster = nodes_for(job)
    few = StepRates(job, cluster, policy, exact=False)
    monkeypatch.setattr(rates_module, "MOST_ROWS", rows)
    monkeypatch.setattr(rates_module, "MOST_PIPELINES", rows)
    all_rows = StepRates(job, cluster, policy, exact=False)
    for lost in ([], [0, rows, 2 * rows, 3 * rows], [*range(30), *range(2 * rows, 2 * rows + 10)]):
        seats = Seats(stages, rows, stages * rows)
        for cell in lost:
            seats.lose(cell)
        one, other = few.rate(seats), all_rows.rate(seats)
        assert one is not None and other is not None
        assert one.step_s == pytest.approx(other.step_s, rel=0.005)
        assert one.samples == other.samples == job.spec.num_microbatches
        assert one.cells == pytest.approx(other.cells, rel=0.01)


def test_situations_that_are_alike_are_asked_about_once() -> None:
    job = large_job(781, stages=4)
    rates = StepRates(job, nodes_for(job), "elaswave")
    assert not rates.exact and rates.asked == 1
    for cell in (781, 782, 1600):
        seats = Seats(4, 781, 3124)
        seats.lose(cell)
        rates.rate(seats)
    assert rates.asked == 2
    first, last = Seats(4, 781, 3124), Seats(4, 781, 3124)
    first.lose(5)
    last.lose(3000)
    assert rates.rate(first) is not None and rates.rate(last) is not None and rates.asked == 4


def test_small_jobs_are_exact_by_default() -> None:
    job = small_job()
    rates = StepRates(job, small_cluster(job), "torchft")
    assert rates.exact
    for cell in (0, 1):
        seats = Seats(4, 3, 12)
        seats.lose(cell)
        rates.rate(seats)
    assert rates.asked == 3
