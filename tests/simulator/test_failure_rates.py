"""Traces that are drawn have the rates they are drawn from, and are the same ones every time.

Bounds are four standard deviations of what is counted, so that a right generator fails one seed in 16,000; seeds are
fixed.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median

import pytest

from megatron_elas.simulator.failure_rates import DAY_S, FailureRate, Rates, SlowdownRate, generate
from megatron_elas.simulator.trace_files import load_trace
from megatron_elas.simulator.traces import Failure, Slowdown, Trace
from megatron_elas.spec.cluster import Cluster, load_cluster
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.tables import configs_folder

SMALL = load_cluster("npu-96")
LARGE = load_cluster("gpu-1m")


def failures(trace: Trace) -> list[Failure]:
    return [event for event in trace.events if isinstance(event, Failure)]


def draw(rate: FailureRate, cluster: Cluster = SMALL, days: float = 100.0, seed: int = 1) -> list[Failure]:
    return failures(generate(cluster, Rates(name="r", failures=(rate,)), days * DAY_S, seed))


def near(count: int, expected: float) -> bool:
    return abs(count - expected) < 4 * math.sqrt(expected)


@pytest.mark.parametrize(("scope", "units", "size"), [("device", 96, 1), ("node", 12, 8), ("switch", 3, 40)])
def test_units_fail_as_often_as_they_should_and_with_all_their_devices(scope: str, units: int, size: int) -> None:
    nodes = 5 if scope == "switch" else None
    rate = FailureRate(cause="c", scope=scope, per_day=0.2, repair_s=3600, nodes=nodes)
    found = draw(rate)
    # A unit that is away does not fail: a day of 24 hours and another of repair for every five.
    assert near(len(found), units * 100 / (5 + 1 / 24))
    for failure in found:
        assert failure.devices[0] % size == 0 and failure.cause == "c" and failure.repair_s == 3600
        assert failure.devices == tuple(range(failure.devices[0], min(failure.devices[0] + size, 96)))
    assert len({failure.devices[0] for failure in found}) == units
    assert near(sum(failure.at_s < 50 * DAY_S for failure in found), len(found) / 2)


def test_a_switch_has_as_many_nodes_as_the_cluster_says_without_a_number() -> None:
    rate = FailureRate(cause="c", scope="switch", per_day=0.2, repair_s=60)
    assert {len(failure.devices) for failure in draw(rate, replace(SMALL, nodes_per_domain=4))} == {32}


@pytest.mark.parametrize("shape", [0.6, 1.0, 2.5])
def test_the_rate_holds_from_the_beginning_whatever_the_shape(shape: float) -> None:
    rate = FailureRate(cause="c", scope="device", per_day=2e-3, shape=shape, repair_s=60)
    found = draw(rate, load_cluster("npu-100k"), days=20)
    assert near(len(found), 4000)
    assert near(sum(failure.at_s < DAY_S for failure in found), 200)


def test_a_shape_below_one_makes_the_same_units_fail_again() -> None:
    def repeats(shape: float) -> int:
        rate = FailureRate(cause="c", scope="device", per_day=2e-3, shape=shape, repair_s=60)
        counts = Counter(failure.devices for failure in draw(rate, load_cluster("npu-100k"), days=20))
        return sum(count - 1 for count in counts.values())

    # 4000 failures of 100000 devices: by chance some 80 hit one that had failed before.
    assert near(repeats(1.0), 80)
    assert repeats(0.5) > 5 * repeats(1.0)
    assert repeats(3.0) < 5


def test_intervals_of_a_unit_follow_the_weibull_distribution() -> None:
    rate = FailureRate(cause="c", scope="device", per_day=1.0, shape=0.7, repair_s=1e-9)
    found = draw(replace(rate, scope="node"), replace(SMALL, nodes=1), days=20000)
    gaps = [(after.at_s - before.at_s) / DAY_S for before, after in pairwise(found)]
    scale = 1 / math.gamma(1 + 1 / 0.7)
    for quantile in (0.1, 0.5, 0.9):
        gap = scale * (-math.log(1 - quantile)) ** (1 / 0.7)
        assert near(sum(value < gap for value in gaps), quantile * len(gaps))
    assert fmean(gaps) == pytest.approx(1, abs=0.05)


def test_repairs_are_log_normal_about_their_mean_and_a_unit_is_away_until_then() -> None:
    rate = FailureRate(cause="c", scope="device", per_day=0.5, repair_s=7200, repair_spread=1.0)
    found = draw(rate, days=200)
    repairs = [failure.repair_s for failure in found]
    # The variance of a log-normal value is mean^2 (exp(spread^2) - 1).
    assert fmean(repairs) == pytest.approx(7200, abs=4 * 7200 * 1.32 / math.sqrt(len(repairs)))
    assert median(repairs) == pytest.approx(7200 * math.exp(-0.5), rel=0.06)
    back: dict[int, float] = {}
    for failure in found:
        (device,) = failure.devices
        assert failure.at_s > back.get(device, 0.0)
        back[device] = failure.at_s + failure.repair_s


def test_what_is_never_repaired_fails_once() -> None:
    found = draw(FailureRate(cause="c", scope="device", per_day=1.0, repair_s=math.inf, repair_spread=1.0))
    assert len(found) == 96 == len({failure.devices for failure in found})
    assert {failure.repair_s for failure in found} == {math.inf}


def test_devices_get_slow_as_often_as_they_should() -> None:
    rate = SlowdownRate(cause="heat", per_day=0.1, factor=1.3, seconds=600, spread=0.5)
    events = generate(SMALL, Rates(name="r", slowdowns=(rate,)), 100 * DAY_S, 3).events
    assert near(len(events), 960)
    assert all(isinstance(event, Slowdown) and event.factor == 1.3 and event.cause == "heat" for event in events)
    lengths = [event.seconds for event in events if isinstance(event, Slowdown)]
    assert fmean(lengths) == pytest.approx(600, rel=0.08)


def test_the_same_seed_gives_the_same_trace_and_another_one_another() -> None:
    rates = load_trace("llama3-405b")
    assert isinstance(rates, Rates)
    many = Rates(name="r", failures=tuple(replace(rate, per_day=50 * rate.per_day) for rate in rates.failures))
    first = generate(SMALL, many, 30 * DAY_S, 7)
    assert first == generate(SMALL, many, 30 * DAY_S, 7)
    assert first.events != generate(SMALL, many, 30 * DAY_S, 8).events
    assert [event.at_s for event in first.events] == sorted(event.at_s for event in first.events)
    # Another rate of one kind leaves the others as they were.
    changed = Rates(name="r", failures=(replace(many.failures[0], per_day=1e-9), *many.failures[1:]))
    rest = [event for event in first.events if event.cause != "accelerator"]
    assert [event for event in generate(SMALL, changed, 30 * DAY_S, 7).events if event.cause != "accelerator"] == rest


def test_a_million_devices_over_four_weeks_take_seconds() -> None:
    rates = load_trace("llama3-405b")
    assert isinstance(rates, Rates)
    begin = time.process_time()
    trace = generate(LARGE, rates, 28 * DAY_S, 1)
    assert time.process_time() - begin < 10
    assert near(len(trace.events), 28 * rates.failures_per_day(LARGE))
    causes = Counter(event.cause for event in trace.events)
    for cause, count in {"accelerator": 268, "host": 53, "network": 35, "software": 63}.items():
        assert near(causes[cause], count / 54 / 16384 * 1e6 * 28)
    trace.check_devices(LARGE.num_devices, LARGE.name)


def test_llama_3_has_the_interruptions_of_its_paper() -> None:
    rates = load_trace("llama3-405b")
    assert isinstance(rates, Rates)
    cluster = replace(load_cluster("gpu-96"), nodes=2048)
    assert 54 * rates.failures_per_day(cluster) == pytest.approx(419, rel=0.001)


@pytest.mark.parametrize("name", sorted(file.stem for file in (configs_folder() / "traces").glob("*.toml")))
def test_every_profile_can_be_read_and_says_where_each_number_is_from(name: str) -> None:
    loaded = load_trace(name)
    if isinstance(loaded, Trace):
        loaded.check_devices(96, "npu-96")
        return
    assert loaded.name == name and loaded.failures
    generate(SMALL, loaded, DAY_S, 1)
    for line in (configs_folder() / "traces" / f"{name}.toml").read_text().splitlines():
        key, _, rest = line.partition(" = ")
        if key and not key.startswith(("#", "[")) and key not in {"name", "cause", "scope"}:
            _, _, source = rest.partition(" # ")
            assert source.partition(":")[0].partition("\n")[0] in {"published", "derived", "assumed"}, line


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"scope": "rack"}, "scope is 'rack': write device, node or switch"),
        ({"per_day": 0.0}, "per_day must be above 0, got 0.0"),
        ({"shape": 0.0}, "shape must be above 0"),
        ({"repair_s": 0.0}, "repair_s must be above 0, got 0.0"),
        ({"repair_spread": -1.0}, "repair_spread must be at least 0"),
        ({"nodes": 4}, "nodes is 4: it counts those behind a switch"),
    ],
)
def test_a_rate_that_cannot_be_is_refused(change: dict[str, object], sentence: str) -> None:
    fields: dict[str, object] = {"cause": "c", "scope": "node", "per_day": 1.0, "repair_s": 1.0}
    with pytest.raises(BadUsage) as error:
        FailureRate(**{**fields, **change})  # type: ignore[arg-type]
    assert sentence in str(error.value)


def test_lengths_and_seeds_that_cannot_be_are_refused() -> None:
    rates = Rates(name="r")
    with pytest.raises(BadUsage, match="lasts a number of seconds above 0, not 0"):
        generate(SMALL, rates, 0, 1)
    with pytest.raises(BadUsage, match="the seed is -1: give one that is not negative"):
        generate(SMALL, rates, 1, -1)
    often = Rates(name="r", slowdowns=(SlowdownRate(cause="c", per_day=1e3, factor=2, seconds=1),))
    with pytest.raises(BadUsage, match="r: some 2880000 events in 30 days are more than 2000000: choose fewer days"):
        generate(SMALL, often, 30 * DAY_S, 1)
    with pytest.raises(BadUsage, match=r"factor must be above 1, got 0\.9"):
        SlowdownRate(cause="c", per_day=1, factor=0.9, seconds=1)


@pytest.mark.parametrize(("devices", "hours"), [(16384, 1.8), (131072, 0.23)])
def test_rsc_1_fails_as_often_as_its_paper_projects(devices: int, hours: float) -> None:
    rates = load_trace("rsc-1")
    assert isinstance(rates, Rates)
    cluster = replace(load_cluster("a100-96"), nodes=devices // 8)
    assert 24 / rates.failures_per_day(cluster) == pytest.approx(hours, rel=0.03)


def test_the_page_tells_how_often_clusters_fail() -> None:
    page = (configs_folder().parent / "docs" / "simulator.md").read_text()
    rows = [[column.strip() for column in line.split("|")] for line in page.splitlines() if line.startswith("| `")]
    assert {row[1].strip("`") for row in rows} == {file.stem for file in (configs_folder() / "traces").glob("*.toml")}
    for _, name, _, *hours, _ in rows:
        rates = load_trace(name.strip("`"))
        if isinstance(rates, Rates):
            for nodes, told in zip((12, 2048, 125000), hours, strict=True):
                found = 24 / rates.failures_per_day(replace(SMALL, nodes=nodes))
                assert float(told.replace(",", "")) == pytest.approx(found, rel=0.03), (name, nodes)
