"""Traced steps as Gantts, one under the other on one time scale."""

from __future__ import annotations

import html
from collections.abc import Sequence

from megatron_elas.cli.report_traces import ShownStep, TracedCell
from megatron_elas.control.step_meter import format_time
from megatron_elas.schedule.chart import Instant, Mark, Row, draw_chart
from megatron_elas.schedule.gantt import COLOURS, TEXT
from megatron_elas.spec.step_report import PASSES
from megatron_elas.spec.step_trace import Span

LEFT, WIDTH = 120, 1200
"""Pixels."""
MEASURED, PREDICTED = "#0072b2", "#d55e00"
PASS_COLOURS = {
    "forward": COLOURS["F"],
    "backward": COLOURS["B"],
    "input_gradient": COLOURS["B"],
    "weight_gradient": COLOURS["W"],
}
OTHER_COLOURS = {"wait": "#d4d4d4", "exchange": "#b279a2", "optimizer": "#9d755d"}
LETTERS = {"forward": "F", "backward": "B", "input_gradient": "B", "weight_gradient": "W"}
NAMES = {
    "forward": "forward",
    "backward": "backward",
    "weight_gradient": "weight gradient",
    "wait": "waiting for a pass's input",
    "exchange": "gradients and parameters between replicas, copies",
    "optimizer": "optimizer",
}
"""In the legend."""


def draw_steps(steps: Sequence[ShownStep]) -> str:
    """HTML: a legend and a picture per step."""
    longest_s = max(step.span_s for step in steps)
    colours = {**PASS_COLOURS, **OTHER_COLOURS}
    legend = " ".join(
        f'<span style="background:{colours[kind]};padding:2px 8px;color:{_ink(kind)}">{html.escape(name)}</span>'
        for kind, name in NAMES.items()
    )
    pictures = "\n".join(f"<div>{draw_step(step, longest_s)}</div>" for step in steps)
    return f"""<h2>Steps, pass by pass</h2>
<p>A row is a cell: stage.cell, its worker. The number of a pass is its item's; the share at the right is that of the
step in which neither pass nor optimizer ran. <span style="color:{MEASURED}">|</span> measured step time,
<span style="color:{PREDICTED}">|</span> predicted. Rows with a * show their cell's nearest traced step. All have one
time scale.</p>
<p>{legend}</p>
{pictures}
"""


def draw_step(step: ShownStep, longest_s: float) -> str:
    """One picture as SVG; ``longest_s`` is what the width stands for."""
    rows = [_row(step, cell) for cell in step.cells]
    rows += [Row("lost", lost=True, text=text) for text in step.gone]
    marks = [
        Mark(
            row=place,
            start_s=step.begin_of(cell) + span.start_s,
            end_s=step.begin_of(cell) + span.end_s,
            colour={**PASS_COLOURS, **OTHER_COLOURS}[span.kind],
            ink=_ink(span.kind),
            label="" if span.item is None else str(span.item),
            about=_describe_span(cell, span),
        )
        for place, cell in enumerate(step.cells)
        for span in cell.trace.spans
    ]
    instants = [Instant(step.measured_s, MEASURED, f"{format_time(step.measured_s)} measured")]
    if step.predicted_s is not None and step.predicted_s <= longest_s:
        instants.append(Instant(step.predicted_s, PREDICTED, f"{format_time(step.predicted_s)} predicted"))
    return draw_chart(
        rows, marks, span_s=step.span_s, longest_s=longest_s, instants=instants, width=WIDTH, left=LEFT,
        title=describe_step(step),
    )  # fmt: skip


def describe_step(step: ShownStep) -> str:
    """One line for people."""
    layers = " | ".join(f"{first}-{last - 1}" if last > first else "none" for first, last, _ in step.layers)
    cells = " | ".join(str(count) for _, _, count in step.layers)
    predicted = "" if step.predicted_s is None else f", {format_time(step.predicted_s)} predicted"
    return (
        f"{step.why}: step {step.step}, epoch {step.epoch}; layers {layers}, cells shown {cells}; "
        f"{format_time(step.measured_s)} measured{predicted}"
    )


def _row(step: ShownStep, cell: TracedCell) -> Row:
    trace = cell.trace
    busy_s = sum(span.end_s - span.start_s - span.apart_s for span in trace.spans if _counts(span))
    label = f"{trace.stage}.{trace.cell} worker {trace.worker}"
    if not cell.same_step:
        label += " *"
    note = f"{max(0.0, 1 - busy_s / trace.step_s):.1%}"
    return Row(label, note + (" lost" if cell.lost else ""), cell.lost)


def _counts(span: Span) -> bool:
    return span.kind in PASSES or span.kind == "optimizer"


def _describe_span(cell: TracedCell, span: Span) -> str:
    trace = cell.trace
    times = f"{format_time(span.end_s - span.start_s)}, {span.start_s:.6g} to {span.end_s:.6g} s"
    where = f"worker {trace.worker}, step {trace.step}"
    if span.item is None:
        name = NAMES.get(span.kind, span.kind)
        return f"{name}: {times}; {where}"
    waited = f", of it {format_time(span.apart_s)} for parameters of other replicas" if span.apart_s else ""
    kind = span.kind.replace("_", " ")
    letter = f"{trace.stage}{LETTERS[span.kind]}{span.item}"
    return f"{letter}: {kind} of item {span.item}, {span.samples} samples: {times}{waited}; {where}"


def _ink(kind: str) -> str:
    return TEXT[LETTERS[kind]] if kind in LETTERS else "black" if kind == "wait" else "white"
