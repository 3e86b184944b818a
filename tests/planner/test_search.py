"""On small cases the search is compared with all there is: every partition, deal and size, with many orders of each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import pytest
from hypothesis import given, settings

from megatron_elas.planner.dataflow import DEALS, is_possible, is_stock
from megatron_elas.planner.layouts import list_layouts
from megatron_elas.planner.partition import Fill, Partitioner
from megatron_elas.planner.prediction import Candidate, Predictor, stage_loads
from megatron_elas.planner.search import Freedom, objective_s, search, stay
from megatron_elas.planner.situation import Situation, divided
from megatron_elas.schedule.timing import Deadlock
from tests.planner.situations import situation, situations

CASES = {
    "a lost cell of two": situation(3, 2, 4, 2, 6, lost=((1, 0),)),
    "the first of three": situation(3, 3, 3, 1, 5, lost=((0, 2),)),
    "the last of two, little memory": situation(2, 2, 4, 2, 5, lost=((1, 1),), memory=8_000),
    "two of three in one stage": situation(2, 3, 3, 2, 5, lost=((1, 0), (1, 2))),
    "few micro-batches": situation(3, 2, 1, 4, 6, lost=((2, 0),)),
}


def everything(now: Situation) -> Iterator[Candidate]:
    """All candidates: what the search ranks, and each partition that it does not think of."""
    layers, size = now.cost.num_layers, now.job.micro_batch_size
    for layout in list_layouts(now):
        for part in (part for part in range(1, size + 1) if size % part == 0):
            job = divided(now.job, part)
            own = [
                ("reroute",) if is_stock(job, rows) else [deal for deal in DEALS if is_possible(job, len(rows), deal)]
                for rows in layout.rows
            ]
            inner = combinations(range(1, layers), len(layout.rows) - 1)
            for deals, cuts, split in product(product(*own), inner, (True, False)):
                yield Candidate(
                    rows=layout.rows,
                    origins=layout.origins,
                    cuts=(0, *cuts, layers),
                    deals=deals,
                    size=part,
                    split=split,
                )


@pytest.mark.parametrize("name", CASES)
def test_no_candidate_of_a_small_case_is_better_than_the_plan(name: str) -> None:
    now = CASES[name]
    found = search(Predictor(now, exact=True, staggered=False), Freedom(), 2000)
    assert found.exhausted and found.nothing is not None
    partitioner = Partitioner(now.cost, now.memory_bytes)
    predictor = Predictor(now, exact=True, staggered=False)
    best, tried = float("inf"), 0
    for candidate in everything(now):
        if partitioner.fits(candidate.cuts, stage_loads(now, candidate)):
            try:
                best = min(best, objective_s(predictor.predict(candidate, 8)))
            except Deadlock:
                continue
            tried += 1
    assert tried > 40
    assert objective_s(found.best) <= best * (1 + 1e-9)
    # It was not given away: nobody is as good as that by doing nothing.
    assert objective_s(found.nothing) > 1.05 * best


@settings(max_examples=40, deadline=None)
@given(now=situations())
def test_no_step_is_shorter_than_the_span_of_a_stage_where_items_are_equal(now: Situation) -> None:
    for split in (False, True):
        candidate = stay(now, split=split)
        loads = stage_loads(now, candidate)
        sizes = {load.samples / load.items for load in loads}
        assert len(sizes) == 1, "whole micro-batches are equal"
        crossing = now.cost.boundary_bytes * sizes.pop() / now.link.bandwidth + now.link.latency_s
        predictor = Predictor(now, exact=True, staggered=False)
        try:
            found = predictor.predict(candidate, 6)
        except Deadlock:
            continue
        partitioner = Partitioner(now.cost, now.memory_bytes)
        spans = partitioner.spans(candidate.cuts, loads, Fill(1.0, crossing, split))
        assert max(spans) + max(predictor.tails(candidate)) <= found.step_s * (1 + 1e-9)
        # The busiest cell works all the while.
        assert max(spans) >= max(predictor.time(candidate, found.program).busy_s) * (1 - 1e-9)


def test_where_orders_are_fixed_evaluations_go_to_candidates() -> None:
    now = situation(4, 2, 8, lost=((1, 0),))
    freedom = Freedom(cells=False, split=False, orders=False)
    found = search(Predictor(now, exact=True, staggered=False), freedom, 12)
    assert found.evaluations <= 12 and found.tried >= 6
    assert found.best.found.tastes is None and found.nothing is not None
    assert found.best.step_s < found.nothing.step_s
