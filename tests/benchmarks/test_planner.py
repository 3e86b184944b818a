"""The planner's benchmark: which losses it tries, and the lines it prints."""

from __future__ import annotations

import argparse
from functools import partial

import pytest

from benchmarks.planner import (
    GRIDS,
    OTHER_GRIDS,
    Table,
    compare,
    list_losses,
    planning_of,
    planning_s,
    read_grid,
    situation_of,
)
from megatron_elas.planner.step_plan import QUICK, Effort, make_plan
from megatron_elas.spec.cluster import load_cluster
from megatron_elas.spec.job_profile import load_job


def test_grids_are_written_in_short() -> None:
    assert read_grid("pp8dp2m32b6") == (8, 2, 32, 6)
    with pytest.raises(argparse.ArgumentTypeError, match="'8x2' is no grid"):
        read_grid("8x2")
    assert len(GRIDS) >= 12 and len(set(map(read_grid, GRIDS))) == len(GRIDS)


def test_no_loss_empties_a_stage() -> None:
    assert set(list_losses(4, 2)) == {"first", "middle", "last", "two_stages"}
    assert list_losses(4, 3)["one_stage"] == ((2, 0), (2, 1))


def test_every_loss_gives_its_results(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table()
    begin = situation_of(load_job("llama2-34b"), load_cluster("npu-96"), "pp4dp2m4b1")
    table.begin("llama2-34b")
    compare(begin, "pp4dp2m4b1", table, Effort(evaluations=6, exact=True))
    table.print_results()
    printed = capsys.readouterr().out
    for loss in list_losses(4, 2):
        assert f"RESULT share@pp4dp2m4b1/{loss}=" in printed
        assert f"RESULT vs_recycle@pp4dp2m4b1/{loss}=" in printed
        assert f"RESULT job@pp4dp2m4b1/{loss}=" in printed and f"RESULT now@pp4dp2m4b1/{loss}=" in printed
    assert "RESULT share_min=" in printed and "RESULT vs_recycle_min=" in printed
    assert "RESULT job_min=" in printed and "RESULT job_vs_torchft_min=" in printed and "RESULT improve_s=" in printed


def test_the_second_job_has_grids_of_the_first_ones_form() -> None:
    assert all(read_grid(grid) for grid in OTHER_GRIDS)


def test_planning_is_timed_on_the_processor_and_on_the_wall() -> None:
    begin = situation_of(load_job("llama2-34b"), load_cluster("npu-96"), "pp4dp2m4b1")
    used, passed = planning_s(partial(make_plan, begin, effort=QUICK), 3)
    assert 0 < used <= passed * 1.01


def test_a_running_job_s_plan_is_one_without_the_lost_worker() -> None:
    running = planning_of(load_job("llama2-34b"), load_cluster("npu-96"), (1, 2))
    plan = running.replan()
    # Four stages of six cells of four workers.
    assert [len(cells) for cells in plan.items] == [6, 5, 6, 6] and 4 * (6 + 2) not in plan.placement.workers
    better = running.improve()
    assert better is not None and better.layers != plan.layers
    assert plan.predicted_s is not None and better.predicted_s is not None and better.predicted_s < plan.predicted_s
