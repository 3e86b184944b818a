"""The benchmark of emulated accelerators: what it reads and predicts."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_elas.platform.emulated.device import EmulatedDevice
from megatron_elas.platform.emulated.timeline import Timeline
from tests.platform.emulated.test_timeline import Wall


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program as a module; it finds its neighbours in its own folder."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("emulation")


def test_steps_are_timed_from_line_to_line(bench: Any) -> None:
    lines = [f"x [2026-01-01 00:00:0{i}.{i}00000] iteration     {i}/ 5 | ms: 7" for i in range(1, 5)]
    assert bench.step_times_s([*lines, "other"], 2) == pytest.approx([1.1, 1.1])


def test_errors_are_read_as_the_workers_write_them(bench: Any, tmp_path: Path) -> None:
    wall = Wall(late_s=0.001)
    device = EmulatedDevice(0, timeline=Timeline(wall.now, wall.sleep))
    for _ in range(3):
        device.run("update", 0.01)
    (error,) = device.errors.summarize()
    for worker in (0, 10):
        (tmp_path / f"errors.{worker}").write_text(json.dumps(asdict(error)) + "\n")
    assert bench.read_errors(tmp_path) == [error, error]
    assert bench.describe_kind([error, error])[:3] == ["6", "10.00", "10.00"]


def test_a_faster_emulation_is_predicted_to_be_faster(bench: Any) -> None:
    slow, fast = (bench.Emulated(hardware="npu-96", model="llama2-7b", speed=speed) for speed in (1.0, 4.0))
    grid = bench.Grid.parse("4x2")
    assert slow.predict_s(grid) == pytest.approx(4 * fast.predict_s(grid))
    assert slow.predict_s(grid) > 2
