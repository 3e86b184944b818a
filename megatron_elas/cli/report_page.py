"""``elas report`` as one HTML page that needs no other file: a plot of steps and events, traced steps, the text."""

from __future__ import annotations

import html
from collections.abc import Sequence

from megatron_elas.cli.report_facts import EpochFacts, JobLog, StepPoint
from megatron_elas.cli.report_gantt import draw_steps
from megatron_elas.cli.report_traces import shown_steps
from megatron_elas.control.step_meter import format_time
from megatron_elas.simulator.picture import Box, Line, Picture, Text

WIDTH, HEIGHT = 1100, 380
LEFT, RIGHT, TOP, BOTTOM = 80, 24, 56, 44
"""Margins in pixels."""
MEASURED, FIRST, PREDICTED, GRID = "#0072b2", "#a6cbe3", "#d55e00", "#dddddd"
RECOVERY, MIGRATION, RESTART = "#444444", "#009e73", "#cc79a7"
DOT = 4
"""Pixels."""
HEADROOM = 2.0
"""The plot reaches so many times the largest of the epochs' medians and predictions; what is longer is at its edge."""


def draw_page(log: JobLog, text: str) -> str:
    """The page.

    Args:
        log: Of the job.
        text: What ``elas report`` prints.
    """
    title = f"elas report: {log.folder}"
    plot = plot_steps(log).svg() if log.reports else ""
    steps = draw_steps(shown_steps(log)) if log.traces else ""
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{html.escape(title)}</title>
<style>
body {{ font-family: sans-serif; margin: 16px }}
pre {{ font-size: 13px; overflow-x: auto }}
svg {{ max-width: 100%; height: auto }}
</style>
<h1>{html.escape(title)}</h1>
{plot}
{steps}
<pre>{html.escape(text)}</pre>
</html>
"""


def plot_steps(log: JobLog) -> Picture:
    """Measured time of every step, what was predicted for its epoch, and where the job recovered or migrated.

    Args:
        log: With one step at least.
    """
    epochs, points = log.epochs, log.points
    resumed = [recovery.resume_step for recovery in log.recoveries]
    resumed += [migration.resume_step for migration in log.migrations]
    scale = _Scale(epochs, points, resumed)
    picture = Picture(WIDTH, HEIGHT)
    _draw_frame(picture, scale)
    for recovery in log.recoveries:
        x = scale.x(recovery.resume_step)
        total = recovery.phases_ms.get("total")
        length = "" if total is None else f", {total:.1f} ms"
        about = f"epoch {recovery.epoch} from step {recovery.resume_step}{length}: lost {'; '.join(recovery.lost)}"
        picture.add(Line(points=[(x, TOP), (x, HEIGHT - BOTTOM)], colour=RECOVERY, width=1.5, about=about))
        picture.add(Text(x=x + 4, y=TOP - 4, text=f"epoch {recovery.epoch}", size=11, colour=RECOVERY))
    for migration in log.migrations:
        x = scale.x(migration.resume_step)
        total = migration.phases_ms.get("total")
        length = "" if total is None else f", stood still for {total:.1f} ms"
        about = f"epoch {migration.epoch} from step {migration.resume_step}{length}: {migration.what}"
        picture.add(Line(points=[(x, TOP), (x, HEIGHT - BOTTOM)], colour=MIGRATION, width=1.5, about=about))
        picture.add(Text(x=x + 4, y=TOP - 4, text=f"epoch {migration.epoch}", size=11, colour=MIGRATION))
    for step in log.controller_restarts:
        x = scale.x(step + 0.5)
        picture.add(Line(points=[(x, TOP), (x, HEIGHT - BOTTOM)], colour=RESTART, about="the controller was restarted"))
    for epoch in epochs:
        if epoch.predicted_s is not None:
            y = scale.y(epoch.predicted_s)
            about = f"epoch {epoch.epoch}: {format_time(epoch.predicted_s)} predicted"
            ends = [(scale.x(epoch.first_step) - DOT, y), (scale.x(epoch.last_step) + DOT, y)]
            picture.add(Line(points=ends, colour=PREDICTED, width=2, about=about))
    for point in points:
        picture.add(
            Box(
                x=scale.x(point.step) - DOT / 2,
                y=scale.y(point.measured_s) - DOT / 2,
                width=DOT,
                height=DOT,
                colour=FIRST if point.first else MEASURED,
                about=f"step {point.step}, epoch {point.epoch}: {format_time(point.measured_s)}",
            )
        )
    return picture


class _Scale:
    """Steps and seconds as pixels."""

    def __init__(self, epochs: Sequence[EpochFacts], points: Sequence[StepPoint], others: Sequence[int]) -> None:
        steps = [*(point.step for point in points), *others]
        self.first, self.last = min(steps), max(*steps, min(steps) + 1)
        steady = [point.measured_s for point in points if not point.first]
        usual = [epoch.measured_s for epoch in epochs]
        usual += [epoch.predicted_s for epoch in epochs if epoch.predicted_s is not None]
        self.top_s = min(HEADROOM * max(usual), 1.1 * max([*usual, *steady]))

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - self.first) / (self.last - self.first)

    def y(self, seconds: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(1.0, seconds / self.top_s)


def _draw_frame(picture: Picture, scale: _Scale) -> None:
    picture.add(Text(x=LEFT, y=20, text="Time of a step", size=14))
    legend = (("measured", MEASURED), ("first step under a plan", FIRST), ("predicted", PREDICTED))
    events = (("recovery", RECOVERY), ("migration", MIGRATION), ("controller restarted", RESTART))
    for place, (name, colour) in enumerate((*legend, *events)):
        x = LEFT + 150 + 146 * place
        picture.add(Box(x=x, y=11, width=10, height=10, colour=colour), Text(x=x + 15, y=20, text=name))
    for tick in range(5):
        seconds = scale.top_s * tick / 4
        y = scale.y(seconds)
        picture.add(Line(points=[(LEFT, y), (WIDTH - RIGHT, y)], colour=GRID))
        picture.add(Text(x=LEFT - 6, y=y + 4, text=format_time(seconds), size=11, anchor="end"))
    for tick in range(5):
        step = round(scale.first + (scale.last - scale.first) * tick / 4)
        anchor = "end" if tick == 4 else "middle"
        picture.add(Text(x=scale.x(step), y=HEIGHT - BOTTOM + 18, text=f"step {step}", size=11, anchor=anchor))
