"""Actions are written as they are read."""

from __future__ import annotations

import pytest

from megatron_elas.schedule.actions import Action, format_order, parse_order
from megatron_elas.schedule.items import deal_round
from megatron_elas.schedule.one_f_one_b import one_f_one_b
from megatron_elas.spec.errors import BadUsage


def test_an_action_is_written_stage_kind_item() -> None:
    assert str(Action(2, "F", 10)) == "2F10"
    assert Action.parse("2F10") == Action(2, "F", 10)


def test_an_order_comes_back_from_its_text() -> None:
    text = "0F0 0F1 0B0 0B1 0W0"
    assert format_order(parse_order(text)) == text


@pytest.mark.parametrize("text", ["F0", "0X1", "0F", "0F1B2", ""])
def test_what_is_no_action_gets_a_sentence(text: str) -> None:
    with pytest.raises(BadUsage, match="is no action: write a stage, F, B or W, and an item, such as 2F0"):
        Action.parse(text)


def test_a_schedule_tells_its_size_and_warm_up() -> None:
    schedule = one_f_one_b([deal_round(6, 1, 2), deal_round(6, 1, 1)])
    assert schedule.num_stages == 2
    assert schedule.num_actions == 24
    assert list(schedule.cells()) == [(0, 0), (0, 1), (1, 0)]
    assert [schedule.forwards_first(*place) for place in schedule.cells()] == [2, 2, 1]
    assert not schedule.is_split(0, 0)
