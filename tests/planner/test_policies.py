"""Policies do what their papers say, and none of them is ahead of ours on the grids that are tested."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megatron_elas.planner.policies import POLICIES, Lost, elaswave, oobleck, ours, recycle, restart, stock, torchft
from megatron_elas.planner.situation import Situation
from megatron_elas.planner.step_plan import Effort
from megatron_elas.spec.cluster import load_cluster
from megatron_elas.spec.errors import NoFeasiblePlan
from megatron_elas.spec.job_profile import load_job
from tests.planner.situations import situation

SMALL = Effort(evaluations=60, exact=True)


def test_recycle_moves_whole_micro_batches_and_no_layer() -> None:
    begin = situation(4, 2, 8)
    step = recycle(begin, [(1, 0)])
    assert step.candidate is not None
    assert step.candidate.cuts == begin.cuts and step.candidate.size == begin.job.micro_batch_size
    assert step.samples == begin.batch_samples
    assert recycle(begin, ()).step_s == stock(begin).step_s
    assert step.step_s <= recycle(begin, [(1, 0)], staggered=False).step_s
    # The cell that is left alone has twice the work.
    assert step.step_s > 1.6 * stock(begin).step_s / (1 + 3 / 8)


def test_torchft_drops_the_replica_and_keeps_or_shrinks_the_batch() -> None:
    begin = situation(4, 3, 8)
    kept, shrunk = torchft(begin, [(1, 0)]), torchft(begin, [(1, 0)], keep_batch=False)
    assert kept.cells == shrunk.cells == 8
    assert kept.samples == begin.batch_samples and shrunk.samples * 3 == begin.batch_samples * 2
    assert kept.step_s > shrunk.step_s
    assert shrunk.step_s == pytest.approx(stock(begin).step_s, rel=0.02)
    with pytest.raises(NoFeasiblePlan, match="every replica lost a worker"):
        torchft(situation(4, 2, 8), [(1, 0), (2, 1)])


def test_elaswave_reshapes_and_moves_layers() -> None:
    begin = situation(4, 2, 8)
    step = elaswave(begin, [(1, 0)])
    assert step.candidate is not None and not step.candidate.split
    layers = [last - first for first, last in pairwise(step.candidate.cuts)]
    assert layers[1] < 3 and step.candidate.deals[1] == "reshape"
    assert step.step_s < recycle(begin, [(1, 0)], staggered=False).step_s
    boosted = elaswave(situation(4, 3, 6, layers=8, clocks=True), [(1, 0)])
    assert boosted.step_s < elaswave(situation(4, 3, 6, layers=8), [(1, 0)]).step_s


def test_oobleck_shortens_the_pipeline_that_lost_a_worker() -> None:
    begin = situation(4, 2, 8)
    step = oobleck(begin, [(1, 0)])
    assert step.cells == 7 and "pipelines of 4, 3 stages" in step.what
    words = step.what.split()
    counts = [int(word.strip(",")) for word in words[words.index("with") + 1 : words.index("micro-batches")]]
    assert sum(counts) == begin.job.num_microbatches and counts[0] > counts[1]
    # Where memory does not hold the model on three stages, the short pipeline is given up.
    cells = {_cells_of_oobleck(situation(4, 3, 8, memory=memory)) for memory in range(2_000, 6_000, 200)}
    assert cells == {0, 8, 11}


def _cells_of_oobleck(begin: Situation) -> int:
    try:
        return oobleck(begin, [(1, 0)]).cells
    except NoFeasiblePlan:
        return 0


def test_a_restart_needs_whole_replicas_that_divide_the_batch() -> None:
    begin = situation(4, 4, 3)
    step = restart(begin, [(1, 0)])
    assert step.cells == 12 and step.samples == begin.batch_samples
    # Seven cells of two rows make one replica only.
    assert restart(situation(4, 2, 8), [(1, 0)]).cells == 4
    with pytest.raises(NoFeasiblePlan, match="too few"):
        restart(situation(4, 1, 8), [(1, 0)])


LOSSES: tuple[Lost, ...] = (((0, 0),), ((2, 1),), ((3, 0),), ((0, 1), (2, 1)))


@pytest.mark.parametrize("lost", LOSSES)
@pytest.mark.parametrize("grid", [(2, 8, 2), (2, 4, 6), (3, 8, 1), (3, 4, 4)])
def test_no_policy_is_ahead_of_ours_on_small_grids(grid: tuple[int, int, int], lost: Lost) -> None:
    rows, steps, size = grid
    begin = situation(4, rows, steps, size)
    best = ours(begin, lost, effort=SMALL)
    behind = {}
    for name, policy in POLICIES.items():
        try:
            behind[name] = best.samples_per_s / policy(begin, lost).samples_per_s
        except NoFeasiblePlan:
            continue
    assert min(behind.values()) > 1 - 1e-9, behind
    assert ours(begin, lost, staggered=True, effort=SMALL).step_s <= recycle(begin, lost).step_s


@pytest.mark.parametrize(("grid", "lost"), [((4, 6, 8, 1), (0, 0)), ((8, 2, 16, 6), (4, 0))])
def test_no_policy_is_ahead_of_ours_on_a_real_job(grid: tuple[int, int, int, int], lost: tuple[int, int]) -> None:
    stages, rows, steps, size = grid
    job = load_job("llama2-34b").with_grid(
        pipeline_parallel=stages, data_parallel=rows, num_microbatches=steps * rows, micro_batch_size=size
    )
    begin = Situation.of(job, load_cluster("gpu-96"))
    best = ours(begin, [lost], effort=SMALL)
    behind = {}
    for name, policy in POLICIES.items():
        try:
            behind[name] = best.samples_per_s / policy(begin, [lost]).samples_per_s
        except NoFeasiblePlan:
            continue
    assert "recycle" in behind and min(behind.values()) > 1 - 1e-9, behind
