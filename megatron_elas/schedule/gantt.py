"""A timeline as a picture: SVG, PNG, or an HTML page of its own on which the mouse tells what a bar is."""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_elas.schedule.actions import Action
from megatron_elas.schedule.chart import (
    GAP,
    IDLE,
    INK,
    LEFT,
    RIGHT,
    ROW,
    TOP,
    Mark,
    Row,
    chart_height,
    draw_chart,
    fits,
)
from megatron_elas.schedule.timing import Timeline
from megatron_elas.spec.errors import BadUsage

COLOURS = {"F": "#4c78a8", "B": "#54a24b", "W": "#eeca3b"}
TEXT = {"F": "white", "B": "white", "W": "black"}
NAMES = {"F": "forward", "B": "backward", "W": "weight gradient"}


class Bar(NamedTuple):
    """One pass."""

    action: Action
    cell: int
    row: int
    start_s: float
    end_s: float
    samples: int

    def describe(self, split: bool) -> str:
        """For the mouse."""
        name = NAMES[self.action.kind] if split or self.action.kind != "B" else "backward (both gradients)"
        return (
            f"{self.action} on cell {self.cell}: {name} of item {self.action.item}, {self.samples} samples, "
            f"{self.start_s:.6g} to {self.end_s:.6g} s"
        )


def bars(timeline: Timeline) -> Iterator[Bar]:
    """Every pass, cell by cell."""
    schedule, flow = timeline.program.schedule, timeline.program.flow
    for row, (stage, cell) in enumerate(schedule.cells()):
        for action, start, end in timeline.cell(stage, cell):
            yield Bar(action, cell, row, start, end, flow.samples[flow.index[stage][action.item]])


def _rows(timeline: Timeline) -> list[Row]:
    return [
        Row(f"{stage}.{cell}", f"{timeline.bubble(stage, cell):.1%}")
        for stage, cell in timeline.program.schedule.cells()
    ]


def _marks(timeline: Timeline) -> list[Mark]:
    schedule = timeline.program.schedule
    split = {place: schedule.is_split(*place) for place in schedule.cells()}
    return [
        Mark(
            row=bar.row,
            start_s=bar.start_s,
            end_s=bar.end_s,
            colour=COLOURS[bar.action.kind],
            ink=TEXT[bar.action.kind],
            label=str(bar.action.item),
            about=bar.describe(split[bar.action.stage, bar.cell]),
        )
        for bar in bars(timeline)
    ]


def draw_svg(timeline: Timeline, *, width: int = 1200, title: str = "") -> str:
    """The picture as SVG text; a bar's ``<title>`` says what it is."""
    return draw_chart(_rows(timeline), _marks(timeline), span_s=timeline.step_s, width=width, title=title)


def draw_html(timeline: Timeline, *, width: int = 1200, title: str = "") -> str:
    """A page that needs no other file: the picture, a legend, and a line that tells what is under the mouse."""
    legend = " ".join(
        f'<span style="background:{COLOURS[kind]};padding:2px 8px;color:{TEXT[kind]}">{name}</span>'
        for kind, name in NAMES.items()
    )
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{html.escape(title or "schedule")}</title>
<style>
body {{ font-family: sans-serif; margin: 16px }}
.bar:hover rect {{ stroke: black; stroke-width: 1.5 }}
#about {{ min-height: 1.5em; margin: 8px 0 }}
</style>
<p>{legend}</p>
<p id="about">Move the mouse over a pass.</p>
{draw_svg(timeline, width=width, title=title)}
<script>
const about = document.getElementById("about");
for (const bar of document.querySelectorAll(".bar"))
  bar.addEventListener("mouseenter", () => about.textContent = bar.querySelector("title").textContent);
</script>
</html>
"""


def write_png(timeline: Timeline, path: Path, *, width: int = 1200, title: str = "") -> None:
    """The picture as a PNG file.

    Raises:
        BadUsage: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise BadUsage(f"{path}: PNG needs Pillow, which is missing: 'pip install pillow', or write .svg") from error
    rows = _rows(timeline)
    image = Image.new("RGB", (width, chart_height(len(rows))), "white")
    draw: Any = ImageDraw.Draw(image)
    scale = (width - LEFT - RIGHT) / (timeline.step_s or 1.0)
    draw.text((LEFT, 8), title, fill="black")
    for place, row in enumerate(rows):
        y = TOP + place * (ROW + GAP)
        draw.rectangle((LEFT, y, width - RIGHT, y + ROW - 1), fill=IDLE)
        draw.text((6, y + 5), row.label, fill=INK)
        draw.text((width - RIGHT + 6, y + 5), row.note, fill=INK)
    for mark in _marks(timeline):
        x, end, y = LEFT + mark.start_s * scale, LEFT + mark.end_s * scale, TOP + mark.row * (ROW + GAP)
        draw.rectangle((x, y, max(x, end - 1), y + ROW - 1), fill=mark.colour)
        if fits(mark, end - x):
            draw.text((x + 2, y + 5), mark.label, fill=mark.ink)
    image.save(path, format="PNG")


def write_gantt(timeline: Timeline, path: Path, *, width: int = 1200, title: str = "") -> None:
    """Write what the file's ending asks for: .svg, .html or .png.

    Raises:
        BadUsage: Another ending, or PNG without Pillow.
    """
    if path.suffix == ".png":
        write_png(timeline, path, width=width, title=title)
    elif path.suffix == ".svg":
        path.write_text(draw_svg(timeline, width=width, title=title))
    elif path.suffix == ".html":
        path.write_text(draw_html(timeline, width=width, title=title))
    else:
        raise BadUsage(f"{path}: a picture ends in .svg, .html or .png")
