"""A picture of how far losses are from the undisturbed run's: the losses, and the distances on a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from megatron_elas.simulator.picture import Box, Line, Picture, Text
from megatron_elas.simulator.plots import COLOURS

LEFT, RIGHT, TOP, BOTTOM = 70, 24, 64, 40
"""Margins in pixels."""
LOSSES, DISTANCES, GAP = 150, 300, 40
"""Heights of the two panels and between them, in pixels."""
LEAST = -9
"""Power of ten at the bottom of the scale; below it and at zero lines lie on the bottom."""
GREY, RED, BLACK = "#dddddd", "#cc0000", "#222222"


def plot_deviations(
    title: str,
    undisturbed: Sequence[float],
    losses: Mapping[str, Sequence[float]],
    distances: Mapping[str, Sequence[float]],
    events: Mapping[int, str],
    *,
    width: int = 1000,
) -> Picture:
    """Two panels over the steps.

    Args:
        title: Of the picture.
        undisturbed: Losses of every step, the black line of the upper panel.
        losses: Those of other runs, by the name of the system.
        distances: |loss - undisturbed| of every step, by the name of the system.
        events: What happened, by step: red lines.
        width: In pixels.
    """
    picture = Picture(width, TOP + LOSSES + GAP + DISTANCES + BOTTOM)
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(distances)}
    steps = len(undisturbed)
    picture.add(Text(x=LEFT, y=22, text=title, size=14))
    _name_lines(picture, {"undisturbed": BLACK, **colours})

    def across(step: float) -> float:
        return LEFT + (width - LEFT - RIGHT) * step / max(1, steps - 1)

    upper, lower = TOP + LOSSES, TOP + LOSSES + GAP + DISTANCES
    for step, what in events.items():
        for bottom, height in ((upper, LOSSES), (lower, DISTANCES)):
            x = across(step)
            picture.add(Line(points=[(x, bottom), (x, bottom - height)], colour=RED, about=f"step {step}: {what}"))

    everything = [*undisturbed, *(loss for own in losses.values() for loss in own)]
    low, high = min(everything), max(everything)

    def at_loss(loss: float) -> float:
        return upper - LOSSES * (loss - low) / ((high - low) or 1.0)

    for level in (low, high):
        picture.add(Text(x=LEFT - 6, y=at_loss(level) + 4, text=f"{level:.2f}", size=10, anchor="end"))
    for name, own in {**losses, "undisturbed": undisturbed}.items():
        points = [(across(step), at_loss(loss)) for step, loss in enumerate(own)]
        picture.add(Line(points=points, colour=colours.get(name, BLACK), about=f"loss, {name}"))

    def at_distance(distance: float) -> float:
        power = math.log10(distance) if distance > 0 else LEAST
        return lower - DISTANCES * (min(0.0, max(LEAST, power)) - LEAST) / -LEAST

    for power in range(LEAST, 1):
        y = at_distance(10.0**power)
        picture.add(Line(points=[(LEFT, y), (width - RIGHT, y)], colour=GREY))
        text = "0" if power == LEAST else f"1e{power}"
        picture.add(Text(x=LEFT - 6, y=y + 4, text=text, size=10, anchor="end"))
    for name, own in distances.items():
        points = [(across(step), at_distance(distance)) for step, distance in enumerate(own)]
        picture.add(Line(points=points, colour=colours[name], width=1.5, about=f"|loss - undisturbed|, {name}"))
    picture.add(Text(x=LEFT, y=upper - LOSSES - 6, text="loss", size=11))
    picture.add(Text(x=LEFT, y=lower - DISTANCES - 6, text="|loss - undisturbed|", size=11))
    for quarter in range(5):
        step = round((steps - 1) * quarter / 4)
        anchor = "end" if quarter == 4 else "middle"
        picture.add(Text(x=across(step), y=lower + 18, text=f"step {step}", size=11, anchor=anchor))
    return picture


def _name_lines(picture: Picture, colours: Mapping[str, str]) -> None:
    x = float(LEFT)
    for name, colour in colours.items():
        picture.add(Box(x=x, y=34, width=14, height=10, colour=colour), Text(x=x + 18, y=43, text=name))
        x += 34 + 7.2 * len(name)
