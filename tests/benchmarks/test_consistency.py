"""The benchmark of consistency: how runs are compared, what happens in them, and what is drawn."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a program of the benchmarks as a module; they find their neighbours in their own folder."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module


def told(*pairs: tuple[int, float]) -> list[dict[str, Any]]:
    return [{"worker": 0, "peak_rss_mb": 1.0}, *({"step": step, "loss": loss} for step, loss in pairs)]


def test_losses_are_those_that_all_workers_tell(bench: Any) -> None:
    read = bench("deviations").read_losses
    assert read(told((1, 2.5), (0, 3.0), (1, 2.5))) == [3.0, 2.5]
    with pytest.raises(ValueError, match=r"step 1: workers tell losses 2\.5 and 2\.25"):
        read(told((0, 3.0), (1, 2.5), (1, 2.25)))
    with pytest.raises(ValueError, match=r"no loss was told of steps \[1\]"):
        read(told((0, 3.0), (2, 2.5)))
    with pytest.raises(ValueError, match="no loss was told"):
        read(told())


def test_a_deviation_counts_from_the_first_event_on(bench: Any) -> None:
    calm = [8.0] * 40
    losses = [8.25, 8.0, *([8.0] * 8), 8.5, 7.0, *([8.0] * 8), *([8.0] * 19), 8.125]
    found = bench("deviations").find_deviation(losses, calm, [10, 15])
    assert (found.before, found.largest, found.spike) == (0.25, 1.0, 0.5)
    assert found.mean == pytest.approx((0.5 + 1.0 + 0.125) / 30)
    assert found.end == pytest.approx(0.125 / 20)
    assert (found.equal, found.steps) == (27, 30)


def test_equal_losses_deviate_by_nothing_at_all(bench: Any) -> None:
    found = bench("deviations").find_deviation([8.0, 7.5, 7.0], [8.0, 7.5, 7.0], [1])
    assert (found.mean, found.largest, found.spike, found.end, found.before) == (0.0, 0.0, 0.0, 0.0, 0.0)
    assert found.equal == found.steps == 2


def test_the_mean_over_all_rows_becomes_that_over_the_rows_in_use(bench: Any) -> None:
    weight = bench("consistency_worker").row_weight
    losses = [1.0, 2.0, 6.0]
    for gone, mean in (((), 3.0), ((1,), 3.5), ((0, 1), 6.0)):
        weighted = [loss * weight(row, 3, gone) for row, loss in enumerate(losses)]
        assert sum(weighted) / 3 == pytest.approx(mean)


def test_what_torchft_puts_out_of_use_are_rows_of_killed_workers_and_one_is_left(bench: Any) -> None:
    consistency = bench("consistency")
    script = consistency.Script(steps=300)
    assert script.at == (50, 100, 150, 200, 250)
    rows = consistency.GRID.rows
    gone = script.shrinking()["ELAS_BENCH_OUT_OF_USE"]
    assert gone == "50:1,150:0"  # workers 4 and 0; the drained worker 3 and worker 1 are of these rows
    assert {4 % rows, 0 % rows} == {3 % rows, 1 % rows} == {0, 1}


def test_every_system_has_a_run_to_be_compared_with(bench: Any) -> None:
    consistency = bench("consistency")
    assert consistency.REFERENCES.keys() == consistency.SYSTEMS.keys()
    streams = {
        name: flags[flags.index("--elastic-rng") + 1] for name, flags in consistency.SYSTEMS.items() if flags
    }  # fmt: skip
    for name, kind in streams.items():
        assert kind in consistency.REFERENCES[name]


def test_the_picture_has_a_line_for_every_system_and_event(bench: Any) -> None:
    plot = bench("consistency_plot")
    svg = plot.plot_deviations(
        "a title",
        [3.0, 2.0, 1.0],
        {"torchft": [3.0, 2.5, 1.5]},
        {"torchft": [0.0, 0.5, 0.5], "bitwise": [0.0, 0.0, 0.0]},
        {1: "worker 4 is killed"},
    ).svg()
    assert svg.count("step 1: worker 4 is killed") == 2
    assert "loss, torchft" in svg and "|loss - undisturbed|, bitwise" in svg
    bottom = plot.TOP + plot.LOSSES + plot.GAP + plot.DISTANCES
    assert svg.count(f",{bottom:.2f}") >= 4  # the run that deviates by nothing lies on the bottom


@pytest.mark.slow
@pytest.mark.process
def test_a_run_goes_through_all_events_and_has_every_loss_of_the_undisturbed_one(bench: Any, tmp_path: Path) -> None:
    consistency = bench("consistency")
    script = consistency.Script(steps=consistency.LEAST_STEPS)
    flags = [*consistency.prepare_text(tmp_path), *consistency.experiment_flags(script.steps)]
    losses = consistency.run_struck(tmp_path / "bitwise", flags, "bitwise", script)
    calm = consistency.run_undisturbed(tmp_path / "undisturbed", flags, consistency.REFERENCES["bitwise"])
    found = bench("deviations").find_deviation(losses, calm, script.at)
    assert found.before == 0.0
    assert found.equal == found.steps == script.steps - script.at[0]
