"""Pictures have a bar per pass, at its place, that says what it is."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from PIL import Image

from megatron_elas.schedule.chart import LEFT, RIGHT, ROW, TOP
from megatron_elas.schedule.gantt import COLOURS, bars, draw_html, draw_svg, write_gantt
from megatron_elas.schedule.greedy import Limit
from megatron_elas.schedule.items import deal_round
from megatron_elas.schedule.split_backward import split_backward
from megatron_elas.schedule.timing import Timeline, time_schedule
from megatron_elas.spec.errors import BadUsage
from tests.schedule.cases import unit_durations

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    items = [deal_round(4, 2, 2), deal_round(4, 2, 1)]
    durations = unit_durations(items)
    found = split_backward(items, durations, [Limit(samples=20)] * 2)
    return time_schedule(found.schedule, durations)


def test_the_picture_has_a_bar_per_pass_at_its_time(timeline: Timeline) -> None:
    drawn = ET.fromstring(draw_svg(timeline, width=1120, title="one < two"))
    groups = [group for group in drawn.iter(f"{SVG}g") if group.get("class") == "bar"]
    assert len(groups) == len(list(bars(timeline))) == timeline.program.schedule.num_actions
    scale = (1120 - LEFT - RIGHT) / timeline.step_s
    for bar, group in zip(bars(timeline), groups, strict=True):
        rect, title = group.find(f"{SVG}rect"), group.find(f"{SVG}title")
        assert rect is not None and title is not None and title.text is not None
        assert float(rect.get("width", "0")) == pytest.approx((bar.end_s - bar.start_s) * scale, abs=0.01)
        assert rect.get("fill") == COLOURS[bar.action.kind]
        assert group.get("transform", "").startswith(f"translate({LEFT + bar.start_s * scale:.2f},")
        assert title.text.startswith(f"{bar.action} on cell {bar.cell}: ")
        assert "2 samples" in title.text
    assert "one < two" in [text.text for text in drawn.iter(f"{SVG}text")]


def test_the_page_needs_no_other_file_and_tells_what_the_mouse_is_on(timeline: Timeline) -> None:
    page = draw_html(timeline, title="lost & found")
    assert "<title>lost &amp; found</title>" in page
    assert "mouseenter" in page and draw_svg(timeline, title="lost & found") in page
    assert "src=" not in page and "href=" not in page


def test_the_ending_of_the_file_says_what_is_written(timeline: Timeline, tmp_path: Path) -> None:
    for name in ("a.svg", "a.html", "a.png"):
        write_gantt(timeline, tmp_path / name, title="t")
    assert (tmp_path / "a.svg").read_text() == draw_svg(timeline, title="t")
    assert (tmp_path / "a.html").read_text() == draw_html(timeline, title="t")
    with Image.open(tmp_path / "a.png") as image:
        first = next(bars(timeline))
        assert image.size[0] == 1200
        pixel = image.getpixel((LEFT + 1, TOP + ROW - 2))
        assert pixel == tuple(bytes.fromhex(COLOURS[first.action.kind][1:]))
    with pytest.raises(BadUsage, match=r"a.gif: a picture ends in .svg, .html or .png"):
        write_gantt(timeline, tmp_path / "a.gif")


def test_without_pillow_there_is_a_sentence(
    timeline: Timeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(BadUsage, match=r"PNG needs Pillow, which is missing: 'pip install pillow', or write .svg"):
        write_gantt(timeline, tmp_path / "a.png")
