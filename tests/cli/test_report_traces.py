"""``elas report`` shows steps around losses and migrations, pass by pass, as Gantts and for Perfetto."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron_elas.cli.report_facts import read_job_log
from megatron_elas.cli.report_gantt import LEFT, WIDTH, draw_step
from megatron_elas.cli.report_traces import MOST_STEPS, ShownStep, shown_steps
from megatron_elas.schedule.chart import RIGHT
from megatron_elas.spec.migration import MIGRATION_PHASES
from megatron_elas.spec.step_trace import Span, StepTrace
from megatron_elas.spec.tables import as_table
from tests.cli.test_report import END, LOSS, RECOVERY, call, write_log

BEGAN_S = 100.0
SVG = "{http://www.w3.org/2000/svg}"
RECOVERED = {**RECOVERY, "before": "x", "after": "y"}
MOVED = "layer 3 from stage 1 to 0; worker 2 drained"
MIGRATED = {
    "event": "migration", "time_s": 110.0, "epoch": 2, "resume_step": 10, "before": "y", "after": "z",
    "moved": [{"layers": [3, 4], "from": 1, "to": 0}], "drained": [2], "streamed_steps": 2, "streamed_bytes": 3e6,
    "gradient_bytes": 1e6, **{name: 1.0 for name in MIGRATION_PHASES}, "total": 5.0,
}  # fmt: skip


def make_trace(worker: int, epoch: int, step: int, step_s: float = 0.5, *, first: bool = False) -> StepTrace:
    """Two stages of two cells; workers 0 and 1 are on the first. Workers begin a hundredth of a second apart."""
    stage, cell = divmod(worker, 2)
    spans = [
        Span(kind="wait", start_s=0.0, end_s=0.05),
        Span(kind="forward", start_s=0.05, end_s=0.15, item=cell, samples=2, apart_s=0.02),
        Span(kind="input_gradient", start_s=0.15, end_s=0.25, item=cell, samples=2),
        Span(kind="weight_gradient", start_s=0.25, end_s=0.3, item=cell, samples=2),
        Span(kind="exchange", start_s=0.3, end_s=0.35),
        Span(kind="optimizer", start_s=0.35, end_s=0.4),
    ]
    return StepTrace(
        worker=worker, epoch=epoch, step=step, stage=stage, cell=cell, first_layer=2 * stage, last_layer=2 * stage + 2,
        began_s=BEGAN_S + step + worker / 100, step_s=step_s, spans=tuple(spans), first=first,
    )  # fmt: skip


def traces() -> Iterator[StepTrace]:
    """Worker 3 is lost in step 4, and in step 10 layers move."""
    for worker in range(4):
        yield make_trace(worker, 0, 1)
    for step in (2, 3):
        for worker in range(3):
            yield make_trace(worker, 0, step)
    for worker in range(3):
        yield make_trace(worker, 1, 4, 2.0, first=True)
        for step in (5, 9):
            yield make_trace(worker, 1, step, 1.0)
        for step in (11, 16):
            yield make_trace(worker, 2, step, 0.75)


def write_traces(folder: Path, written: list[StepTrace] | None = None, **log: Any) -> Path:
    loss = {"event": "loss", "time_s": 104.0, "epoch": 0, **LOSS}
    write_log(folder, events=[loss, RECOVERED, MIGRATED, END], **log)
    with (folder / "traces.jsonl").open("a") as file:
        file.writelines(
            json.dumps(as_table(trace)) + "\n" for trace in (list(traces()) if written is None else written)
        )
    return folder


def test_shown_are_the_last_step_before_the_first_event_and_the_first_one_undisturbed_after_each(
    tmp_path: Path,
) -> None:
    before, after, moved = shown_steps(read_job_log(write_traces(tmp_path)))
    assert [(step.epoch, step.step, step.why) for step in (before, after, moved)] == [
        (0, 3, "before"), (1, 5, "after the loss of worker 3"), (2, 11, f"after the migration of {MOVED}"),
    ]  # fmt: skip
    assert [(cell.trace.worker, cell.trace.step, cell.same_step, cell.lost) for cell in before.cells] == [
        (0, 3, True, False), (1, 3, True, False), (2, 3, True, False), (3, 1, False, True),
    ]  # fmt: skip
    assert before.layers == ((0, 2, 2), (2, 4, 2)) and after.layers == ((0, 2, 2), (2, 4, 1))
    assert not any(cell.lost for step in (after, moved) for cell in step.cells)
    assert (before.gone, moved.gone) == ((), ())
    assert after.gone == ("worker 3 (stage 1, cell 1): killed by SIGKILL",)
    # Of the steps that were reported the median, else that of the traces; the epoch's forecast where there is one.
    assert [step.measured_s for step in (before, after, moved)] == pytest.approx([0.103, 0.150, 0.75])
    assert [step.predicted_s for step in (before, after, moved)] == [0.100, 0.200, None]
    assert [before.begin_of(cell) for cell in before.cells] == pytest.approx([0.0, 0.01, 0.02, 0.0])
    assert before.span_s == pytest.approx(0.52)


def test_a_step_that_fewer_cells_told_than_the_one_before_is_not_chosen(tmp_path: Path) -> None:
    ahead = [make_trace(0, 0, 4)]
    (before,) = shown_steps(read_job_log(write_traces(tmp_path, [t for t in traces() if t.epoch == 0] + ahead)))
    assert before.step == 3


def test_of_very_many_plans_the_first_and_the_newest_are_shown(tmp_path: Path) -> None:
    many = [make_trace(0, epoch, epoch) for epoch in range(MOST_STEPS + 5)]
    shown = shown_steps(read_job_log(write_traces(tmp_path, many)))
    assert [step.epoch for step in shown] == [0, *range(6, MOST_STEPS + 5)]


def drawn(step: ShownStep, longest_s: float) -> tuple[ET.Element, list[ET.Element]]:
    picture = ET.fromstring(draw_step(step, longest_s))
    return picture, [group for group in picture.iter(f"{SVG}g") if group.get("class") == "bar"]


def test_every_pass_is_drawn_at_its_time_on_the_scale_of_all(tmp_path: Path) -> None:
    shown = shown_steps(read_job_log(write_traces(tmp_path)))
    longest_s = max(step.span_s for step in shown)
    scale = (WIDTH - LEFT - RIGHT) / longest_s
    for step in shown:
        picture, bars = drawn(step, longest_s)
        spans = [
            (place, step.begin_of(cell), span) for place, cell in enumerate(step.cells) for span in cell.trace.spans
        ]
        assert len(bars) == len(spans)
        for (_, begin_s, span), bar in zip(spans, bars, strict=True):
            rect = bar.find(f"{SVG}rect")
            assert rect is not None
            assert float(rect.get("width", "0")) == pytest.approx((span.end_s - span.start_s) * scale, abs=0.01)
            assert bar.get("transform", "").startswith(f"translate({LEFT + (begin_s + span.start_s) * scale:.2f},")
        titles = [title.text for line in picture.iter(f"{SVG}line") for title in line]
        assert any(text and text.endswith(" measured") for text in titles)
        assert len(titles) == 1 + (step.predicted_s is not None)
    _, bars = drawn(shown[0], longest_s)
    abouts = [title.text for bar in bars for title in bar.iter(f"{SVG}title")]
    assert abouts[1] == (
        "0F0: forward of item 0, 2 samples: 100.0 ms, 0.05 to 0.15 s, of it 20.0 ms for parameters of other replicas; "
        "worker 0, step 3"
    )


def test_the_page_shows_the_steps_one_under_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    text = call(str(write_traces(tmp_path / "logs")), "--html", str(page), capsys=capsys)
    assert "traced  steps 1 2 3 4 5 9 11 16: --html draws them, --trace writes them for Perfetto" in text
    html = page.read_text()
    titles = re.findall(r'font-size="13">([^<]*)</text>', html)
    assert [title.rpartition("; layers")[0] for title in titles] == [
        "before: step 3, epoch 0",
        "after the loss of worker 3: step 5, epoch 1",
        f"after the migration of {MOVED}: step 11, epoch 2",
    ]
    assert f"<title>epoch 2 from step 10, stood still for 5.0 ms: {MOVED}</title>" in html
    [head, line] = text[text.index("migrations: ") :].splitlines()[1:3]
    assert head.split() == ["epoch", "from", "step", *MIGRATION_PHASES, "total", "beside", "what"]
    words = ["2", "10", *["1.0"] * len(MIGRATION_PHASES), "5.0"]
    assert line.split(maxsplit=len(words)) == [*words, f"4.0 MB in 2 steps  {MOVED}"]
    assert "layers 0-1 | 2-3, cells shown 2 | 1; 150.0 ms measured, 200.0 ms predicted" in titles[1]
    assert ">1.1 worker 3 *</text>" in html and "worker 3 (stage 1, cell 1): killed by SIGKILL</text>" in html
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<link|<script|src=|@import|url\(", html)


def test_the_chrome_trace_has_complete_events_that_nest_in_their_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.json"
    call(str(write_traces(tmp_path / "logs")), "--trace", str(file), capsys=capsys)
    content = json.loads(file.read_text())
    events = content["traceEvents"]
    assert content["displayTimeUnit"] == "ms"
    assert {event["ph"] for event in events} == {"M", "X", "i"}
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["name"]
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
    names = {(event["pid"], event["tid"], event["args"]["name"]) for event in events
             if event["ph"] == "M" and event["name"] != "process_sort_index"}  # fmt: skip
    assert names == {
        (0, 0, "stage 0"), (1, 0, "stage 1"), (2, 0, "job"), (2, 0, "losses and recoveries"),
        *((stage, cell, f"cell {cell}") for stage in range(2) for cell in range(2)),
    }  # fmt: skip
    loss, migrated = (event for event in events if event["ph"] == "i")
    assert (loss["ts"], loss["s"]) == (3e6, "g") and "worker 3" in loss["name"]
    assert (migrated["ts"], migrated["name"]) == (9e6, "migrated, epoch 2")
    (recovery,) = [event for event in events if event.get("cat") == "recovery"]
    assert (recovery["ts"], recovery["dur"]) == (pytest.approx(3.5e6 - 45e3), 45e3)
    told = list(traces())
    steps = [event for event in events if event.get("cat") == "step"]
    assert len(steps) == len(told)
    for trace in told:
        (step,) = [s for s in steps if s["args"]["worker"] == trace.worker
                   and s["name"] == f"step {trace.step}, epoch {trace.epoch}"]  # fmt: skip
        assert (step["pid"], step["tid"]) == (trace.stage, trace.cell)
        assert step["ts"] == pytest.approx(1e6 * (trace.began_s - BEGAN_S - 1), abs=0.01)
        inside = [event for event in events if event["ph"] == "X" and event.get("args", {}).get("step") == trace.step
                  and event["args"]["worker"] == trace.worker]  # fmt: skip
        cell = trace.cell
        assert [event["name"] for event in inside] == [
            "wait", f"F{cell}", f"B{cell}", f"W{cell}", "exchange", "optimizer",
        ]  # fmt: skip
        for before, after in pairwise(inside):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.002
        assert step["ts"] <= inside[0]["ts"]
        assert inside[-1]["ts"] + inside[-1]["dur"] <= step["ts"] + step["dur"] + 0.002


def test_traces_of_an_earlier_run_in_the_folder_are_left_out(tmp_path: Path) -> None:
    write_traces(tmp_path)
    write_log(tmp_path, [], [{**END, "time_s": 160.0}])
    assert read_job_log(tmp_path).traces == ()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trace", "/nowhere/trace.json"], "--trace /nowhere/trace.json cannot be written: give the path of a file"),
        (["--trace", "{folder}/trace.json"], "no step of {folder} was traced, which is done around losses"),
    ],
)
def test_a_trace_that_cannot_be_written_is_one_sentence(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_log(tmp_path)
    told = call(str(folder), *(word.format(folder=folder) for word in arguments), capsys=capsys, code=2)
    assert words.format(folder=folder) in told and len(told.splitlines()) == 1
