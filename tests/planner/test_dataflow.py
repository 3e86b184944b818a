"""Every deal feeds every cell, and the three differ as they say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_elas.planner.dataflow import DEALS, busiest_share, deal_items, is_possible
from megatron_elas.planner.situation import divided
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.job import JobSpec


def job(rows: int, steps: int, size: int) -> JobSpec:
    return JobSpec(
        tensor_parallel=1,
        pipeline_parallel=2,
        data_parallel=rows,
        micro_batch_size=size,
        num_microbatches=rows * steps,
    )


@given(
    rows=st.integers(2, 6),
    steps=st.integers(1, 6),
    size=st.integers(1, 6),
    cells=st.integers(1, 7),
    deal=st.sampled_from(DEALS),
)
def test_the_busiest_share_is_known_without_making_items(
    rows: int, steps: int, size: int, cells: int, deal: str
) -> None:
    spec = job(rows, steps, size)
    kind = next(known for known in DEALS if known == deal)
    if cells != rows and not is_possible(spec, cells, kind):
        return
    dealt = deal_items(spec, range(cells), kind)
    samples = [sum(item.samples for item in own) for own in dealt]
    assert len(dealt) == cells and min(samples) >= 1 and sum(samples) == spec.num_microbatches * size
    share = busiest_share(spec, cells, kind)
    assert share.samples == max(samples)
    assert share.largest_item == max(item.samples for own in dealt for item in own)
    assert share.items == max(len(own) for own in dealt)


def test_a_mix_cuts_only_what_whole_micro_batches_leave_over() -> None:
    spec = job(4, 4, 6)
    assert [busiest_share(spec, 3, deal).samples for deal in DEALS] == [36, 32, 32]
    sizes = [[item.samples for item in own] for own in deal_items(spec, (0, 1, 3), "mix")]
    assert sizes == [[6, 6, 6, 6, 6, 2]] * 3


def test_a_stage_with_all_its_cells_keeps_the_stock_deal() -> None:
    spec = job(3, 2, 2)
    assert len({deal_items(spec, (0, 1, 2), deal) for deal in DEALS}) == 1
    assert [[item.number for item in own] for own in deal_items(spec, (0, 1, 2), "reshape")] == [[0, 3], [1, 4], [2, 5]]


def test_smaller_micro_batches_are_parts_of_the_jobs() -> None:
    parts = divided(job(2, 3, 6), 2)
    assert (parts.micro_batch_size, parts.num_microbatches) == (2, 18)
    with pytest.raises(BadUsage, match="cannot be cut into parts of 4"):
        divided(job(2, 3, 6), 4)
