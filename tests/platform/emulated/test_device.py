"""A worker's device takes the times of its costs, at its clock, and waits for others."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_elas.platform.emulated.board import Board
from megatron_elas.platform.emulated.device import EmulatedDevice
from megatron_elas.platform.emulated.timeline import Timeline
from megatron_elas.spec.cost import UnitCost, Work
from tests.platform.emulated.test_timeline import Wall

LAYER = UnitCost(
    forward=Work(compute_s=0.5, steady_s=0.25, fixed_s=0.125),
    input_gradient=Work(compute_s=1.0),
    weight_gradient=Work(compute_s=0.5),
    parameters=1,
    activation_bytes=0,
)


def make(wall: Wall, worker: int = 0, speed: float = 1.0, board: Board | None = None) -> EmulatedDevice:
    return EmulatedDevice(worker, speed, board, Timeline(wall.now, wall.sleep))


@pytest.mark.parametrize(
    ("kind", "seconds"), [("forward", 1.625), ("backward", 3.0), ("input_gradient", 2.0), ("weight_gradient", 1.0)]
)
def test_a_pass_takes_the_time_of_its_samples(kind: str, seconds: float) -> None:
    wall = Wall()
    make(wall).run_pass("layer", kind, (LAYER,), 2)
    assert wall.now_s == pytest.approx(100 + seconds)


def test_units_add_up_and_all_is_faster_at_a_higher_speed() -> None:
    wall = Wall()
    make(wall, speed=2.0).run_pass("layer", "forward", (LAYER, LAYER), 1)
    assert wall.now_s == pytest.approx(100.875)


def test_a_lower_clock_makes_what_depends_on_it_longer(tmp_path: Path) -> None:
    wall, board = Wall(), Board(tmp_path / "board", 2)
    device = make(wall, 1, board=board)
    board.ask_clock(1, 0.5, 0.0)
    assert device.clock == 0.5
    device.run_pass("layer", "forward", (LAYER,), 1)
    assert wall.now_s == pytest.approx(101.375)
    board.close()


def test_a_message_takes_the_time_of_its_link_from_the_planned_end_of_what_made_it(tmp_path: Path) -> None:
    wall, late, board = Wall(), Wall(late_s=0.2), Board(tmp_path / "board", 2)
    sender, receiver = make(late, 0, board=board), make(wall, 1, board=board)
    sender.run_pass("layer", "forward", (LAYER,), 1)
    sender.sends(3)
    assert late.now_s == pytest.approx(101.075)
    receiver.receives(0, 3, 0.25)
    assert wall.now_s == pytest.approx(101.125)
    board.close()


def test_an_update_starts_when_all_gradients_are_there(tmp_path: Path) -> None:
    first, second, board = Wall(), Wall(), Board(tmp_path / "board", 2)
    fast, slow = make(first, 0, board=board), make(second, 1, board=board)
    fast.run_pass("layer", "backward", (LAYER,), 1)
    slow.run_pass("layer", "backward", (LAYER,), 2)
    slow.run_pass("layer", "forward", (LAYER,), 1)
    begin_s = fast.begin_update((0, 1))
    assert begin_s == first.now_s == pytest.approx(103.0)
    fast.run("optimizer", 0.5)
    assert first.now_s == pytest.approx(103.5)
    fast.idle_until(begin_s, 0.75)
    assert first.now_s == pytest.approx(103.75)
    board.close()


def test_what_a_process_is_too_slow_by_is_told_once() -> None:
    wall = Wall()
    device = make(wall)
    wall.now_s += 10
    device.run_pass("layer", "backward", (LAYER,), 1)
    asked_s, slow_s = device.overrun()
    assert asked_s == pytest.approx(1.5) and slow_s == pytest.approx(8.25)
    assert device.overrun() == (0.0, 0.0)


def test_errors_are_told_by_kind() -> None:
    wall = Wall(late_s=0.25)
    device = make(wall)
    for _ in range(20):
        device.run_pass("layer", "forward", (LAYER,), 1)
    device.run("update", 1.0)
    forward, update = device.errors.summarize()
    assert (forward.kind, forward.count, update.kind, update.count) == ("layer forward", 20, "update", 1)
    assert forward.asked_s == forward.achieved_s == pytest.approx(0.875)
    assert forward.median_error_s == pytest.approx(0) and forward.late_s == pytest.approx(0.25)
    assert forward.overrun == update.overrun == 0
    device.errors.clear()
    assert device.errors.summarize() == ()
