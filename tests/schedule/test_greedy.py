"""Greedy orders are complete, keep to memory, and say how long they take."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elas.schedule.actions import format_order
from megatron_elas.schedule.checks import check_schedule, peak_samples
from megatron_elas.schedule.greedy import NO_MATTER, Limit, Taste, greedy
from megatron_elas.schedule.items import deal_round, reshape
from megatron_elas.schedule.routes import Flow
from megatron_elas.schedule.timing import Deadlock, time_schedule
from megatron_elas.spec.items import StageItems
from tests.schedule.cases import all_items, durations_of, unit_durations

tastes = st.builds(
    Taste,
    split=st.booleans(),
    ahead=st.sampled_from((1, 2, 4, NO_MATTER)),
    forward_first=st.booleans(),
    deferred=st.sampled_from((0, 1, NO_MATTER)),
    patience=st.sampled_from((0.0, 0.5, 1.0, 2.0)),
)


@settings(max_examples=60)
@given(st.data())
def test_an_order_is_whole_keeps_to_memory_and_takes_as_long_as_it_says(data: st.DataObject) -> None:
    items = data.draw(all_items())
    durations = data.draw(durations_of(items))
    total = sum(item.samples for own in items[0] for item in own)
    limits = [
        Limit(samples=data.draw(st.integers(1, total)), kept_share=data.draw(st.sampled_from((0.0, 0.5, 1.0, 1.5))))
        for _ in items
    ]
    chosen = [data.draw(tastes) for _ in items]
    try:
        schedule, step_s = greedy(Flow(items), durations, limits, chosen)
    except Deadlock as error:
        assert "allow more samples at once" in str(error)
        return
    check_schedule(schedule, limits)
    assert time_schedule(schedule, durations).step_s == pytest.approx(step_s)
    for stage, cell in schedule.cells():
        assert schedule.is_split(stage, cell) is chosen[stage].split


@given(all_items())
def test_with_room_for_all_there_is_always_an_order(items: tuple[StageItems, ...]) -> None:
    limits = [Limit(samples=1e9, kept_share=1.0)] * len(items)
    schedule, _ = greedy(Flow(items), unit_durations(items), limits, [Taste(split=True)] * len(items))
    check_schedule(schedule, limits)


def test_weight_gradients_fill_what_would_be_bubbles() -> None:
    items = [deal_round(3, 1, 1)] * 2
    schedule, step_s = greedy(Flow(items), unit_durations(items), [Limit(samples=9)] * 2, [Taste(split=True)] * 2)
    assert format_order(schedule.orders[0][0]) == "0F0 0F1 0F2 0B0 0W0 0B1 0W1 0B2 0W2"
    assert format_order(schedule.orders[1][0]) == "1F0 1B0 1F1 1B1 1F2 1B2 1W0 1W1 1W2"
    assert step_s == 10


def test_weight_gradients_are_run_when_memory_needs_them() -> None:
    items = [deal_round(3, 1, 1)]
    flow, durations = Flow(items), unit_durations(items)
    for samples, order in ((1, "0F0 0B0 0W0 0F1 0B1 0W1 0F2 0B2 0W2"), (3, "0F0 0B0 0F1 0B1 0F2 0B2 0W0 0W1 0W2")):
        schedule, _ = greedy(flow, durations, [Limit(samples=samples, kept_share=1.0)], [Taste(split=True)])
        assert format_order(schedule.orders[0][0]) == order
        assert peak_samples(schedule, 0, 0, 1.0) == samples


def test_memory_that_is_too_small_is_refused_with_the_cell() -> None:
    items = [deal_round(2, 2, 1), reshape(2, 2, 1, 2)]
    with pytest.raises(Deadlock, match="cell 0 of stage 0 holds 2 samples of at most 2 and can take no more"):
        greedy(Flow(items), unit_durations(items), [Limit(samples=2), Limit(samples=4)], [Taste()] * 2)
