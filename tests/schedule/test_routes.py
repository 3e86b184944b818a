"""Routing follows from the items: every sample goes from where it is to where it is next, once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from megatron_elas.schedule.items import deal_round, reshape
from megatron_elas.schedule.routes import Flow, Slice, route, route_all
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.items import Item, StageItems
from tests.schedule.cases import all_items


def place_of(items: StageItems) -> dict[int, tuple[int, int]]:
    return {
        sample: (cell, item.number)
        for cell, own in enumerate(items)
        for item in own
        for start, stop in item.ranges
        for sample in range(start, stop)
    }


@settings(max_examples=40)
@given(all_items())
def test_every_sample_crosses_every_boundary_once_between_its_places(items: tuple[StageItems, ...]) -> None:
    for stage, slices in enumerate(route_all(items)):
        before, after = place_of(items[stage]), place_of(items[stage + 1])
        crossed = [sample for piece in slices for sample in range(piece.start, piece.stop)]
        assert crossed == sorted(before)
        for piece in slices:
            assert piece.samples > 0
            for sample in range(piece.start, piece.stop):
                assert before[sample] == (piece.sender, piece.sent_item)
                assert after[sample] == (piece.receiver, piece.received_item)


def test_a_micro_batch_is_sliced_where_the_next_stage_cuts_it() -> None:
    slices = route(reshape(2, 4, 2, 2), reshape(2, 4, 3, 2))
    assert slices[:2] == (Slice(0, 3, 0, 0, 0, 0), Slice(3, 4, 0, 0, 1, 1))
    assert slices[2:] == (Slice(4, 6, 1, 1, 1, 1), Slice(6, 8, 1, 1, 2, 2))


@pytest.mark.parametrize(
    ("receivers", "sentence"),
    [
        (((Item(0, ((0, 2),)),),), "one stage holds 4 samples and the other 2: both hold the batch"),
        (((Item(0, ((0, 5),)),),), "one stage holds 4 samples and the other 5: both hold the batch"),
        (((Item(0, ((0, 2),)), Item(1, ((3, 4),))),), "sample 2 is on no item (next: item 1 with 3 to 4)"),
        (((Item(0, ((0, 3),)), Item(1, ((2, 4),))),), "sample 2 is twice (next: item 1 with 2 to 4)"),
        (((Item(0, ((0, 4),)),), (Item(1, ((4, 4),)),)), "sample 4 is on no item (next: item 1 with 4 to 4)"),
        (((),), "a stage holds no samples"),
    ],
)
def test_a_sample_that_is_missing_or_twice_on_a_stage_is_refused(receivers: StageItems, sentence: str) -> None:
    with pytest.raises(BadUsage) as caught:
        route_all([deal_round(4, 1, 1), receivers])
    assert str(caught.value) == f"between stages 0 and 1: {sentence}"
    with pytest.raises(BadUsage) as caught:
        Flow([deal_round(4, 1, 1), receivers])
    assert str(caught.value) == f"stage 1: {sentence}"


def test_a_number_that_is_used_twice_on_a_stage_is_refused() -> None:
    with pytest.raises(BadUsage, match="stage 0 has two items of number 1"):
        Flow([((Item(1, ((0, 1),)),), (Item(1, ((1, 2),)),))])


@settings(max_examples=40)
@given(all_items())
def test_a_flow_has_the_slices_of_the_routes(items: tuple[StageItems, ...]) -> None:
    flow = Flow(items)
    for stage, slices in enumerate(route_all(items)):
        pairs = [
            (flow.index[stage][piece.sent_item], flow.index[stage + 1][piece.received_item], piece.samples)
            for piece in slices
        ]
        upper, lower = flow.index[stage].values(), flow.index[stage + 1].values()
        assert sorted(pairs) == sorted((i, j, flow.ways[way][1]) for i in upper for j, way in flow.after[i])
        assert sorted(pairs) == sorted((i, j, flow.ways[way][1]) for j in lower for i, way in flow.before[j])
        assert {flow.ways[way][0] for i in upper for _, way in flow.after[i]} == {stage}


@settings(max_examples=40)
@given(all_items())
def test_stages_that_share_their_items_flow_as_if_each_had_its_own(items: tuple[StageItems, ...]) -> None:
    shared = Flow([cells for cells in items for _ in range(2)])
    own = Flow([tuple(list(cells)) for cells in items for _ in range(2)])
    assert (shared.before, shared.after, shared.ways) == (own.before, own.after, own.ways)


def test_a_flow_finds_cells_and_items_by_their_numbers() -> None:
    flow = Flow([deal_round(4, 1, 2), deal_round(4, 1, 1)])
    assert [flow.find(cell) for cell in range(flow.num_cells)] == [(0, 0), (0, 1), (1, 0)]
    assert flow.before[flow.index[1][3]] == [(flow.index[0][3], 0)] and flow.ways == [(0, 1)]
    assert flow.after[flow.index[0][3]] == [(flow.index[1][3], 0)]
    assert [flow.kinds[kind] for kind in flow.kind_of] == list(zip(flow.cell_of, flow.samples, strict=True))
    assert flow.cell_of[flow.index[0][3]] == 1
