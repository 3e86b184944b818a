"""Traces in files: JSON lines, CSV, and the profiles of ``configs/traces``.

JSON lines: an object for each event, with the fields of a Failure (``at_s``, ``devices``, ``repair_s``) or of a
Slowdown (``at_s``, ``device``, ``factor``, ``seconds``), and ``cause`` where it is known. ``repair_s`` of devices that
never come back is null, or left out. The first line may be ``{"trace": NAME, "seconds": LENGTH}``; without it the trace
is named after the file and ends with the day of its last event.

CSV: failures only. The first line is ``at_s,devices,repair_s``; devices are numbers and ranges such as ``3 8-15``, and
an empty ``repair_s`` means never.

A profile (TOML) holds either ``[[events]]`` with the same fields and ``seconds``, or rates: ``[[failures]]`` and
``[[slowdowns]]``, which a trace is drawn from.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_elas.simulator.failure_rates import DAY_S, Rates
from megatron_elas.simulator.traces import Event, Failure, Slowdown, Trace
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.tables import build, find_table, read_table

CSV_HEADER = ["at_s", "devices", "repair_s"]
MOST_DEVICES = 10_000_000
"""Of one event; a range that was mistyped does not fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """The first line of a file of JSON lines."""

    trace: str
    seconds: float


def load_trace(name: str) -> Trace | Rates:
    """A trace, or the rates to draw one from.

    Args:
        name: Of a profile in ``configs/traces``, or the path of a file that ends in .toml, .jsonl or .csv.

    Raises:
        BadUsage: There is none, or it cannot be used.
    """
    if name.endswith((".jsonl", ".csv")):
        return read_trace(Path(name))
    path = find_table("traces", name)
    table = read_table(path)
    if "events" not in table:
        return build(Rates, table, str(path))
    events = table.pop("events")
    if not isinstance(events, list):
        raise BadUsage(f"{path}: events is {events!r}: write a list of tables, [[events]]")
    header = build(_Header, {"trace": path.stem, **table}, str(path))
    read = [_build_event(event, f"{path}: events[{index}]") for index, event in enumerate(events)]
    return _trace(header.trace, header.seconds, read, str(path))


def read_trace(path: Path) -> Trace:
    """A trace from a file that ends in .jsonl or .csv; its lines may be in any order.

    Raises:
        BadUsage: It cannot be read, or a line is wrong: the sentence names the file and the line's number.
    """
    try:
        with path.open(newline="") as file:
            lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
    except OSError as error:
        raise BadUsage(f"{path} cannot be read ({error.strerror}): name another file") from error
    except UnicodeDecodeError as error:
        raise BadUsage(f"{path} is no text: name a file of JSON lines (.jsonl) or a .csv file") from error
    if path.suffix == ".csv":
        return _trace(path.stem, None, list(_read_csv(path, lines)), str(path))
    if path.suffix != ".jsonl":
        raise BadUsage(f"{path}: a trace ends in .jsonl or .csv")
    header = None
    events = []
    for number, line in lines:
        where = f"{path}:{number}"
        table = _read_object(line, where)
        if "trace" in table and number == lines[0][0]:
            header = build(_Header, table, where)
        else:
            events.append(_build_event(table, where))
    return _trace(header.trace if header else path.stem, header.seconds if header else None, events, str(path))


def write_trace(trace: Trace, path: Path) -> None:
    """Write a file that ``read_trace`` reads: .jsonl, or .csv, which holds no slowdowns, length, name and causes.

    Raises:
        BadUsage: Another ending, a trace with slowdowns as CSV, or the file cannot be written.
    """
    if path.suffix == ".csv":
        text = "".join(f"{line}\n" for line in _csv_lines(trace, path))
    elif path.suffix == ".jsonl":
        first = {"trace": trace.name, "seconds": trace.seconds}
        text = "".join(f"{json.dumps(table)}\n" for table in [first, *map(_as_table, trace.events)])
    else:
        raise BadUsage(f"{path}: a trace ends in .jsonl or .csv")
    try:
        path.write_text(text)
    except OSError as error:
        raise BadUsage(f"{path} cannot be written ({error.strerror}): name another file") from error


def parse_devices(text: str) -> tuple[int, ...]:
    """Devices from numbers and ranges, as in ``3 8-15``. Raises BadUsage."""
    devices: list[int] = []
    for part in text.split():
        first, dash, last = part.partition("-")
        if not _is_number(first) or (dash and (not _is_number(last) or int(last) < int(first))):
            raise BadUsage(f"devices is {text!r}: write numbers and ranges such as '3 8-15'")
        numbers = range(int(first), int(last or first) + 1)
        if len(devices) + len(numbers) > MOST_DEVICES:
            raise BadUsage(f"devices is {text!r}: these are more than {MOST_DEVICES}")
        devices += numbers
    return tuple(devices)


def format_devices(devices: Iterable[int]) -> str:
    """What ``parse_devices`` reads, as ranges where there are any; ascending."""
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and runs[-1][1] == device - 1:
            runs[-1][1] = device
        else:
            runs.append([device, device])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _trace(name: str, seconds: float | None, events: list[Event], where: str) -> Trace:
    events.sort(key=lambda event: event.at_s)
    if seconds is None:
        if not events:
            raise BadUsage(f"{where} holds no event: write at least one line")
        seconds = DAY_S * (events[-1].at_s // DAY_S + 1)
    try:
        return Trace(name=name, seconds=seconds, events=tuple(events))
    except BadUsage as error:
        raise BadUsage(f"{where}: {error}") from error


def _read_object(line: str, where: str) -> dict[str, Any]:
    try:
        table = json.loads(line)
    except ValueError as error:
        raise BadUsage(f"{where} is no valid JSON ({error}): write one object in a line") from error
    if not isinstance(table, dict):
        raise BadUsage(f"{where} holds a {type(table).__name__}: write one object in a line")
    return table


def _build_event(table: Any, where: str) -> Event:
    if not isinstance(table, Mapping):
        raise BadUsage(f"{where} is {table!r}: write a table")
    if "device" in table:
        return build(Slowdown, table, where)
    if table.get("repair_s", 0) is None:
        table = {name: value for name, value in table.items() if name != "repair_s"}
    return build(Failure, table, where)


def _read_csv(path: Path, lines: list[tuple[int, str]]) -> Iterator[Event]:
    if not lines or _split(lines[0][1], f"{path}:{lines[0][0]}") != CSV_HEADER:
        raise BadUsage(f"{path}: the first line must be {','.join(CSV_HEADER)}")
    for number, line in lines[1:]:
        where = f"{path}:{number}"
        row = _split(line, where)
        if len(row) != len(CSV_HEADER):
            raise BadUsage(f"{where} has {len(row)} fields: write {len(CSV_HEADER)}, {','.join(CSV_HEADER)}")
        at_s, devices, repair_s = row
        try:
            yield Failure(
                at_s=_read_float("at_s", at_s),
                devices=parse_devices(devices),
                repair_s=_read_float("repair_s", repair_s) if repair_s else math.inf,
            )
        except BadUsage as error:
            raise BadUsage(f"{where}: {error}") from error


def _split(line: str, where: str) -> list[str]:
    try:
        (row,) = csv.reader([line], strict=True)
    except csv.Error as error:
        raise BadUsage(f"{where} is no valid CSV ({error}): write {','.join(CSV_HEADER)}") from error
    return [word.strip() for word in row]


def _read_float(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise BadUsage(f"{name} is {text!r}: write a number") from error


def _csv_lines(trace: Trace, path: Path) -> Iterator[str]:
    yield ",".join(CSV_HEADER)
    for event in trace.events:
        if not isinstance(event, Failure):
            raise BadUsage(f"{path}: CSV holds failures only, and {trace.name} has slow devices: write .jsonl")
        repair = "" if math.isinf(event.repair_s) else repr(event.repair_s)
        yield f"{event.at_s!r},{format_devices(event.devices)},{repair}"


def _as_table(event: Event) -> dict[str, Any]:
    table = {field.name: getattr(event, field.name) for field in fields(event)}
    if isinstance(event, Failure) and math.isinf(event.repair_s):
        table["repair_s"] = None
    if not event.cause:
        del table["cause"]
    return table
