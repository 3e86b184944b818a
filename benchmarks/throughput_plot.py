"""A picture of throughput over time through losses: a panel for each system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_elas.simulator.picture import Line, Picture, Point, Text
from megatron_elas.simulator.plots import COLOURS

LEFT, RIGHT, TOP, BOTTOM = 110, 24, 44, 40
"""Margins in pixels."""
PANEL, GAP = 90, 16
"""Height of a panel, and below it, in pixels."""
GREY, RED = "#dddddd", "#cc0000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Of one system."""

    name: str
    ends_s: tuple[float, ...]
    """Of its steps, ascending; the first one only begins the next."""
    samples: tuple[int, ...]
    """Of each of these steps."""
    losses_s: tuple[float, ...]
    """When workers were lost."""

    def rates(self) -> list[tuple[float, float, float]]:
        """Of every step but the first: begin and end, in seconds since the first one's end, and samples per second."""
        zero_s = self.ends_s[0]
        return [
            (begin_s - zero_s, end_s - zero_s, count / (end_s - begin_s))
            for begin_s, end_s, count in zip(self.ends_s, self.ends_s[1:], self.samples[1:], strict=False)
        ]


def plot_rates(title: str, series: Sequence[Series], *, width: int = 1000) -> Picture:
    """Samples per second of every step, which goes from one end to the next; a recovery makes the step it is in longer.

    Losses are red; the grey lines are zero, and what the first of the series had at its begin.
    """
    picture = Picture(width, TOP + len(series) * (PANEL + GAP) + BOTTOM)
    rates = [one.rates() for one in series]
    longest_s = max(own[-1][1] for own in rates)
    start = rates[0][0][2]
    most = 1.05 * max(rate for own in rates for _, _, rate in own)
    picture.add(Text(x=LEFT, y=22, text=title, size=14))

    def across(seconds: float) -> float:
        return LEFT + (width - LEFT - RIGHT) * seconds / longest_s

    for index, (one, own) in enumerate(zip(series, rates, strict=True)):
        bottom = TOP + index * (PANEL + GAP) + PANEL
        for level in (0.0, start):
            y = bottom - PANEL * level / most
            picture.add(Line(points=[(LEFT, y), (width - RIGHT, y)], colour=GREY))
            picture.add(Text(x=LEFT - 6, y=y + 4, text=f"{level:.3g}", size=10, anchor="end"))
        for loss_s in one.losses_s:
            x = across(loss_s - one.ends_s[0])
            picture.add(Line(points=[(x, bottom), (x, bottom - PANEL)], colour=RED, about="a worker is lost"))
        corners: list[Point] = []
        for begin_s, end_s, rate in own:
            y = bottom - PANEL * rate / most
            corners += [(across(begin_s), y), (across(end_s), y)]
        about = f"{one.name}: {own[0][2]:.3g} samples/s at the begin, {own[-1][2]:.3g} at the end"
        picture.add(Line(points=corners, colour=COLOURS[index % len(COLOURS)], width=1.5, about=about))
        picture.add(Text(x=LEFT - 40, y=bottom - PANEL / 2 + 4, text=one.name, anchor="end"))
    bottom = TOP + len(series) * (PANEL + GAP) - GAP
    for quarter in range(5):
        seconds = longest_s * quarter / 4
        anchor = "end" if quarter == 4 else "middle"
        picture.add(Text(x=across(seconds), y=bottom + 18, text=f"{seconds:.0f} s", size=11, anchor=anchor))
    return picture
