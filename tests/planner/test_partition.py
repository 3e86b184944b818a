"""The partition is as good as the best of all partitions, tried one by one."""

from __future__ import annotations

import time
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elas.planner.partition import Fill, Partitioner, StageLoad, moved_parameters, partition, stage_seconds
from megatron_elas.spec.cost import JobCost, UnitCost, Work
from megatron_elas.spec.errors import NoFeasiblePlan


def unit(seconds: float, parameters: int = 0, activation: float = 0.0, working: float = 0.0) -> UnitCost:
    """Forward takes one part of four, the two gradients the rest."""
    return UnitCost(
        forward=Work(compute_s=seconds / 4, fixed_s=seconds / 100),
        input_gradient=Work(compute_s=seconds / 4),
        weight_gradient=Work(steady_s=seconds / 2),
        parameters=parameters,
        activation_bytes=activation,
        working_bytes=working,
        optimizer_s=parameters * 1e-3,
    )


@st.composite
def costs(draw: st.DrawFn, layers: int) -> JobCost:
    units = st.builds(
        unit, st.integers(1, 9).map(float), st.integers(1, 9), st.integers(0, 5).map(float), st.integers(0, 3)
    )
    return JobCost(
        embedding=draw(units),
        layers=tuple(draw(units) for _ in range(layers)),
        head=draw(units),
        loss=unit(1.0),
        boundary_bytes=1,
        weight_bytes=2,
        gradient_bytes=4,
        optimizer_bytes=12,
        optimizer_sharded=draw(st.booleans()),
    )


loads = st.builds(
    StageLoad,
    samples=st.integers(1, 12),
    items=st.integers(1, 6),
    cells=st.integers(1, 4),
    in_flight=st.integers(1, 6),
    largest_item=st.integers(1, 3),
    clock=st.sampled_from((1.0, 0.8)),
)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), layers=st.integers(1, 8), stages=st.integers(1, 4), room=st.integers(20, 900))
def test_no_partition_is_better_than_the_one_found(data: st.DataObject, layers: int, stages: int, room: int) -> None:
    cost = data.draw(costs(layers))
    own = data.draw(st.lists(loads, min_size=stages, max_size=stages))
    homes = data.draw(st.lists(st.integers(-1, stages - 1), min_size=layers, max_size=layers))
    fill = data.draw(st.none() | st.builds(Fill, st.integers(1, 3).map(float), st.just(0.25), st.booleans()))
    ranked = []

    def longest(cuts: tuple[int, ...]) -> float:
        """Seconds until the last stage ends."""
        busy = stage_seconds(cost, cuts, own)
        return max(
            seconds + (0.0 if fill is None else _fill_s(cost, first, fill) + stage * fill.transfer_s * (2 - fill.split))
            for stage, (seconds, first) in enumerate(zip(busy, cuts, strict=False))
        )

    for inner in combinations(range(1, layers), stages - 1) if stages <= layers else ():
        cuts = (0, *inner, layers)
        needed = [
            cost.device_bytes(first, last, cells=load.cells, in_flight=load.in_flight, largest_item=load.largest_item)
            for (first, last), load in zip(pairwise(cuts), own, strict=True)
        ]
        if max(needed) <= room:
            ranked.append((longest(cuts), moved_parameters(cost, cuts, homes)))
    if not ranked:
        with pytest.raises(NoFeasiblePlan, match="layers"):
            Partitioner(cost, room).find(own, homes, fill)
        return
    found = Partitioner(cost, room).find(own, homes, fill)
    if fill is None:
        assert found == partition(cost, own, room, homes)
    assert Partitioner(cost, room).fits(found.cuts, own)
    least = min(seconds for seconds, _ in ranked)
    assert longest(found.cuts) == pytest.approx(least, rel=1e-9)
    assert found.busiest_s == pytest.approx(least, rel=1e-9)
    assert found.moved_parameters == moved_parameters(cost, found.cuts, homes)
    assert found.moved_parameters == min(moved for seconds, moved in ranked if seconds <= least * (1 + 1e-9))


def _fill_s(cost: JobCost, first: int, fill: Fill) -> float:
    """Seconds of one item in all layers before ``first``."""
    units = (cost.embedding, *cost.layers[:first]) if first else ()
    return sum(
        work.seconds(fill.samples)
        for unit in units
        for work in (unit.forward, *(() if fill.split else (unit.input_gradient, unit.weight_gradient)))
    )


def test_later_stages_get_fewer_layers_where_the_pipeline_fills_slowly() -> None:
    plain = JobCost(
        embedding=unit(0.0),
        layers=(unit(1.0),) * 24,
        head=unit(0.0),
        loss=unit(0.0),
        boundary_bytes=1,
        weight_bytes=2,
        gradient_bytes=4,
        optimizer_bytes=12,
    )
    few = [StageLoad(samples=4, items=4, cells=1, in_flight=1, largest_item=1)] * 4
    steady = Partitioner(plain, 1e9).find(few)
    filling = Partitioner(plain, 1e9).find(few, fill=Fill(1.0, 0.0, True))
    assert steady.cuts == (0, 6, 12, 18, 24)
    layers = [last - first for first, last in pairwise(filling.cuts)]
    assert layers[0] > layers[-1] and sorted(layers, reverse=True) == layers


def test_the_last_stage_has_fewer_layers_because_of_the_head() -> None:
    cost = JobCost(
        embedding=unit(0.0),
        layers=(unit(1.0),) * 12,
        head=unit(2.0),
        loss=unit(0.0),
        boundary_bytes=1,
        weight_bytes=2,
        gradient_bytes=4,
        optimizer_bytes=12,
    )
    load = StageLoad(samples=4, items=4, cells=1, in_flight=1, largest_item=1)
    assert partition(cost, [load] * 3, 1e9).cuts in {(0, 5, 10, 12), (0, 4, 9, 12)}
    halved = load._replace(samples=2, items=2)
    _, first, second, _ = partition(cost, [load, halved, load], 1e9).cuts
    assert second - first >= 6


def test_96_layers_and_12_stages_take_a_few_milliseconds() -> None:
    cost = JobCost(
        embedding=unit(1.0, 3, 1.0),
        layers=tuple(unit(1.0 + layer % 5, 2, 1.0) for layer in range(96)),
        head=unit(2.0, 3),
        loss=unit(0.5),
        boundary_bytes=1,
        weight_bytes=2,
        gradient_bytes=4,
        optimizer_bytes=12,
    )
    own = [StageLoad(64, 64, 8000 + stage % 2, 12 - stage, 1) for stage in range(12)]
    homes = [layer // 8 for layer in range(96)]
    times = []
    for _ in range(5):
        begin = time.process_time()
        found = partition(cost, own, 1e9, homes)
        times.append(time.process_time() - begin)
    assert len(found.cuts) == 13
    # Measured: 4 ms. The limit is for slow machines.
    assert min(times) < 0.05
