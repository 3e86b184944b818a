"""Pictures of outcomes: throughput over time, and what the time went to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from megatron_elas.simulator.outcome import CAUSES, Outcome
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
"""Of what time goes to; ``slower`` is the part of training that missing or slow devices cost."""
LEFT, RIGHT, TOP, BOTTOM = 110, 24, 56, 44
"""Margins in pixels."""
PANEL, GAP = 110, 14
"""Height of a policy's panel, and below it, in pixels."""
GRID = "#dddddd"


def plot_throughput(outcomes: Sequence[Outcome], *, width: int = 1100) -> Picture:
    """Samples that count per second, relative to the undisturbed stock job, over time: a panel per policy.

    A pixel shows the mean of the time that it stands for, so a short recovery is a small dip.

    Args:
        outcomes: Of the same job and trace, at least one.
        width: In pixels.
    """
    picture = Picture(width, TOP - 24 + len(outcomes) * (PANEL + GAP) + BOTTOM)
    pixels = width - LEFT - RIGHT
    lines = [useful_rates(outcome, pixels) for outcome in outcomes]
    low, high = _range(lines)
    picture.add(Text(x=LEFT, y=20, text="Throughput, relative to the undisturbed job", size=14))
    for index, (outcome, line) in enumerate(zip(outcomes, lines, strict=True)):
        bottom = TOP - 24 + index * (PANEL + GAP) + PANEL

        def height(rate: float, bottom: float = bottom) -> float:
            return bottom - PANEL * (rate - low) / (high - low)

        for tick in (low, (low + 1) / 2, 1.0):
            picture.add(Line(points=[(LEFT, height(tick)), (width - RIGHT, height(tick))], colour=GRID))
            picture.add(Text(x=LEFT - 6, y=height(tick) + 4, text=f"{tick:.3g}", size=10, anchor="end"))
        about = f"{outcome.policy}: goodput {outcome.goodput:.4f}"
        colour = COLOURS[index % len(COLOURS)]
        picture.add(Line(points=_corners(line, height), colour=colour, width=1.5, about=about))
        picture.add(Text(x=LEFT - 40, y=bottom - PANEL / 2 + 4, text=outcome.policy, anchor="end"))
    bottom = TOP - 24 + len(outcomes) * (PANEL + GAP) - GAP
    for quarter in range(5):
        at_s = outcomes[0].seconds * quarter / 4
        anchor = "end" if quarter == 4 else "middle"
        x = LEFT + pixels * quarter / 4
        picture.add(Text(x=x, y=bottom + 18, text=format_duration(at_s), size=11, anchor=anchor))
    return picture


def useful_rates(outcome: Outcome, count: int) -> list[float]:
    """Of equal stretches of an outcome's time: samples that count, as a share of the undisturbed stock job's."""
    stretch_s = outcome.seconds / count
    sums = [0.0] * count
    for segment in outcome.segments:
        if segment.cause != "training":
            continue
        first = min(int(segment.begin_s / stretch_s), count - 1)
        last = min(int(segment.end_s / stretch_s), count - 1)
        for index in range(first, last + 1):
            overlap_s = min((index + 1) * stretch_s, segment.end_s) - max(index * stretch_s, segment.begin_s)
            sums[index] += segment.samples_per_s * max(0.0, overlap_s)
    return [total / (stretch_s * outcome.stock_samples_per_s) for total in sums]


def _range(lines: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Of the axis of all panels: from 0, or from the tenth below all rates where these are all near each other."""
    least, most = min(map(min, lines)), max(map(max, lines))
    return (math.floor(10 * min(least, 0.95) + 1e-6) / 10 if least > 0.5 else 0.0), 1.02 * max(1.0, most)


def _corners(line: Sequence[float], height: Callable[[float], float]) -> list[Point]:
    """Of steps one pixel wide, without those that change nothing."""
    corners: list[Point] = [(LEFT, height(line[0]))]
    for index, (before, after) in enumerate(pairwise(line), 1):
        if abs(after - before) > 1e-9:
            corners += [(LEFT + index, height(before)), (LEFT + index, height(after))]
    return [*corners, (LEFT + len(line), height(line[-1]))]


def plot_shares(outcomes: Sequence[Outcome], *, width: int = 1100) -> Picture:
    """What the time of each policy went to: all of it, and the lost part enlarged.

    Training is divided in two: what it would have taken at the policy's own speed without failures, and the rest.

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
    x = float(LEFT)
    for kind in kinds:
        picture.add(Box(x=x, y=32, width=14, height=10, colour=SHADES[kind]), Text(x=x + 18, y=41, text=kind))
        x += 34 + 7.2 * len(kind)
    whole = (width - LEFT - RIGHT) * 0.5
    second = LEFT + whole + 40
    rest = width - RIGHT - second
    worst = max((1 - part["training"] for part in parts), default=0) or 1.0
    for index, (outcome, part) in enumerate(zip(outcomes, parts, strict=True)):
        y = TOP + index * (row + gap)
        picture.add(Text(x=LEFT - 10, y=y + 17, text=outcome.policy, anchor="end"))
        _bar(picture, outcome, part, kinds, LEFT, y, row, whole)
        lost = [kind for kind in kinds if kind != "training"]
        _bar(picture, outcome, part, lost, second, y, row, rest / worst)
    y = TOP + len(outcomes) * (row + gap) + 14
    picture.add(
        Text(x=LEFT, y=y, text="0", size=11),
        Text(x=LEFT + whole, y=y, text="100%", size=11, anchor="end"),
        Text(x=second, y=y, text="lost: 0", size=11),
        Text(x=width - RIGHT, y=y, text=f"{worst:.2%}", size=11, anchor="end"),
    )
    return picture


def time_shares(outcome: Outcome) -> dict[str, float]:
    """Shares of the time by cause, training divided in two; they sum to 1."""
    parts = {cause: outcome.share(cause) for cause in CAUSES}
    full = min(outcome.own_goodput, parts["training"])
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
