"""``elas report``: what a log folder tells of a job's steps and recoveries."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_elas.cli import elas
from megatron_elas.control.run_dir import JobFile, make_run_dir, write_job_file
from megatron_elas.spec.report import PHASES
from megatron_elas.spec.step_report import PassTotal, StepReport
from megatron_elas.spec.tables import as_table

LOSS = {"worker": 3, "stage": 1, "cell": 1, "lane": 0, "reason": "exited", "detail": "killed by SIGKILL"}
PHASES_MS = {name: float(place + 1) for place, name in enumerate(PHASES)}
RECOVERY = {
    "event": "recovery",
    "time_s": 104.5,
    "epoch": 1,
    "lost": [LOSS],
    "resume_step": 4,
    **PHASES_MS,
    "total": 45.0,
}
END = {"event": "end", "time_s": 120.0, "exit_code": 0, "sentence": ""}


def report(worker: int, epoch: int, step: int, step_s: float, predicted_s: float | None = None) -> StepReport:
    """Worker 0 is on stage 0 and computes half of the step, the others are on stage 1 and compute 4/5 of it."""
    stage = min(worker, 1)
    busy = 0.4 if stage == 0 else 0.7
    return StepReport(
        worker=worker, epoch=epoch, step=step, first_layer=2 * stage, last_layer=2 * stage + 2, cells=1 + stage,
        step_s=step_s, predicted_s=predicted_s, stage=stage, first=step in (0, 4), ended_s=100.0 + step,
        passes=(PassTotal(kind="forward", passes=4, samples=4, seconds=busy * step_s),),
        optimizer_s=0.1 * step_s, waited_s=0.25 * step_s if stage == 0 else 0.0,
    )  # fmt: skip


def reports() -> Iterator[StepReport]:
    for step in range(4):
        for worker in (0, 1, 2):
            yield report(worker, 0, step, 9.0 if step == 0 else 0.100 + step / 1000, None if step < 2 else 0.100)
    for step in range(4, 8):
        for worker in (0, 1):
            yield report(worker, 1, step, 7.0 if step == 4 else 0.150, 0.200)


def write_log(folder: Path, steps: list[StepReport] | None = None, events: list[dict[str, Any]] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    if steps is None:
        steps = list(reports())
    if events is None:
        events = [{"event": "loss", "time_s": 104.0, "epoch": 0, **LOSS}, RECOVERY, END]
    with (folder / "steps.jsonl").open("a") as file:
        file.writelines(json.dumps(as_table(step)) + "\n" for step in steps)
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    return folder


def call(*arguments: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert elas.main(["report", *arguments]) == code
    told = capsys.readouterr()
    assert (told.err == "") == (code == 0), told.err
    return told.err if code else told.out


def test_every_epoch_is_compared_with_what_was_predicted_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_log(tmp_path))
    epochs = json.loads(call(folder, "--json", capsys=capsys))["epochs"]
    assert [(own["epoch"], own["first_step"], own["last_step"], own["steps"], own["workers"]) for own in epochs] == [
        (0, 0, 3, 4, 3),
        (1, 4, 7, 4, 2),
    ]
    # Medians of steps 1 to 3 and of 5 to 7: the first steps of 9 and 7 seconds do not count.
    assert [own["measured_s"] for own in epochs] == pytest.approx([0.102, 0.150])
    assert [own["predicted_s"] for own in epochs] == [0.100, 0.200]
    assert [own["ratio"] for own in epochs] == pytest.approx([1.02, 0.75])
    shares = [(stage["stage"], stage["busy"], stage["waiting"]) for own in epochs for stage in own["stages"]]
    assert [stage for stage, _, _ in shares] == [0, 1, 0, 1]
    assert [busy for _, busy, _ in shares] == pytest.approx([0.5, 0.8, 0.5, 0.8])
    assert [waiting for _, _, waiting in shares] == pytest.approx([0.25, 0.0, 0.25, 0.0])
    text = call(folder, capsys=capsys)
    assert re.search(r"^  0 +0-3 +4 +3 +102\.0 ms +100\.0 ms +1\.02 +50% 80% +25% 0% +2x1 2x2$", text, re.M)
    assert re.search(r"^  1 +4-7 +4 +2 +150\.0 ms +200\.0 ms +0\.75 ", text, re.M)
    assert "steps   0-7: 20 reports of 3 workers\nend     finished\n" in text


def test_an_epoch_without_a_prediction_or_measured_passes_has_no_ratio_and_no_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = StepReport(worker=0, epoch=0, step=5, first_layer=0, last_layer=4, cells=2, step_s=12.0)
    text = call(str(write_log(tmp_path, [bare], [])), capsys=capsys)
    assert re.search(r"^  0 +5 +1 +1 +12\.00 s +\? +\? +4x2$", text, re.M)
    assert "none is logged: the job runs, or its launcher was killed" in text


def test_recoveries_have_a_line_each_with_their_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = call(str(write_log(tmp_path)), capsys=capsys)
    [head, line] = text[text.index("recoveries, in ms") :].splitlines()[1:3]
    assert head.split() == ["epoch", "from", "step", *PHASES, "total", "lost"]
    words = ["1", "4", *(f"{value:.1f}" for value in PHASES_MS.values()), "45.0"]
    assert line.split(maxsplit=len(words)) == [*words, "worker 3 (stage 1, cell 1): killed by SIGKILL"]
    assert "not recovered" not in text


def test_losses_that_ended_the_job_and_restarts_of_the_controller_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spare = {"event": "loss", "epoch": 1, "worker": 5, "stage": None, "reason": "exited", "detail": "exit code 9"}
    restarted = {"event": "controller_restarted", "time_s": 105.5, "reason": "killed by SIGKILL"}
    end = {**END, "exit_code": 3, "sentence": "too few workers are left"}
    text = call(str(write_log(tmp_path, None, [RECOVERY, restarted, spare, end])), capsys=capsys)
    assert "lost        and not recovered from: worker 5 (spare): exit code 9\n" in text
    assert "controller  restarted 1 time after step 5\n" in text
    assert "end         too few workers are left (exit code 3)\n" in text


@pytest.mark.parametrize(
    ("facts", "lines"),
    [
        ({"steps": 60, "lost": 1, "workers": 4}, ["end     finished: 60 steps done, 1 of 4 workers lost"]),
        ({"steps": 60, "lost": 0, "workers": 4}, ["end     finished: 60 steps done, no worker lost"]),
        ({"steps": 60, "lost": 1}, ["end     finished: 60 steps done, 1 worker lost"]),  # of an older release
        ({"exit_code": 2, "sentence": "no", "worker": 1}, ["end     no (exit code 2, also in worker1.log)"]),
        ({"exit_code": 5}, ["end     exit code 5"]),
        (
            {"steps": 60, "drained": 1, "workers": 4, "unstruck": ["kill:worker=3@step=90,phase=forward"]},
            [
                "end     finished: 60 steps done, 1 of 4 workers drained, no worker lost",
                "faults  1 scripted fault never struck, as the place was not reached: "
                "kill:worker=3@step=90,phase=forward",
            ],
        ),
    ],
)
def test_the_end_is_told_as_the_terminal_was_told(
    facts: dict[str, Any], lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = call(str(write_log(tmp_path, None, [RECOVERY, END | facts])), capsys=capsys)
    assert [line for line in text.splitlines() if line.startswith(("end ", "faults "))] == lines


def test_steps_that_no_heartbeat_told_are_counted_as_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps 3 and 4, where an epoch ends and one begins, by nobody; step 2 by worker 0 only."""
    told = [own for own in reports() if own.step not in (3, 4) and (own.step, own.worker) not in ((2, 1), (2, 2))]
    text = call(str(write_log(tmp_path / "logs", told)), capsys=capsys)
    line = "steps   0-7: 13 of 20 reports of 3 workers; a heartbeat tells a worker's newest step only, and none that "
    assert line + "was cut\n" in text and "a minute" not in text
    many = [report(0, 0, step, 0.1) for step in (*range(100), 180)]
    text = call(str(write_log(tmp_path / "many", many, [])), capsys=capsys)
    assert "steps   0-180: 101 of 181 reports of 1 worker; " in text
    assert "none that was cut; after 100 of an epoch one a minute is logged\n" in text


@pytest.mark.parametrize("ended", [True, False])
def test_of_several_runs_in_one_folder_the_newest_is_told(
    ended: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path)
    later = StepReport(worker=0, epoch=0, step=30, first_layer=0, last_layer=4, cells=1, step_s=1.0, ended_s=150.0)
    write_log(tmp_path, [later], [{**END, "time_s": 160.0}] if ended else [])
    read = json.loads(call(str(tmp_path), "--json", capsys=capsys))
    assert (read["earlier_runs"], read["recoveries"], read["exit_code"]) == (1, [], 0 if ended else None)
    assert [own["first_step"] for own in read["epochs"]] == [30]
    assert "left out  1 earlier run in the same folder" in call(str(tmp_path), capsys=capsys)


# ------------------------------------------------------------ the page


def test_the_page_shows_every_step_and_event_and_needs_no_other_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, page = write_log(tmp_path / "logs"), tmp_path / "page.html"
    text = call(str(folder), "--html", str(page), capsys=capsys)
    html = page.read_text()
    assert text.strip() in html.replace("&gt;", ">").replace("&#x27;", "'")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<link|<script|src=|@import|url\(", html)
    told = re.findall(r"<title>(step \d+, epoch \d+: [^<]*)</title>", html)
    assert len(told) == 8 and told[1] == "step 1, epoch 0: 101.0 ms"
    assert "<title>epoch 1 from step 4, 45.0 ms: lost worker 3 (stage 1, cell 1): killed by SIGKILL</title>" in html
    assert "<title>epoch 1: 200.0 ms predicted</title>" in html
    # Nothing is drawn outside, also not the steps that take 70 times as long as the others.
    heights = [float(y) for y in re.findall(r' y="(-?[\d.]+)"', html)]
    assert min(heights) >= 0 and max(heights) <= 380


def test_without_steps_the_page_has_no_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, page = write_log(tmp_path / "logs", [], [RECOVERY, END]), tmp_path / "page.html"
    assert "steps   none was measured" in call(str(folder), "--html", str(page), capsys=capsys)
    assert "<svg" not in page.read_text() and "recoveries, in ms" in page.read_text()


# ------------------------------------------------------------ which folder


@pytest.mark.parametrize("flags", [[], ["--job", "ru"]])
def test_the_folder_of_a_running_job_is_found(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_log(tmp_path)
    job = {"run_id": "run7", "started_s": 1.0, "address": "ws://127.0.0.1:1", "token": "t", "command": ("train.py",)}
    with make_run_dir() as run_dir:
        write_job_file(run_dir, JobFile(**job, log_dir=str(folder)))
        assert f"folder  {folder}\n" in call(*flags, capsys=capsys)
        write_job_file(run_dir, JobFile(**job))
        told = call(*flags, capsys=capsys, code=2)
        assert "job run7 writes nothing down: start it with elasrun --log-dir DIR" in told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no job of yours runs on this node"),
        (["--job", "x"], "no job of yours runs on this node"),
        (["/nowhere"], "/nowhere is no folder: give the one that elasrun --log-dir named"),
        (["{empty}"], "holds neither steps.jsonl nor events.jsonl: give the folder that elasrun --log-dir named"),
        (["{bad}"], "events.jsonl, line 2 is no valid JSON"),
        (["{odd}"], "steps.jsonl, line 1: 'worker' is missing: add it"),
        (["{empty}", "--html", "/nowhere/page.html"], "--html /nowhere/page.html cannot be written: give the path of"),
        (["{empty}", "--job", "x"], "not allowed with argument"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_code_2(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("empty", "bad", "odd"):
        (tmp_path / name).mkdir()
    (tmp_path / "bad/events.jsonl").write_text(json.dumps(END) + "\nend\n")
    (tmp_path / "odd/steps.jsonl").write_text("{}\n")
    told = call(*(word.format(**{n: tmp_path / n for n in ("empty", "bad", "odd")}) for word in arguments),
                capsys=capsys, code=2)  # fmt: skip
    assert words in told and len(told.splitlines()) == 1
