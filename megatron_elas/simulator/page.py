"""Outcomes as one HTML page that needs no other file."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from megatron_elas.simulator.outcome import Outcome
from megatron_elas.simulator.picture import Picture
from megatron_elas.simulator.table import table_rows
from megatron_elas.simulator.times import format_duration
from megatron_elas.simulator.trace_files import format_devices
from megatron_elas.simulator.traces import Event, Failure, Trace

MOST_EVENTS = 200
"""That are listed."""


def draw_page(
    outcomes: Sequence[Outcome],
    trace: Trace,
    pictures: Sequence[Picture],
    facts: Mapping[str, str],
) -> str:
    """The page.

    Args:
        outcomes: Of the same job and trace.
        trace: Its events are listed, the first ones of many.
        pictures: Shown in this order.
        facts: What was simulated, by name.
    """
    head, *rows = table_rows(outcomes)
    title = f"{outcomes[0].job} on {outcomes[0].cluster}, {trace.name}"
    listed = trace.events[:MOST_EVENTS]
    more = len(trace.events) - len(listed)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{html.escape(title)}</title>
<style>
body {{ font-family: sans-serif; margin: 16px; max-width: 1150px }}
table {{ border-collapse: collapse; margin: 12px 0; font-size: 13px }}
th, td {{ padding: 3px 9px; text-align: right; border-bottom: 1px solid #ddd }}
th:first-child, td:first-child {{ text-align: left }}
svg {{ max-width: 100%; height: auto }}
</style>
<h1>{html.escape(title)}</h1>
<p>{"; ".join(f"{html.escape(name)}: {html.escape(value)}" for name, value in facts.items())}</p>
<table>
{_row("th", head)}
{"".join(_row("td", row) for row in rows)}</table>
{"".join(picture.svg() for picture in pictures)}
<h2>{len(trace.events)} events</h2>
<table>
{_row("th", ["at", "what", "devices", "for"])}
{"".join(_row("td", _describe(event)) for event in listed)}</table>
{f"<p>and {more} more</p>" if more else ""}
</html>
"""


def _row(cell: str, words: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{cell}>{html.escape(word)}</{cell}>' for word in words)}</tr>\n"


def _describe(event: Event) -> list[str]:
    at = format_duration(event.at_s)
    if isinstance(event, Failure):
        length = "ever" if event.repair_s == float("inf") else format_duration(event.repair_s)
        return [at, event.cause or "failure", format_devices(event.devices), length]
    return [at, f"{event.cause or 'slow'} x{event.factor:g}", str(event.device), format_duration(event.seconds)]
