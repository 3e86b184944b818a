"""Small situations for tests of the planner."""

from __future__ import annotations

from hypothesis import strategies as st

from megatron_elas.planner.situation import Situation
from megatron_elas.spec.cluster import Link
from megatron_elas.spec.cost import JobCost, UnitCost, Work
from megatron_elas.spec.device import ClockRange, PowerCurve
from megatron_elas.spec.items import StageItems
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.job_profile import deal_layers

CLOCK = ClockRange(nominal_mhz=1000, lowest=0.8, highest=1.2, step=0.1, latency_s=0.001)
POWER = PowerCurve(static_w=100, dynamic_w=200, waiting_w=120, voltage_slope=0.3, voltage_floor=0.8)


def cost(layers: int, *, head: float = 1.0) -> JobCost:
    """A layer takes a second per pass and sample; the head a part of it; 10 bytes per sample, 1 between B and W."""
    work, outer = Work(compute_s=1.0, fixed_s=0.01), Work(compute_s=head)
    layer = UnitCost(
        forward=work,
        input_gradient=work,
        weight_gradient=work,
        parameters=120,
        activation_bytes=10,
        kept_bytes=5,
        working_bytes=2,
        optimizer_s=0.1,
    )
    unit = UnitCost(
        forward=outer, input_gradient=outer, weight_gradient=outer, parameters=60, activation_bytes=4, kept_bytes=4
    )
    return JobCost(
        embedding=UnitCost(
            forward=Work(steady_s=0.1), input_gradient=Work(), weight_gradient=Work(), parameters=60, activation_bytes=1
        ),
        layers=(layer,) * layers,
        head=unit,
        loss=UnitCost(
            forward=Work(steady_s=0.1), input_gradient=Work(), weight_gradient=Work(), parameters=0, activation_bytes=0
        ),
        boundary_bytes=1,
        weight_bytes=2,
        gradient_bytes=4,
        optimizer_bytes=12,
    )


def situation(
    stages: int = 4,
    rows: int = 3,
    steps: int = 4,
    size: int = 2,
    layers: int = 12,
    *,
    lost: tuple[tuple[int, int], ...] = (),
    memory: int = 100_000,
    clocks: bool = False,
) -> Situation:
    """After a loss, on a grid of one lane."""
    own = cost(layers)
    dealt = deal_layers(layers, stages)
    return Situation(
        job=JobSpec(
            tensor_parallel=1,
            pipeline_parallel=stages,
            data_parallel=rows,
            micro_batch_size=size,
            num_microbatches=rows * steps,
        ),
        cost=own,
        cuts=tuple(sum(dealt[:stage]) for stage in range(stages + 1)),
        rows=(tuple(range(rows)),) * stages,
        memory_bytes=memory,
        link=Link(bandwidth=1e6, latency_s=0.001),
        clock=CLOCK if clocks else None,
        power=POWER if clocks else None,
    ).without(lost)


def most_in_flight(cells: StageItems, ahead: int) -> int:
    """Samples that the fullest cell of a stage has between F and B, when it runs so many forward passes ahead."""
    sizes = [[item.samples for item in own] for own in cells]
    return max(sum(own[first : first + ahead + 1]) for own in sizes for first in range(len(own)))


def largest_item(cells: StageItems) -> int:
    """Its samples."""
    return max(item.samples for own in cells for item in own)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Any small grid after up to two losses, no stage of which is gone; memory from tight to plenty."""
    stages, rows = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    lost = draw(
        st.lists(st.tuples(st.integers(0, stages - 1), st.integers(0, rows - 1)), min_size=1, max_size=2, unique=True)
    )
    if rows == 2 and len({stage for stage, _ in lost}) < len(lost):
        lost = lost[:1]
    return situation(
        stages,
        rows,
        draw(st.integers(1, 6)),
        draw(st.sampled_from((1, 2, 3, 4, 6))),
        draw(st.integers(stages, 12)),
        lost=tuple(lost),
        memory=draw(st.sampled_from((4_000, 10_000, 1_000_000))),
        clocks=draw(st.booleans()),
    )
