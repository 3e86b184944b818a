"""Devices and the cells that they make."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_elas.simulator.fleet import Change, Fleet
from megatron_elas.spec.cluster import load_cluster
from megatron_elas.spec.errors import BadUsage

CLUSTER = replace(load_cluster("npu-96"), nodes=2)
"""Of eight devices each."""


def test_one_device_breaks_its_cell_and_only_that() -> None:
    fleet = Fleet(CLUSTER, 4)
    assert fleet.num_cells == 4
    assert fleet.fail((5,), 10.0) == Change((1,), ())
    assert fleet.working == 15
    assert fleet.cell_of(4) is None and fleet.cell_of(3) == 0 and fleet.cell_of(8) == 2
    assert fleet.repair((5,), 10.0) == Change((), (1,))
    assert fleet.cell_of(5) == 1 and fleet.working == 16


def test_spare_lanes_of_one_node_make_a_new_cell_and_those_of_two_do_not() -> None:
    fleet = Fleet(CLUSTER, 4)
    fleet.fail((0,), 1e9)
    assert fleet.fail((12,), 1e9) == Change((3,), ())
    assert fleet.fail((4,), 1e9) == Change((1,), (0,))
    assert sorted(device for device in range(8) if fleet.cell_of(device) == 0) == [1, 2, 3, 5]
    # One of two lanes that are left over breaks nothing, and a third and a fourth make a cell.
    assert fleet.fail((6,), 50.0) == Change((), ())
    assert fleet.repair((0,), 2e9) == Change((), ())
    assert fleet.repair((6,), 50.0) == Change((), ())
    assert fleet.repair((4,), 2e9) == Change((), (1,))


def test_a_device_that_fails_again_is_back_after_the_later_repair() -> None:
    fleet = Fleet(CLUSTER, 8)
    assert fleet.fail((3,), 20.0) == Change((0,), ())
    assert fleet.fail(tuple(range(8)), 15.0) == Change((), ())
    assert fleet.is_node_gone(3)
    assert fleet.repair(tuple(range(8)), 15.0) == Change((), ())
    assert not fleet.is_node_gone(3)
    assert fleet.repair((3,), 20.0) == Change((), (0,))


def test_a_cell_larger_than_a_node_is_on_its_own() -> None:
    fleet = Fleet(CLUSTER, 16)
    assert fleet.num_cells == 1
    assert fleet.fail((15,), 1.0) == Change((0,), ())
    assert Fleet(CLUSTER, 3).num_cells == 5
    leftover = Fleet(CLUSTER, 3)
    assert leftover.fail((15,), 1.0) == Change((), ()) and leftover.cell_of(15) is None
    with pytest.raises(BadUsage, match="too few for a cell of 17"):
        Fleet(CLUSTER, 17)
