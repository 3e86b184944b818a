"""All cells of a stage at once take as long as each of them takes by itself, whatever their items are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elas.planner.dataflow import DEALS, deal_stages, is_possible
from megatron_elas.schedule.lockstep import Lockstep
from megatron_elas.schedule.one_f_one_b import one_f_one_b, one_f_one_b_program, stock_warmups
from megatron_elas.schedule.routes import Flow
from megatron_elas.schedule.timing import Deadlock, Durations, Program
from megatron_elas.schedule.warmups import find_order, find_warmups, time_order
from megatron_elas.spec.cost import PassTime, StageTimes
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.items import Item, StageItems, whole_micro_batches
from megatron_elas.spec.job import JobSpec

Items = tuple[StageItems, ...]


def job_of(stages: int, rows: int, size: int, per_row: int) -> JobSpec:
    return JobSpec(
        tensor_parallel=1,
        pipeline_parallel=stages,
        data_parallel=rows,
        micro_batch_size=size,
        num_microbatches=per_row * rows,
    )


@st.composite
def dealt(draw: st.DrawFn) -> Items:
    """Stages that kept some of their rows, or got more, each dealt in some way."""
    job = job_of(*draw(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.integers(1, 6))))
    rows, deals = [], []
    for _ in range(job.pipeline_parallel):
        deal = draw(st.sampled_from(DEALS))
        own = sorted(draw(st.sets(st.integers(0, job.data_parallel), min_size=1)))
        rows.append(tuple(own if is_possible(job, len(own), deal) else own[:1]))
        deals.append(deal)
    return deal_stages(job, rows, deals)


@st.composite
def scattered(draw: st.DrawFn) -> Items:
    """Items of any ranges, on any cell."""
    job = job_of(*draw(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))))
    samples = job.num_microbatches * job.micro_batch_size
    stages = []
    for _ in range(job.pipeline_parallel):
        owner = [draw(st.integers(0, min(samples, 6) - 1)) for _ in range(samples)]
        cells = draw(st.integers(1, len(set(owner))))
        own: list[list[Item]] = [[] for _ in range(cells)]
        for number, which in enumerate(dict.fromkeys(owner)):
            parts = tuple((at, at + 1) for at in range(samples) if owner[at] == which)
            own[number % cells].append(Item(number, parts))
        stages.append(tuple(map(tuple, own)))
    return tuple(stages)


def draw_times(data: st.DataObject, stages: int) -> tuple[list[StageTimes], list[PassTime]]:
    passes = st.builds(PassTime, sample_s=st.floats(0, 3), fixed_s=st.floats(0, 3))
    times = st.builds(StageTimes, forward=passes, input_gradient=passes, weight_gradient=passes)
    return (
        data.draw(st.lists(times, min_size=stages, max_size=stages)),
        data.draw(st.lists(passes, min_size=stages - 1, max_size=stages - 1)),
    )


def run_one_by_one(
    items: Items, warmups: Sequence[int], times: list[StageTimes], links: list[PassTime]
) -> float | None:
    """Pass by pass; None: they get stuck."""
    try:
        return Program(one_f_one_b(items, warmups)).run(Durations.of(times, items, links)).step_s
    except Deadlock:
        return None


@given(items=st.one_of(dealt(), scattered()), data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_step_takes_what_it_takes_pass_by_pass(items: Items, data: st.DataObject) -> None:
    times, links = draw_times(data, len(items))
    warmups = [data.draw(st.integers(0, 8)) for _ in items]
    found, expected = Lockstep(items).run(warmups, times, links), run_one_by_one(items, warmups, times, links)
    # Lines may wait for each other where passes do not; then passes are asked.
    assert found is None or found == expected
    if expected is None:
        with pytest.raises(Deadlock):
            time_order(items, warmups, times, links)
    else:
        assert time_order(items, warmups, times, links) == expected
    order = find_order(items, times, links)
    assert order.step_s == run_one_by_one(items, order.warmups, times, links)


@given(items=st.one_of(dealt(), scattered()))
@settings(max_examples=300, deadline=None)
def test_warm_ups_are_those_that_are_found_pass_by_pass(items: Items) -> None:
    order = find_order(items)
    assert order.warmups == find_warmups(items)
    assert order.step_s == 0


@given(items=dealt(), data=st.data())
@settings(max_examples=100, deadline=None)
def test_equal_items_give_the_same_whether_they_are_one_object_or_not(items: Items, data: st.DataObject) -> None:
    times, links = draw_times(data, len(items))
    warmups = stock_warmups([len(cells) for cells in items], [max(map(len, cells)) for cells in items])
    copies = [tuple(list(cells)) for cells in items]
    assert Lockstep(copies).run(warmups, times, links) == Lockstep(items).run(warmups, times, links)


@pytest.mark.parametrize("deal", DEALS)
@pytest.mark.parametrize("lost", [1, 3, 8])
@pytest.mark.parametrize("grid", [(4, 16, 2, 8), (8, 24, 1, 16), (3, 12, 4, 32)])
def test_losses_of_large_jobs_need_no_look_at_single_passes(
    grid: tuple[int, int, int, int], lost: int, deal: str
) -> None:
    job = job_of(*grid)
    rows = [tuple(range(lost if stage == 1 else 0, job.data_parallel)) for stage in range(job.pipeline_parallel)]
    items = deal_stages(job, rows, [deal] * job.pipeline_parallel)  # type: ignore[list-item]
    assert items[0] is items[2], "what is dealt alike is one object"
    order = find_order(items)
    assert Lockstep(items).run(order.warmups) is not None
    passes = PassTime(sample_s=1.0, fixed_s=0.1)
    times = [StageTimes(forward=passes, input_gradient=passes, weight_gradient=passes)] * len(items)
    links = [PassTime(sample_s=0.3, fixed_s=0.2)] * (len(items) - 1)
    program = one_f_one_b_program(Flow(items), order.warmups)
    assert time_order(items, order.warmups, times, links) == program.run(Durations.of(times, items, links)).step_s


def test_first_passes_wait_for_all_cells_of_a_stage() -> None:
    items = (whole_micro_batches([range(6)], 1), whole_micro_batches([(0, 3), (1, 4), (2, 5)], 1))
    assert Lockstep(items).run([1, 0]) is None
    assert find_order(items).warmups == (3, 0)


def test_samples_that_are_on_one_stage_only_are_refused() -> None:
    with pytest.raises(BadUsage, match="one stage holds 2 samples and the other 3"):
        Lockstep((whole_micro_batches([range(2)], 1), whole_micro_batches([range(3)], 1)))
