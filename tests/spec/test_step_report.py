"""Reports of steps travel as lines of JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.step_report import PassTotal, StepReport, read_step_reports
from megatron_elas.spec.tables import as_table

REPORT = StepReport(
    worker=3, epoch=1, step=7, first_layer=4, last_layer=8, cells=2, step_s=1.2, predicted_s=1.0,
    passes=(PassTotal(kind="forward", passes=4, samples=8, seconds=0.4),), optimizer_s=0.01,
)  # fmt: skip


def test_reports_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps(as_table(report)) + "\n" for report in (REPORT, REPORT)))
    assert read_step_reports(path) == (REPORT, REPORT)


def test_the_ratio_is_measured_over_predicted() -> None:
    assert REPORT.ratio == pytest.approx(1.2)
    without = StepReport(worker=0, epoch=0, step=0, first_layer=0, last_layer=1, cells=1, step_s=1.0)
    assert without.ratio is None


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 1 is no valid JSON"),
        ("[]", "line 1 is no object: correct or remove it"),
        (json.dumps({**as_table(REPORT), "last_layer": 1}), r"line 1: layers \[4, 1\) end before they begin"),
        (
            json.dumps({**as_table(REPORT), "passes": [{"kind": "sideways", "passes": 1, "samples": 1, "seconds": 1}]}),
            "kind is 'sideways': write one of forward, backward",
        ),
    ],
)
def test_a_line_that_does_not_fit_is_named(tmp_path: Path, line: str, sentence: str) -> None:
    (tmp_path / "steps.jsonl").write_text(line + "\n")
    with pytest.raises(BadUsage, match=sentence):
        read_step_reports(tmp_path / "steps.jsonl")


def test_a_last_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    whole = json.dumps(as_table(REPORT))
    (tmp_path / "steps.jsonl").write_text(whole + "\n" + whole[:20])
    assert read_step_reports(tmp_path / "steps.jsonl") == (REPORT,)
    (tmp_path / "steps.jsonl").write_text(whole)
    assert read_step_reports(tmp_path / "steps.jsonl") == (REPORT,)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match="none cannot be read"):
        read_step_reports(tmp_path / "none")
