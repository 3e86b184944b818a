"""What is written is read again, and what is wrong in a file is said in one sentence with its line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_elas.simulator.failure_rates import DAY_S
from megatron_elas.simulator.trace_files import (
    format_devices,
    load_trace,
    parse_devices,
    read_trace,
    write_trace,
)
from megatron_elas.simulator.traces import Event, Failure, Slowdown, Trace
from megatron_elas.spec.errors import BadUsage

TIMES = st.floats(0, 1e6, allow_subnormal=False)
DEVICES = st.lists(st.integers(0, 200), min_size=1, max_size=12, unique=True).map(lambda found: tuple(sorted(found)))
REPAIRS = st.one_of(st.just(math.inf), st.floats(1e-3, 1e7))
FAILURES = st.builds(
    Failure, at_s=TIMES, devices=DEVICES, repair_s=REPAIRS, cause=st.sampled_from(("", "host", 'a "word"\nmore'))
)
SLOWDOWNS = st.builds(
    Slowdown,
    at_s=TIMES,
    device=st.integers(0, 200),
    factor=st.floats(1.01, 9),
    seconds=st.floats(1e-3, 1e6),
    cause=st.sampled_from(("", "heat")),
)


def trace_of(events: list[Event], name: str = "t") -> Trace:
    return Trace(name=name, seconds=2e6, events=tuple(sorted(events, key=lambda event: event.at_s)))


@given(st.lists(st.one_of(FAILURES, SLOWDOWNS), max_size=8))
def test_json_lines_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, events: list[Event]
) -> None:
    path = tmp_path_factory.mktemp("traces") / "one.jsonl"
    trace = trace_of(events, "any name")
    write_trace(trace, path)
    assert read_trace(path) == trace == load_trace(str(path))


@given(st.lists(FAILURES.filter(lambda failure: not failure.cause), min_size=1, max_size=8))
def test_csv_is_read_as_it_was_written_but_for_name_and_length(
    tmp_path_factory: pytest.TempPathFactory, events: list[Event]
) -> None:
    path = tmp_path_factory.mktemp("traces") / "one.csv"
    trace = trace_of(events)
    write_trace(trace, path)
    read = read_trace(path)
    assert read.events == trace.events
    assert read.name == "one" and read.seconds == DAY_S * (trace.events[-1].at_s // DAY_S + 1)


@given(DEVICES)
def test_devices_are_written_as_ranges(devices: tuple[int, ...]) -> None:
    assert parse_devices(format_devices(devices)) == devices
    assert format_devices((8, 9, 10, 3)) == "3 8-10"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_files_by_hand_need_little(tmp_path: Path) -> None:
    lines = '{"at_s": 90000, "devices": [3]}\n\n{"device": 1, "at_s": 5, "factor": 2, "seconds": 60}\n'
    trace = read_trace(write(tmp_path, "mine.jsonl", lines))
    assert trace.name == "mine" and trace.seconds == 2 * DAY_S
    assert trace.events == (
        Slowdown(at_s=5, device=1, factor=2, seconds=60),
        Failure(at_s=90000, devices=(3,), repair_s=math.inf),
    )
    table = "at_s, devices, repair_s\n60, 8-15, 3600\n5, 1 3,\n"
    assert read_trace(write(tmp_path, "mine.csv", table)).events == (
        Failure(at_s=5, devices=(1, 3), repair_s=math.inf),
        Failure(at_s=60, devices=tuple(range(8, 16)), repair_s=3600),
    )
    profile = "seconds = 50\n[[events]]\nat_s = 1\ndevices = [2]\nrepair_s = inf\ncause = 'me'\n"
    trace = load_trace(str(write(tmp_path, "mine.toml", profile)))
    assert trace == Trace(name="mine", seconds=50, events=(Failure(at_s=1, devices=(2,), cause="me"),))


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.jsonl", '{"at_s": 1, "devices": [1]}\n{"at_s": 1, "devices": [1]\n', "a.jsonl:2 is no valid JSON"),
        ("a.jsonl", '{"at_s": 1, "devices": [1]}\n\n\n[]\n', "a.jsonl:4 holds a list: write one object in a line"),
        ("a.jsonl", '{"devices": [1]}\n', "a.jsonl:1: 'at_s' is missing: add it"),
        ("a.jsonl", '{"at_s": "1", "devices": [1]}\n', "a.jsonl:1: at_s is '1': write a number"),
        ("a.jsonl", '{"at_s": 1, "devices": [1.5]}\n', "a.jsonl:1: devices[0] is 1.5: write a whole number"),
        ("a.jsonl", '{"at_s": 1, "devices": [true]}\n', "a.jsonl:1: devices[0] is True: write a whole number"),
        ("a.jsonl", '{"at_s": -1, "devices": [1]}\n', "a.jsonl:1: at_s must be at least 0, got -1.0"),
        ("a.jsonl", '{"at_s": 1, "devices": [1], "repair": 5}\n', "a.jsonl:1: 'repair' is not known: it has at_s, dev"),
        ("a.jsonl", '{"at_s": 1, "device": 1, "factor": 0.5, "seconds": 1}\n', "a.jsonl:1: factor must be above 1"),
        ("a.jsonl", '{"trace": "x", "seconds": 5}\n{"at_s": 5, "devices": [1]}\n', "a.jsonl: x: an event at 5.0 s is"),
        ("a.jsonl", '{"trace": "x"}\n', "a.jsonl:1: 'seconds' is missing: add it"),
        ("a.jsonl", "\n", "a.jsonl holds no event: write at least one line"),
        ("a.csv", "", "a.csv: the first line must be at_s,devices,repair_s"),
        ("a.csv", "1,2,3\n", "a.csv: the first line must be at_s,devices,repair_s"),
        ("a.csv", 'at_s,devices,repair_s\n1,"2,3\n4,5,6\n', "a.csv:2 is no valid CSV (unexpected end of data): write"),
        ("a.csv", "at_s,devices,repair_s\n1,2\n", "a.csv:2 has 2 fields: write 3, at_s,devices,repair_s"),
        ("a.csv", "at_s,devices,repair_s\n1,2,3\nx,2,3\n", "a.csv:3: at_s is 'x': write a number"),
        ("a.csv", "at_s,devices,repair_s\n1,5-3,3\n", "a.csv:2: devices is '5-3': write numbers and ranges such as"),
        ("a.csv", "at_s,devices,repair_s\n1,0-99999999999,3\n", "a.csv:2: devices is '0-99999999999': these are more"),
        ("a.csv", "at_s,devices,repair_s\n1,,3\n", "a.csv:2: devices must be numbers from 0 up, at least one"),
        ("a.csv", "at_s,devices,repair_s\n1,2 2,3\n", "a.csv:2: devices must be numbers from 0 up"),
        ("a.csv", "at_s,devices,repair_s\n1,²,3\n", "a.csv:2: devices is '²': write numbers"),
        ("a.toml", "seconds = 5\nevents = 3\n", "a.toml: events is 3: write a list of tables, [[events]]"),
        ("a.toml", "seconds = 5\n[[events]]\nat_s = 1\n", "a.toml: events[0]: 'devices' is missing: add it"),
        ("a.toml", "[[events]]\nat_s = 1\ndevices = [1]\n", "a.toml: 'seconds' is missing: add it"),
        ("a.toml", 'name = "a"\n[[failures]]\ncause = "c"\n', "a.toml: failures[0]: 'scope' is missing: add it"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    path = write(tmp_path, name, text)
    with pytest.raises(BadUsage) as error:
        load_trace(str(path))
    assert str(error.value).startswith(f"{tmp_path}/{sentence}"), error.value
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match=r"none.jsonl cannot be read \(No such file or directory\): name another file"):
        load_trace(str(tmp_path / "none.jsonl"))
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadUsage, match=r"bytes.csv is no text: name a file of JSON lines \(.jsonl\) or a .csv file"):
        load_trace(str(tmp_path / "bytes.csv"))
    with pytest.raises(
        BadUsage, match=r"there is no 'lama3' in configs/traces: name one of ascend-10k, .*, two-losses"
    ):
        load_trace("lama3")
    trace = trace_of([Slowdown(at_s=1, device=1, factor=2, seconds=1)])
    with pytest.raises(BadUsage, match=r"CSV holds failures only, and t has slow devices: write .jsonl"):
        write_trace(trace, tmp_path / "a.csv")
    with pytest.raises(BadUsage, match=r"a.txt: a trace ends in .jsonl or .csv"):
        write_trace(trace, tmp_path / "a.txt")
    with pytest.raises(BadUsage, match=r"cannot be written \(No such file or directory\)"):
        write_trace(trace, tmp_path / "none" / "a.jsonl")
