"""The benchmark of goodput: its scales, its changed costs and the lines it prints."""

from __future__ import annotations

import pytest

from benchmarks import goodput
from megatron_elas.planner.policies import POLICIES
from megatron_elas.simulator.recovery import load_recovery


def test_every_scale_is_of_its_devices() -> None:
    for name, scale in goodput.SCALES.items():
        job, cluster = scale.make()
        assert cluster.num_devices == int(name.partition("x")[0])
        assert 0.99 * cluster.num_devices < job.spec.world_size <= cluster.num_devices


def test_changes_of_costs_leave_the_restart_policy_alone_but_for_its_own() -> None:
    for policy in POLICIES:
        costs = load_recovery(policy)
        for name, change in goodput.COSTS.items():
            assert (change(costs) == costs) == (
                (policy == "restart" and name != "fast restart") or (policy == "ours" and name == "equal")
            )


def test_every_policy_gives_its_results(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "ROWS", ("ours", "ours, staggered", "recycle", "restart"))
    scale = goodput.Scale(job="llama2-34b", cluster="npu-96", days=100, grid=(8, 2, 6, 2))
    goodput.run_scale("small", scale, "llama3-405b", variants=True)
    printed = capsys.readouterr().out
    for row in ("ours", "ours-staggered", "recycle", "restart"):
        for end in ("", "/slow_x10", "/equal", "/flat", "/fast_restart", "/failures_x3", "/repairs_x10"):
            assert f"RESULT goodput@small/{row}{end}=" in printed
    assert "RESULT vs_recycle@small=" in printed and "RESULT simulated_s@small=" in printed


def test_a_controller_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    goodput.print_controller(16)
    assert capsys.readouterr().out.startswith("RESULT controller_ms@16=")
