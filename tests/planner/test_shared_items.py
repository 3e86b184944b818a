"""Stages that are dealt alike share their items, and have those that each of them would have by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_elas.planner.dataflow import DEALS, Dealt, deal_items, deal_stages
from megatron_elas.spec.job import JobSpec

ROWS = st.sets(st.integers(0, 4), min_size=1).map(lambda rows: tuple(sorted(rows)))


def job_of(size: int) -> JobSpec:
    return JobSpec(tensor_parallel=1, pipeline_parallel=1, data_parallel=4, micro_batch_size=size, num_microbatches=12)


@given(st.lists(st.tuples(ROWS, st.sampled_from(DEALS)), min_size=1, max_size=5))
def test_stages_have_what_each_would_have_by_itself(stages: list[tuple[tuple[int, ...], str]]) -> None:
    known = Dealt()
    rows, deals = zip(*stages, strict=True)
    # One after the other with what was known: sizes of micro-batches do not get mixed up.
    for size in (4, 2, 4):
        items = deal_stages(job_of(size), rows, deals, known)
        assert items == tuple(map(deal_items, (job_of(size),) * len(rows), rows, deals))


def test_equal_stages_are_one_object() -> None:
    rows = [(0, 1, 2, 3), (0, 2, 3), (1, 2, 3), (0, 1, 2, 3)]
    reshaped, mixed, rerouted = (deal_stages(job_of(2), rows, [deal] * 4) for deal in ("reshape", "mix", "reroute"))
    for items in (reshaped, mixed, rerouted):
        assert items[0] is items[3] and items[0] is not items[1]
    assert reshaped[1] is reshaped[2] and mixed[1] is mixed[2], "which rows are left does not matter to these"
    assert rerouted[1] != rerouted[2]
