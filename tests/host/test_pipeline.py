"""The stock 1F1B order, routed over stages with different numbers of cells, always ends."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elas.host.pipeline import Piece, Route, RoutedPipeline
from megatron_elas.planner.dataflow import DEALS, Deal, deal_items
from megatron_elas.planner.plan import share_items
from megatron_elas.runtime.transport.base import Part
from megatron_elas.schedule.greedy import NO_MATTER, Limit, greedy
from megatron_elas.schedule.items import cut, deal_round
from megatron_elas.schedule.one_f_one_b import stock_warmups
from megatron_elas.schedule.orders import write_orders
from megatron_elas.schedule.routes import Flow
from megatron_elas.schedule.timing import Program
from megatron_elas.schedule.warmups import find_warmups, runs_in_step
from megatron_elas.spec.items import Item, StageItems, whole_micro_batches
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.layout import Cell, Placement
from megatron_elas.spec.plan import ElasticPlan
from tests.schedule.cases import all_items, durations_of
from tests.schedule.test_greedy import tastes

NUM_ITEMS = 12


def make_plan(
    sizes: tuple[int, ...], num_items: int = NUM_ITEMS, items: tuple[StageItems, ...] = (), warmups: Sequence[int] = ()
) -> ElasticPlan:
    """Stages of these many cells, one worker each; items of one sample, unless given."""
    numbers = itertools.count()
    stages = tuple(tuple(Cell(row=row, workers=(next(numbers),)) for row in range(size)) for size in sizes)
    items = items or tuple(whole_micro_batches(share_items(num_items, size), 1) for size in sizes)
    layers = tuple((stage, stage + 1) for stage in range(len(sizes)))
    return ElasticPlan(
        epoch=1, placement=Placement(stages=stages), layers=layers, items=items, backups=(), warmups=tuple(warmups)
    )


Operation = tuple[str, int, int]
"""("send" or "receive", peer, tag), or ("gather", stage, 0): a collective of the stage's cells."""


def operations(plan: ElasticPlan, worker: int) -> Iterator[Operation]:
    """What Megatron's 1F1B schedule does on a worker, in order, with a lazy parameter gather at first."""
    route = Route(plan, worker)
    stage, items = route.seat.stage, route.items
    last = plan.placement.num_stages - 1
    warmup = min(route.warmup, len(items))

    def forward(position: int) -> Iterator[Operation]:
        if stage > 0:
            for piece in route.before(position):
                yield "receive", piece.worker, 2 * piece.sample
        if position == 0:
            yield "gather", stage, 0
        if stage < last:
            for piece in route.after(position):
                yield "send", piece.worker, 2 * piece.sample

    def backward(position: int) -> Iterator[Operation]:
        if stage < last:
            for piece in route.after(position):
                yield "receive", piece.worker, 2 * piece.sample + 1
        if stage > 0:
            for piece in route.before(position):
                yield "send", piece.worker, 2 * piece.sample + 1

    count = len(items)
    for position in range(warmup):
        yield from forward(position)
    for position in range(warmup, count):
        yield from forward(position)
        yield from backward(position - warmup)
    for position in range(count - warmup, count):
        yield from backward(position)


def run_all(plan: ElasticPlan) -> dict[int, Operation]:
    """Run all workers with eager sends; gives where each is stuck, empty when all ended.

    A link hands over messages in the order in which they were sent, as sockets do.
    """
    programs = {worker: operations(plan, worker) for worker in plan.placement.workers}
    waiting = {worker: next(program) for worker, program in programs.items()}
    links: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    gathering: dict[int, set[int]] = defaultdict(set)
    progress = True
    while waiting and progress:
        progress = False
        for worker in list(waiting):
            kind, peer, tag = waiting[worker]
            if kind == "send":
                links[worker, peer].append(tag)
            elif kind == "receive":
                if not links[peer, worker]:
                    continue
                assert links[peer, worker].popleft() == tag, f"worker {worker} gets another micro-batch than it expects"
            else:
                gathering[peer].add(worker)
                if len(gathering[peer]) < len(plan.placement.stages[peer]):
                    continue
            progress = True
            following = next(programs[worker], None)
            if following is None:
                del waiting[worker]
            else:
                waiting[worker] = following
    assert waiting or not any(links.values()), "something was sent that nobody received"
    return waiting


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_every_shape_of_pipeline_runs_to_its_end(depth: int) -> None:
    for sizes in itertools.product((1, 2, 3, 4), repeat=depth):
        stuck = run_all(make_plan(sizes))
        assert not stuck, f"cells per stage {sizes}: stuck at {stuck}"


@pytest.mark.parametrize("sizes", [(4, 3, 4, 4, 4, 4), (6, 6, 5, 6, 6, 6), (1, 3, 2, 3, 1, 2, 3, 3)])
def test_deep_pipelines_run_to_their_end(sizes: tuple[int, ...]) -> None:
    """One warm-up per later stage, times the widest over the own width, hung in the first: stage 1 ran ahead of 0."""
    assert not run_all(make_plan(sizes, 8 * max(sizes)))


def test_stock_warm_up_would_hang_where_a_narrow_stage_feeds_a_wider_one(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = property(lambda route: route.plan.placement.num_stages - route.seat.stage - 1)
    monkeypatch.setattr(Route, "warmup", stock)
    assert run_all(make_plan((1, 3)))


@pytest.mark.parametrize("deal", DEALS)
@pytest.mark.parametrize("widths", [(3, 2), (2, 3), (3, 3, 2), (2, 3, 3), (3, 1, 2), (1, 3), (3, 2, 3, 1)])
def test_items_of_any_size_run_to_their_end(widths: tuple[int, ...], deal: Deal) -> None:
    """Also where a batch is cut in another way on every stage, so that items are put together and shared out."""
    job = JobSpec(
        tensor_parallel=1, pipeline_parallel=len(widths), data_parallel=3, micro_batch_size=2, num_microbatches=12
    )
    items = tuple(deal_items(job, range(width), deal) for width in widths)
    stuck = run_all(make_plan(widths, items=items, warmups=find_warmups(items)))
    assert not stuck, f"{deal} on {widths}: stuck at {stuck}"


@given(items=all_items(), size=st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_warm_ups_that_are_found_get_through_and_shorter_ones_do_not(items: tuple[StageItems, ...], size: int) -> None:
    widths = tuple(map(len, items))
    found = find_warmups(items)
    assert not run_all(make_plan(widths, items=items, warmups=found))
    stock = tuple(stock_warmups(widths, [max(map(len, cells)) for cells in items]))
    if found != stock:
        shorter = [ahead - (len(items) - 1 - stage) for stage, ahead in enumerate(found)]
        assert run_all(make_plan(widths, items=items, warmups=shorter))


@st.composite
def in_step(draw: st.DrawFn) -> tuple[StageItems, ...]:
    """Micro-steps of any numbers of samples, which every stage cuts among its cells as it likes."""
    steps = draw(st.lists(st.integers(3, 6), min_size=1, max_size=5))
    stages = []
    for _ in range(draw(st.integers(1, 4))):
        cells: list[list[Item]] = [[] for _ in range(draw(st.integers(1, 3)))]
        start = 0
        for step, samples in enumerate(steps):
            inner = draw(st.sets(st.integers(1, samples - 1), min_size=len(cells) - 1, max_size=len(cells) - 1))
            cuts = [start, *(start + inside for inside in sorted(inner)), start + samples]
            for cell, part in enumerate(itertools.pairwise(cuts)):
                cells[cell].append(Item(step * len(cells) + cell, (part,)))
            start += samples
        stages.append(tuple(map(tuple, cells)))
    return tuple(stages)


@given(items=in_step())
@settings(max_examples=100, deadline=None)
def test_stages_that_run_the_same_samples_side_by_side_need_no_more_than_stock_warm_ups(
    items: tuple[StageItems, ...],
) -> None:
    """Whatever their widths, and with cells that join."""
    assert runs_in_step(items)
    stock = tuple(range(len(items) - 1, -1, -1))
    assert find_warmups(items) == stock
    assert not run_all(make_plan(tuple(map(len, items)), items=items, warmups=stock))


def test_stages_that_do_not_are_told_apart() -> None:
    job = JobSpec(tensor_parallel=1, pipeline_parallel=2, data_parallel=3, micro_batch_size=2, num_microbatches=12)
    stock, fewer, mixed = (deal_items(job, range(3), "reroute"), deal_items(job, range(2), "reroute"),
                           deal_items(job, range(2), "mix"))  # fmt: skip
    assert runs_in_step((stock, stock)) and runs_in_step((stock, deal_items(job, (0, 2), "reshape")))
    assert not runs_in_step((stock, fewer)) and not runs_in_step((stock, mixed))
    # As many items on every cell, but not of the same samples side by side.
    other = cut(24, [[1, 2, 3, 2], [2, 2, 2, 2], [3, 2, 1, 2]])
    assert runs_in_step((stock, other))
    other = cut(24, [[1, 2, 3, 2], [2, 2, 2, 2], [2, 3, 1, 2]])
    assert not runs_in_step((stock, other))


def test_an_item_is_put_together_from_what_several_cells_send_and_goes_back_to_them() -> None:
    # Three cells of two samples each feed two cells of three.
    items = (whole_micro_batches([[0], [1], [2]], 2), ((Item(0, ((0, 3),)),), (Item(1, ((3, 6),)),)))
    plan = make_plan((3, 2), items=items)
    assert Route(plan, 3).before(0) == (Piece(0, 0, 2, 0), Piece(1, 2, 3, 2))
    assert Route(plan, 4).before(0) == (Piece(1, 0, 1, 3), Piece(2, 1, 3, 4))
    assert Route(plan, 1).after(0) == (Piece(3, 0, 1, 2), Piece(4, 1, 2, 3))


def test_with_the_original_grid_routes_and_warm_up_are_megatrons() -> None:
    plan = make_plan((2, 2, 2), 8)
    assert [Route(plan, worker).warmup for worker in (0, 2, 4)] == [2, 1, 0]
    route = Route(plan, 3)
    assert [item.number for item in route.items] == [1, 3, 5, 7]
    assert [(route.before(position), route.after(position)) for position in (0, 3)] == [
        ((Piece(1, 0, 1, sample),), (Piece(5, 0, 1, sample),)) for sample in (1, 7)
    ]


def test_an_evaluation_is_dealt_round_and_the_next_step_is_the_plans_again() -> None:
    route = Route(make_plan((2, 3), 12), 3)
    assert [item.ranges for item in route.begin_evaluation(7, 2)] == [((2, 4),), ((8, 10),)]
    assert route.before(1) == (Piece(0, 0, 2, 8),)
    assert route.evaluation_items(7, 2) == route.items != route.step_items
    assert [item.number for item in route.begin_step()] == [1, 4, 7, 10]
    assert route.before(1) == (Piece(0, 0, 1, 4),)


class Links:
    """Of all workers: what was sent, in order; a receiver gets the oldest, and it has to be what it asks for."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int], deque[tuple[int, bytes]]] = defaultdict(deque)

    def of(self, worker: int) -> Any:
        links = self

        class Transport:
            def post(self, channel: int, tag: int, part: Part) -> None:
                links.sent[worker, part.peer].append((tag, bytes(part.buffer)))

            def exchange(self, channel: int, tag: int, sends: Any, receives: Sequence[Part]) -> None:
                (part,) = receives
                got, content = links.sent[part.peer, worker].popleft()
                assert got == tag, f"worker {worker} gets {got} of worker {part.peer}, and expects {tag}"
                part.buffer[:] = content

        return Transport()


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_whatever_order_a_plan_gives_every_pass_gets_its_own_samples(data: st.DataObject) -> None:
    """Also where one end of a link takes things in another order than the other end sends them in."""
    items = data.draw(all_items())
    durations, limits = data.draw(durations_of(items)), [Limit(samples=1e9)] * len(items)
    flow = Flow(items)
    schedule, _ = greedy(flow, durations, limits, [replace(data.draw(tastes), ahead=NO_MATTER) for _ in items])
    plan = replace(make_plan(tuple(map(len, items)), items=items), orders=write_orders(schedule))
    links, config = Links(), SimpleNamespace(pipeline_dtype=torch.float32)
    routes = {worker: Route(plan, worker) for worker in plan.placement.workers}
    pipes = {worker: RoutedPipeline(config, route, links.of(worker)) for worker, route in routes.items()}
    timeline = Program(schedule, flow).run(durations)
    ran = [
        (start, end, worker, action)
        for worker, route in routes.items()
        for action, start, end in timeline.cell(route.seat.stage, route.seat.cell)
    ]
    # Of passes that start at once, one that takes no time may wait for another: cells are followed as they are.
    for _, _, worker, action in sorted(ran, key=lambda each: each[:2]):
        route, pipe = routes[worker], pipes[worker]
        position = [item.number for item in route.items].index(action.item)
        ((start, stop),) = route.items[position].ranges
        samples = torch.arange(start, stop, dtype=torch.float32).view(1, -1, 1)
        if action.kind == "F":
            got = pipe.receive_input([(1, 1, 1)], position)
            assert (got is None) is (action.stage == 0) and (got is None or torch.equal(got, samples))
            pipe.send_output(samples, position)
        elif action.kind == "B":
            got = pipe.receive_gradient([(1, 1, 1)], position)
            assert (got is None) is (action.stage == len(items) - 1) and (got is None or torch.equal(got, -samples))
            pipe.send_gradient(-samples, position)
    assert not any(links.sent.values()) and not any(pipe._early for pipe in pipes.values())


def test_what_comes_too_early_is_kept_until_it_is_needed() -> None:
    items = (deal_round(3, 1, 1),) * 2
    orders = (("F0 F1 F2 B0 B1 B2",), ("F0 F1 F2 B1 B0 B2",))
    plan, links = replace(make_plan((1, 1), items=items), orders=orders), Links()
    config = SimpleNamespace(pipeline_dtype=torch.float32)
    ours, theirs = (RoutedPipeline(config, Route(plan, worker), links.of(worker)) for worker in (0, 1))
    for position in (1, 0, 2):
        theirs.send_gradient(torch.full((1, 1, 1), float(position)), position)
    got = [ours.receive_gradient([(1, 1, 1)], position) for position in range(3)]
    assert [None if gradient is None else gradient.tolist() for gradient in got] == [[[[0]]], [[[1]]], [[[2]]]]
    ours.reset()
    assert not ours._early


def test_evaluations_have_no_order() -> None:
    items = (deal_round(3, 1, 1),) * 2
    plan = replace(make_plan((1, 1), items=items), orders=(("F0 F1 F2 B0 B1 B2",),) * 2)
    route = Route(plan, 0)
    assert route.order is not None and route.coming is not None
    route.begin_evaluation(4, 1)
    assert route.order is None and route.coming is None
    route.begin_step()
    assert [str(action) for action in route.order] == ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]
