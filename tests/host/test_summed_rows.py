"""At bitwise a run that goes on from a checkpoint divides gradients by the rows of the run that made it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_elas.host import summed_rows
from megatron_elas.host.summed_rows import SAVED_ROWS, rows_to_save, wrap_loaded_rows


def attached(rows: int, *, fp16: bool = True, bitwise: bool = True, num_microbatches: int = 12) -> Any:
    job = SimpleNamespace(fp16=fp16, num_microbatches=num_microbatches)
    return SimpleNamespace(job=job, summed_rows=rows, sums=object() if bitwise else None)


def load(loading: Any, checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(summed_rows, "attachment", lambda: loading)
    checked = []
    wrap_loaded_rows(lambda arguments, skip_args: checked.append((arguments, skip_args)))(checkpoint, {"seed"})
    assert checked == [(checkpoint, {"seed"})]
    return int(loading.summed_rows)


def checkpoint_of(saving: Any) -> Any:
    return SimpleNamespace(**{SAVED_ROWS: rows_to_save(saving)})


def test_the_rows_of_the_run_that_saved_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(attached(2), checkpoint_of(attached(3)), monkeypatch) == 3
    assert "on 3 data-parallel rows and not 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("loading", "checkpoint"),
    [
        pytest.param(attached(2), SimpleNamespace(), id="a-checkpoint-that-does-not-say"),
        pytest.param(attached(2), checkpoint_of(attached(3, num_microbatches=18)), id="another-batch"),
        pytest.param(attached(2, bitwise=False), checkpoint_of(attached(3)), id="at-another-level"),
        pytest.param(attached(2, fp16=False), checkpoint_of(attached(3)), id="in-another-precision"),
        pytest.param(attached(2), checkpoint_of(attached(1, fp16=False)), id="of-another-precision"),
        pytest.param(attached(2), checkpoint_of(attached(2)), id="the-same-rows"),
    ],
)
def test_otherwise_those_at_launch_count(
    loading: Any, checkpoint: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(loading, checkpoint, monkeypatch) == 2
    assert capsys.readouterr().out == ""
