"""The stock 1F1B order, routed over stages with different numbers of cells, always ends."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator

import pytest

from megatron_elas.host.pipeline import Route
from megatron_elas.planner.plan import share_items
from megatron_elas.spec.layout import Cell, Placement
from megatron_elas.spec.plan import ElasticPlan

NUM_ITEMS = 12


def make_plan(sizes: tuple[int, ...], num_items: int = NUM_ITEMS) -> ElasticPlan:
    """Stages of these many cells, one worker each."""
    numbers = itertools.count()
    stages = tuple(tuple(Cell(row=row, workers=(next(numbers),)) for row in range(size)) for size in sizes)
    items = tuple(share_items(num_items, size) for size in sizes)
    layers = tuple((stage, stage + 1) for stage in range(len(sizes)))
    return ElasticPlan(epoch=1, placement=Placement(stages=stages), layers=layers, items=items, backups=())


Operation = tuple[str, int, int]
"""("send" or "receive", peer, tag), or ("gather", stage, 0): a collective of the stage's cells."""


def operations(plan: ElasticPlan, worker: int) -> Iterator[Operation]:
    """What Megatron's 1F1B schedule does on a worker, in order, with a lazy parameter gather at first."""
    route = Route(plan, worker)
    stage, items = route.seat.stage, route.items
    last = plan.placement.num_stages - 1
    warmup = min(route.warmup, len(items))

    def forward(item: int) -> Iterator[Operation]:
        if stage > 0:
            yield "receive", route.host_of(stage - 1, item), 2 * item
        if item == items[0]:
            yield "gather", stage, 0
        if stage < last:
            yield "send", route.host_of(stage + 1, item), 2 * item

    def backward(item: int) -> Iterator[Operation]:
        if stage < last:
            yield "receive", route.host_of(stage + 1, item), 2 * item + 1
        if stage > 0:
            yield "send", route.host_of(stage - 1, item), 2 * item + 1

    for item in items[:warmup]:
        yield from forward(item)
    for ahead, behind in zip(items[warmup:], items, strict=False):
        yield from forward(ahead)
        yield from backward(behind)
    for item in items[len(items) - warmup :]:
        yield from backward(item)


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


def test_with_the_original_grid_routes_and_warm_up_are_megatrons() -> None:
    plan = make_plan((2, 2, 2), 8)
    assert [Route(plan, worker).warmup for worker in (0, 2, 4)] == [2, 1, 0]
    assert Route(plan, 3).items == (1, 3, 5, 7)
    assert {Route(plan, 3).host_of(stage, 5) for stage in (0, 2)} == {1, 5}


def test_a_pass_with_another_number_of_micro_batches_is_dealt_round_and_the_next_one_is_the_plans_again() -> None:
    route = Route(make_plan((2, 3), 12), 3)
    assert route.begin(7) == (1, 4)
    assert route.host_of(0, 5) == 1
    assert route.begin(12) == (1, 4, 7, 10)
