"""The stock 1F1B order, routed over stages with different numbers of cells, always ends."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

import pytest

from megatron_elas.host.pipeline import Piece, Route
from megatron_elas.planner.dataflow import DEALS, Deal, deal_items
from megatron_elas.planner.plan import share_items
from megatron_elas.schedule.one_f_one_b import one_f_one_b
from megatron_elas.spec.items import Item, StageItems, whole_micro_batches
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.layout import Cell, Placement
from megatron_elas.spec.plan import ElasticPlan

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
    warmups = [
        next(iter(schedule.forwards_first(stage, cell) - 1 for cell in range(width)))
        for schedule in (one_f_one_b(items),)
        for stage, width in enumerate(widths)
    ]
    plan = make_plan(widths, items=items, warmups=warmups)
    stuck = run_all(plan)
    assert not stuck, f"{deal} on {widths}: stuck at {stuck}"


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
