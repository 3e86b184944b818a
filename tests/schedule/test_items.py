"""Every builder of items gives each sample to one cell; sizes and counts are as even as they can be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_elas.planner.plan import share_items
from megatron_elas.schedule.items import count_samples, cut, deal_round, reroute, reshape
from megatron_elas.spec.errors import BadUsage, NoFeasiblePlan
from megatron_elas.spec.items import Item, StageItems, whole_micro_batches
from tests.schedule.cases import stage_items


def numbers(items: StageItems) -> list[list[int]]:
    return [[item.number for item in own] for own in items]


@given(st.data())
def test_every_sample_is_in_one_item_and_numbers_are_unique(data: st.DataObject) -> None:
    rows, steps, size = (data.draw(st.integers(1, 4)) for _ in range(3))
    items = data.draw(stage_items(rows, steps, size))
    ranges = sorted(span for own in items for item in own for span in item.ranges)
    assert [sample for start, stop in ranges for sample in range(start, stop)] == list(range(rows * steps * size))
    seen = [number for own in numbers(items) for number in own]
    assert len(set(seen)) == len(seen)
    for own in items:
        firsts = [item.ranges[0][0] for item in own]
        assert firsts == sorted(firsts)


@given(st.integers(1, 6), st.integers(6, 40), st.integers(1, 4))
def test_dealing_round_is_what_the_running_job_does(cells: int, count: int, size: int) -> None:
    items = deal_round(count, size, cells)
    assert items == whole_micro_batches(share_items(count, cells), size)
    assert all(item.samples == size for own in items for item in own)


def test_rerouting_keeps_the_living_rows_micro_batches_and_spreads_the_lost_ones() -> None:
    items = reroute(12, 2, rows=[0, 2], all_rows=3)
    assert numbers(items) == [[0, 1, 3, 6, 7, 9], [2, 4, 5, 8, 10, 11]]
    assert items[0][1] == Item(1, ((2, 4),))


@given(st.integers(2, 6), st.integers(1, 12), st.data())
def test_rerouting_leaves_cells_at_most_one_micro_batch_apart(rows: int, steps: int, data: st.DataObject) -> None:
    alive = sorted(data.draw(st.sets(st.integers(0, rows - 1), min_size=1)))
    counts = [len(own) for own in reroute(rows * steps, 1, alive, rows)]
    assert max(counts) - min(counts) <= 1
    for cell, row in enumerate(alive):
        kept = set(range(row, rows * steps, rows))
        assert kept <= {item.number for item in reroute(rows * steps, 1, alive, rows)[cell]}


def test_reshaping_rotates_the_larger_items() -> None:
    items = reshape(9, 4, cells=5, rows=3)
    sizes = [[item.samples for item in own] for own in items]
    assert sizes == [[3, 2, 3], [3, 2, 2], [2, 3, 2], [2, 3, 2], [2, 2, 3]]
    assert items[1][1].ranges == ((14, 16),)


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 4), st.data())
def test_reshaping_is_even_in_a_step_and_over_all_steps(rows: int, steps: int, size: int, data: st.DataObject) -> None:
    cells = data.draw(st.integers(1, min(rows * size, 8)))
    items = reshape(rows * steps, size, cells, rows)
    assert {len(own) for own in items} == {steps}
    for step in range(steps):
        sizes = [own[step].samples for own in items]
        assert max(sizes) - min(sizes) <= 1
    totals = [count_samples(own) for own in items]
    assert max(totals) - min(totals) <= 1


def test_the_original_grid_reshaped_is_the_original_grid() -> None:
    assert reshape(6, 2, cells=3, rows=3) == deal_round(6, 2, 3)


def test_items_of_any_size_are_cut_in_turns() -> None:
    assert cut(6, [[2, 1], [3]]) == ((Item(0, ((0, 2),)), Item(2, ((5, 6),))), (Item(1, ((2, 5),)),))
    with pytest.raises(BadUsage, match=r"items of \[\[2\], \[3\]\] samples do not make up a batch of 6"):
        cut(6, [[2], [3]])


def test_cells_without_anything_to_do_are_refused() -> None:
    with pytest.raises(NoFeasiblePlan, match="2 micro-batches cannot feed 3 cells"):
        deal_round(2, 1, 3)
    with pytest.raises(NoFeasiblePlan, match="1 micro-batches cannot feed 2 cells"):
        reroute(1, 1, [0, 1], 2)
    with pytest.raises(NoFeasiblePlan, match="2 samples of a micro-step cannot feed 3 cells"):
        reshape(4, 1, 3, 2)
    with pytest.raises(BadUsage, match="5 micro-batches do not divide by 2 rows"):
        reshape(5, 1, 1, 2)
