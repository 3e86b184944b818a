"""Devices: their profiles load, say where numbers come from, and the curves have the measured shape."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_elas.spec.cost import Work
from megatron_elas.spec.device import ClockRange, PowerCurve, load_device
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.tables import configs_folder

NAMES = sorted(path.stem for path in (configs_folder() / "devices").glob("*.toml"))
SOURCE = re.compile(r"# (measured|published|derived|assumed)\b")


def test_the_three_devices_are_there() -> None:
    assert {"ascend-910b", "a100-80g", "h100"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_loads_and_its_clocks_contain_the_nominal_one(name: str) -> None:
    device = load_device(name)
    if device.clock is not None:
        assert 1.0 in device.clock.settings()
    assert (device.clock is None) == (device.power is None) == (name == "cpu")
    assert device.usable_bytes < device.memory_bytes


@pytest.mark.parametrize("path", sorted(configs_folder().glob("devices/*.toml")), ids=lambda path: path.stem)
def test_every_number_of_a_device_says_where_it_comes_from(path: Path) -> None:
    numbers = [line for line in path.read_text().splitlines() if re.match(r"\w+ = [\d.]", line)]
    assert len(numbers) == (7 if path.stem == "cpu" else 17)
    assert [line for line in numbers if not SOURCE.search(line)] == []


def test_settings_are_steps_from_the_nominal_clock_and_contain_both_bounds() -> None:
    clock = ClockRange(nominal_mhz=1000, lowest=0.7, highest=1.2, step=0.1, latency_s=0.0)
    assert clock.settings() == pytest.approx((0.7, 0.8, 0.9, 1.0, 1.1, 1.2))
    assert clock.at_least(0.81) == pytest.approx(0.9)
    assert clock.at_least(0.8) == pytest.approx(0.8)
    assert clock.at_least(2.0) == pytest.approx(1.2)


def test_time_and_power_follow_the_published_rows_of_one_device() -> None:
    """Backward passes in Zeus' guide on Perseus: 245.3 ms at 1740 MHz, 418 at 690, 431 at 660; 284, 163 and 161 W."""
    work = Work(compute_s=0.1134, fixed_s=0.1319)
    power = PowerCurve(static_w=117, dynamic_w=167, waiting_w=120, voltage_slope=0.3, voltage_floor=0.833)
    for mhz, seconds, watts in ((1740, 0.2453, 284), (690, 0.418, 163), (660, 0.431, 161)):
        clock = mhz / 1740
        assert work.seconds(1, clock) == pytest.approx(seconds, rel=0.01)
        assert power.computing_w(clock) == pytest.approx(watts, rel=0.01)
    joules = [power.energy_j(work.seconds(1, f / 1740), 0.0, f / 1740) for f in (1740, 1200)]
    assert joules[1] < joules[0]


def test_waiting_costs_its_own_power() -> None:
    power = PowerCurve(static_w=100, dynamic_w=200, waiting_w=120, voltage_slope=0.0, voltage_floor=1.0)
    assert power.energy_j(2.0, 3.0) == pytest.approx(2 * 300 + 3 * 120)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"efficiency": 1.2}, "efficiency must be above 0 and at most 1, got 1.2"),
        ({"memory_bytes": 0}, "memory_bytes must be above 0, got 0"),
        ({"layer_pass_s": -1.0}, "layer_pass_s must be at least 0, got -1.0"),
        ({"peak_flops": float("nan")}, "peak_flops must be above 0, got nan"),
    ],
)
def test_a_number_that_cannot_be_is_refused(change: dict[str, float], sentence: str) -> None:
    with pytest.raises(BadUsage) as caught:
        replace(load_device("h100"), **change)  # type: ignore[arg-type]
    assert str(caught.value) == sentence


def test_clocks_that_leave_out_the_nominal_one_are_refused() -> None:
    with pytest.raises(BadUsage, match=r"clocks from 0\.5 to 0\.9 do not contain the nominal one, 1\.0"):
        ClockRange(nominal_mhz=1000, lowest=0.5, highest=0.9, step=0.1, latency_s=0.0)
