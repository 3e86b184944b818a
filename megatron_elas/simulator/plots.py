"""Pictures of outcomes: throughput over time, and what the time went to."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_elas.simulator.outcome import CAUSES, Outcome, Segment
from megatron_elas.simulator.picture import Box, Line, Picture, Point, Text
from megatron_elas.simulator.times import format_duration

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#444444")
"""Of the policies, in turn."""
SHADES = {
    "training": "#4c78a8",
    "slower": "#c6dbef",
    "redone": "#e45756",
    "detecting": "#eeca3b",
    "recovering": "#f58518",
    "restarting": "#b279a2",
    "joining": "#54a24b",
    "checkpointing": "#9d755d",
    "stopped": "#444444",
}
"""Of what time goes to; ``slower`` is the part of training that fewer devices cost."""
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 56, 44
"""Margins in pixels."""
GRID = "#dddddd"
POINTS = 2400
"""Of a line, at most; with more segments than that a line shows means over equal stretches of time."""


def plot_throughput(outcomes: Sequence[Outcome], *, width: int = 1100, height: int = 420) -> Picture:
    """Samples that count per second, relative to the undisturbed stock job, over time: a line per policy.

    Args:
        outcomes: Of the same job and trace, at least one.
        width: In pixels.
        height: In pixels.
    """
    picture = Picture(width, height)
    seconds = max(outcome.seconds for outcome in outcomes)
    series = [useful_rate(outcome) for outcome in outcomes]
    highest = max([1.0, *(rate for line in series for _, rate in line)]) * 1.05
    plain = (width - LEFT - RIGHT, height - TOP - BOTTOM)

    def place(at_s: float, rate: float) -> Point:
        return LEFT + plain[0] * at_s / seconds, TOP + plain[1] * (1 - rate / highest)

    picture.add(Text(x=LEFT, y=20, text="Training throughput, relative to the undisturbed job", size=14))
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        picture.add(Line(points=[place(0, tick), place(seconds, tick)], colour=GRID))
        picture.add(Text(x=LEFT - 8, y=place(0, tick)[1] + 4, text=f"{tick:.2f}", size=11, anchor="end"))
    for quarter in range(5):
        at_s = seconds * quarter / 4
        x, y = place(at_s, 0)
        anchor = "end" if quarter == 4 else "middle"
        picture.add(Text(x=x, y=y + 18, text=format_duration(at_s), size=11, anchor=anchor))
    x = float(LEFT)
    for index, (outcome, line) in enumerate(zip(outcomes, series, strict=True)):
        colour = COLOURS[index % len(COLOURS)]
        about = f"{outcome.policy}: goodput {outcome.goodput:.4f}"
        picture.add(Line(points=[place(*point) for point in line], colour=colour, width=1.5, about=about))
        picture.add(Box(x=x, y=32, width=14, height=8, colour=colour), Text(x=x + 19, y=41, text=about))
        x += 40 + 7.2 * len(about)
    return picture


def useful_rate(outcome: Outcome, points: int = POINTS) -> list[tuple[float, float]]:
    """Corners (second, share of the undisturbed stock rate) of a line through an outcome's segments."""
    if 2 * len(outcome.segments) <= points:
        corners = []
        for segment in outcome.segments:
            rate = _useful(segment) / outcome.stock_samples_per_s
            corners += [(segment.begin_s, rate), (segment.end_s, rate)]
        return corners
    stretch_s = outcome.seconds / points
    sums = [0.0] * points
    for segment in outcome.segments:
        rate = _useful(segment) / outcome.stock_samples_per_s
        first = min(int(segment.begin_s / stretch_s), points - 1)
        last = min(int(segment.end_s / stretch_s), points - 1)
        for index in range(first, last + 1):
            begin_s, end_s = index * stretch_s, (index + 1) * stretch_s
            sums[index] += rate * max(0.0, min(end_s, segment.end_s) - max(begin_s, segment.begin_s))
    return [((index + 0.5) * stretch_s, total / stretch_s) for index, total in enumerate(sums)]


def _useful(segment: Segment) -> float:
    return segment.samples_per_s if segment.cause == "training" else 0.0


def plot_shares(outcomes: Sequence[Outcome], *, width: int = 1100) -> Picture:
    """What the time of each policy went to: all of it, and the lost part enlarged.

    Training is divided in two: what it would have taken at the speed of the undisturbed stock job, and the rest.

    Args:
        outcomes: Of the same job and trace, at least one.
        width: In pixels.
    """
    row, gap = 26, 10
    parts = [time_shares(outcome) for outcome in outcomes]
    kinds = [kind for kind in SHADES if any(part.get(kind, 0) > 0 for part in parts)]
    height = TOP + len(outcomes) * (row + gap) + BOTTOM
    picture = Picture(width, height)
    picture.add(Text(x=LEFT, y=20, text="What the time went to", size=14))
    x = 110.0
    for kind in kinds:
        picture.add(Box(x=x, y=32, width=14, height=10, colour=SHADES[kind]), Text(x=x + 18, y=41, text=kind))
        x += 34 + 7.2 * len(kind)
    whole = (width - 110 - RIGHT) * 0.5
    second = 110 + whole + 40
    rest = width - RIGHT - second
    worst = max((1 - part["training"] for part in parts), default=0) or 1.0
    for index, (outcome, part) in enumerate(zip(outcomes, parts, strict=True)):
        y = TOP + index * (row + gap)
        picture.add(Text(x=100, y=y + 17, text=outcome.policy, anchor="end"))
        _bar(picture, outcome, part, kinds, 110, y, row, whole)
        lost = [kind for kind in kinds if kind != "training"]
        _bar(picture, outcome, part, lost, second, y, row, rest / worst)
    y = TOP + len(outcomes) * (row + gap) + 14
    picture.add(
        Text(x=110, y=y, text="0", size=11),
        Text(x=110 + whole, y=y, text="100%", size=11, anchor="end"),
        Text(x=second, y=y, text="lost: 0", size=11),
        Text(x=width - RIGHT, y=y, text=f"{worst:.2%}", size=11, anchor="end"),
    )
    return picture


def time_shares(outcome: Outcome) -> dict[str, float]:
    """Shares of the time by cause, training divided in two; they sum to 1."""
    parts = {cause: outcome.share(cause) for cause in CAUSES}
    full = min(outcome.goodput, parts["training"])
    return {**parts, "training": full, "slower": parts["training"] - full}


def _bar(
    picture: Picture,
    outcome: Outcome,
    part: dict[str, float],
    kinds: Sequence[str],
    x: float,
    y: float,
    height: float,
    scale: float,
) -> None:
    for kind in kinds:
        if part[kind] > 0:
            about = f"{outcome.policy}: {kind} {part[kind]:.3%}"
            picture.add(
                Box(x=x, y=y, width=part[kind] * scale, height=height, colour=SHADES[kind], about=about),
            )
            x += part[kind] * scale
