"""A Gantt as SVG: a row per cell, bars along the time, what a bar is when the mouse is on it. Planned or measured."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

ROW, GAP, LEFT, TOP, RIGHT, BOTTOM = 22, 4, 60, 34, 60, 24
"""Pixels."""
IDLE, INK, LOST = "#eeeeee", "black", "#c44e52"


class Row(NamedTuple):
    """One line of bars."""

    label: str
    """Left of it."""
    note: str = ""
    """Right of it."""
    lost: bool = False
    """Marked as one that is lost."""
    text: str = ""
    """In the place of bars."""


class Mark(NamedTuple):
    """One bar."""

    row: int
    start_s: float
    end_s: float
    colour: str
    """As ``#rrggbb``."""
    ink: str
    """Colour of the label."""
    label: str
    """Shown where there is room."""
    about: str
    """For the mouse."""


class Instant(NamedTuple):
    """A line through all rows."""

    at_s: float
    colour: str
    about: str


def chart_height(rows: int) -> int:
    """Pixels of a picture with so many rows."""
    return TOP + rows * (ROW + GAP) + BOTTOM


def draw_chart(
    rows: Sequence[Row],
    marks: Sequence[Mark],
    *,
    span_s: float,
    longest_s: float | None = None,
    instants: Sequence[Instant] = (),
    width: int = 1200,
    left: int = LEFT,
    title: str = "",
) -> str:
    """The picture as SVG text; a bar's ``<title>`` says what it is.

    Args:
        rows: From above.
        marks: Within ``span_s``.
        span_s: That the rows are long.
        longest_s: That the whole width stands for, so that several pictures have one scale; None: ``span_s``.
        instants: Drawn above the bars.
        width: In pixels.
        left: Pixels for the rows' labels.
        title: Above.
    """
    scale = (width - left - RIGHT) / (longest_s or span_s or 1.0)
    right = left + span_s * scale if span_s else width - RIGHT
    height = chart_height(len(rows))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="18" font-size="13">{html.escape(title)}</text>',
    ]
    for place, row in enumerate(rows):
        y = TOP + place * (ROW + GAP)
        ink = LOST if row.lost else INK
        lines.append(f'<rect x="{left}" y="{y}" width="{right - left:.2f}" height="{ROW}" fill="{IDLE}"/>')
        lines.append(f'<text x="6" y="{y + 15}" fill="{ink}">{html.escape(row.label)}</text>')
        lines.append(f'<text x="{right + 6:.2f}" y="{y + 15}" fill="{ink}">{html.escape(row.note)}</text>')
        if row.text:
            lines.append(f'<text x="{left + 6}" y="{y + 15}" fill="{ink}">{html.escape(row.text)}</text>')
    for mark in marks:
        x, y = left + mark.start_s * scale, TOP + mark.row * (ROW + GAP)
        wide = (mark.end_s - mark.start_s) * scale
        text = f'<text x="2" y="15" fill="{mark.ink}">{html.escape(mark.label)}</text>' if fits(mark, wide) else ""
        lines.append(
            f'<g class="bar" transform="translate({x:.2f},{y})"><title>{html.escape(mark.about)}</title>'
            f'<rect width="{wide:.2f}" height="{ROW}" fill="{mark.colour}" stroke="white" stroke-width="0.5"/>'
            f"{text}</g>"
        )
    foot = height - BOTTOM
    for instant in instants:
        x = left + instant.at_s * scale
        lines.append(
            f'<line x1="{x:.2f}" y1="{TOP - 4}" x2="{x:.2f}" y2="{foot}" stroke="{instant.colour}" stroke-width="2">'
            f"<title>{html.escape(instant.about)}</title></line>"
        )
    lines.append(f'<text x="{left}" y="{foot + 14}">0 s</text>')
    lines.append(f'<text x="{right:.2f}" y="{foot + 14}" text-anchor="end">{span_s:.6g} s</text>')
    lines.append("</svg>")
    return "\n".join(lines)


def fits(mark: Mark, wide: float) -> bool:
    """Whether the label has room in a bar of so many pixels."""
    return bool(mark.label) and wide > 7 * len(mark.label) + 3
