"""Plots show what outcomes say: rates at their time, and shares that sum to all of it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megatron_elas.simulator.outcome import Segment
from megatron_elas.simulator.picture import Box, Line, Text
from megatron_elas.simulator.plots import (
    LEFT,
    PANEL,
    RIGHT,
    SHADES,
    plot_shares,
    plot_throughput,
    time_shares,
    useful_rates,
)
from tests.simulator.outcomes import make_outcome


def test_rates_are_those_of_their_time() -> None:
    outcome = make_outcome()
    assert useful_rates(outcome, 10) == pytest.approx([1, 1, 1, 1, 1, 0, 0.8, 0.8, 0.8, 0.8])
    # A stretch with several segments shows their mean; so does all of it.
    assert useful_rates(outcome, 5) == pytest.approx([1, 1, 0.5, 0.8, 0.8])
    assert useful_rates(outcome, 1) == pytest.approx([outcome.goodput])
    assert sum(useful_rates(outcome, 777)) / 777 == pytest.approx(outcome.goodput)


def test_work_that_is_thrown_away_is_not_shown() -> None:
    segments = (
        Segment(begin_s=0, end_s=30, cause="training", samples_per_s=10),
        Segment(begin_s=30, end_s=40, cause="redone", samples_per_s=10),
    )
    assert useful_rates(make_outcome(segments=segments), 4) == pytest.approx([1, 1, 1, 0])


def test_there_is_a_panel_per_policy_with_a_line_through_its_rates() -> None:
    pixels = 1000  # ends of segments are ends of pixels
    width = LEFT + pixels + RIGHT
    picture = plot_throughput([make_outcome("ours"), make_outcome("recycle")], width=width)
    lines = [shape for shape in picture.shapes if isinstance(shape, Line) and shape.about]
    assert [line.about for line in lines] == ["ours: goodput 0.8200", "recycle: goodput 0.8200"]
    assert len({line.colour for line in lines}) == 2
    for line in lines:
        heights = sorted({round(y, 3) for _, y in line.points})
        full, four_fifths, none = heights
        assert none - full == pytest.approx(PANEL / 1.02, abs=0.01)
        assert none - four_fifths == pytest.approx(0.8 * (none - full), abs=0.01)
        down = min(x for x, y in line.points if y == pytest.approx(none, abs=0.01))
        assert down == pytest.approx(LEFT + pixels / 2, abs=1)
        assert (line.points[0][0], line.points[-1][0]) == (LEFT, width - RIGHT)
    assert max(y for _, y in lines[0].points) < min(y for _, y in lines[1].points)
    texts = [shape.text for shape in picture.shapes if isinstance(shape, Text)]
    assert {"ours", "recycle", "0 s", "25 s", "1.67 min"} <= set(texts)


def test_shares_sum_to_all_of_the_time_and_bars_are_as_long_as_they() -> None:
    outcome = make_outcome()
    shares = time_shares(outcome)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["training"] == pytest.approx(0.82) and shares["slower"] == pytest.approx(0.08)
    boxes = [shape for shape in plot_shares([outcome]).shapes if isinstance(shape, Box) and shape.about]
    assert [box.about for box in boxes] == [
        "ours: training 82.000%",
        "ours: slower 8.000%",
        "ours: detecting 2.000%",
        "ours: recovering 8.000%",
        "ours: slower 8.000%",
        "ours: detecting 2.000%",
        "ours: recovering 8.000%",
    ]
    assert all(box.colour == SHADES[box.about.split()[1]] for box in boxes)
    whole = sum(box.width for box in boxes[:4])
    assert [box.width / whole for box in boxes[:4]] == pytest.approx([0.82, 0.08, 0.02, 0.08])
    for before, after in pairwise(boxes[:4]):
        assert after.x == pytest.approx(before.x + before.width)


def test_what_fewer_devices_cost_is_reckoned_with_the_policys_own_speed() -> None:
    segments = (Segment(begin_s=0, end_s=10, cause="training", samples_per_s=11),)
    fast = make_outcome(segments=segments, own_samples_per_s=12.0)
    assert fast.goodput == pytest.approx(1.1)
    assert time_shares(fast)["slower"] == pytest.approx(1 / 12)
    # With fewer devices some jobs are faster: there is nothing to show then.
    fast = make_outcome(segments=segments, own_samples_per_s=10.5)
    assert time_shares(fast)["training"] == 1 and time_shares(fast)["slower"] == 0
    assert plot_shares([fast]).svg()


def test_the_axis_begins_near_the_least_rate_where_all_are_high() -> None:
    def ticks(rate: float) -> set[str]:
        quiet = make_outcome(segments=(Segment(begin_s=0, end_s=10, cause="training", samples_per_s=rate),))
        return {shape.text for shape in plot_throughput([quiet]).shapes if isinstance(shape, Text) and shape.size == 10}

    assert ticks(8.7) == {"0.8", "0.9", "1"} == ticks(8.0)
    assert ticks(11) == {"0.9", "0.95", "1"} == ticks(9.99)
    assert ticks(4) == {"0", "0.5", "1"}
