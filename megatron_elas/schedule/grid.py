"""A schedule as text: the orders, with what is wrong in them; or the cells over time."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_elas.schedule.actions import Schedule, format_order
from megatron_elas.schedule.checks import Fault
from megatron_elas.schedule.timing import Timeline


def print_orders(schedule: Schedule, faults: Sequence[Fault] = ()) -> str:
    """One line per cell, ``stage.cell: 0F0 0F1 0B0 ...``, and below it a line for each fault, under its action."""
    lines = []
    for stage, cell in schedule.cells():
        order = schedule.orders[stage][cell]
        label = f"{stage}.{cell}: "
        lines.append((label + format_order(order)).rstrip())
        for fault in faults:
            if (fault.stage, fault.cell) == (stage, cell):
                column = len(label) + sum(len(str(action)) + 1 for action in order[: fault.position])
                lines.append(" " * column + f"^ {fault.text}")
    return "\n".join(lines)


def draw_text(timeline: Timeline, *, width: int = 110) -> str:
    """The cells over time, one line each, as wide as asked.

    A pass begins with its letter and its item's number as far as there is room; ``.`` is waiting. The last column is
    the share of the step in which the cell does not compute.
    """
    schedule, step = timeline.program.schedule, timeline.step_s
    scale = width / step if step else 0.0
    lines = []
    for stage, cell in schedule.cells():
        row = ["."] * width
        for action, start, end in timeline.cell(stage, cell):
            left, right = round(start * scale), round(end * scale)
            text = f"{action.kind}{action.item}".ljust(right - left, "-")[: right - left]
            row[left:right] = text
        lines.append(f"{stage}.{cell:<2} |{''.join(row)}| {timeline.bubble(stage, cell):4.0%}")
    return "\n".join([*lines, f"step {step:.4g} s"])
