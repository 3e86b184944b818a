"""Every micro-batch weighs the same, whichever cells run it, in whatever company."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_elas.host.pipeline import Route, RoutedPipeline
from megatron_elas.host.schedule import PassCounter, Weights, route_schedule
from megatron_elas.planner.plan import share_items
from megatron_elas.schedule.items import cut
from megatron_elas.spec.items import micro_batch, whole_micro_batches
from megatron_elas.spec.plan import ElasticPlan
from tests.host.test_pipeline import make_plan

SEQUENCE = 4
SIZE = 2
"""Samples of a micro-batch."""
MICRO_BATCHES = 12
COUNTS = torch.randint(0, 2, (MICRO_BATCHES * SIZE, SEQUENCE), generator=torch.Generator().manual_seed(3)).double()
"""Which tokens count; no two micro-batches need to have as many."""
LOSSES = torch.rand((MICRO_BATCHES * SIZE, SEQUENCE), generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def stock_schedule(*, forward_step_func: Any, num_microbatches: int, forward_only: bool = False, **more: Any) -> Any:
    """Divides every loss by its tokens, as Megatron does, and by the micro-batches of the batch, as it is told to."""
    total = 0.0
    for _ in range(num_microbatches):
        output, loss_function = forward_step_func("data", "model")
        loss, tokens, _ = loss_function(output)
        total += float(loss / tokens.clamp(min=1)) / (num_microbatches if forward_only else MICRO_BATCHES)
    return total


def run(plan: Any, worker: int, counts: torch.Tensor = COUNTS, **more: Any) -> float:
    """The worker's loss of a step."""
    route = Route(plan, worker)
    pipeline = RoutedPipeline(None, route, None)  # type: ignore[arg-type]
    counter = PassCounter(lambda *place: None)
    position = itertools.count()
    sizes = []

    @contextlib.contextmanager
    def sized(samples: int) -> Iterator[None]:
        sizes.append(samples)
        yield

    def forward_step(data: Any, model: Any) -> tuple[Any, Any]:
        ((start, stop),) = route.items[next(position)].ranges
        assert sizes[-1] == stop - start
        mask = counts[start:stop]
        return LOSSES[start:stop], lambda output: ((output * mask).sum(), mask.sum(), "report")

    def count_tokens(number: int) -> int:
        return int(counts[number * SIZE : (number + 1) * SIZE].sum())

    schedule = route_schedule(
        stock_schedule, route, pipeline, counter, num_rows=2,
        weights=Weights(micro_batch_size=SIZE, count_tokens=count_tokens),
        sized=sized, keep_losses=lambda losses: None,
    )  # fmt: skip
    return schedule(forward_step_func=forward_step, num_microbatches=6, micro_batch_size=SIZE, **more)


def want(counts: torch.Tensor = COUNTS) -> float:
    """The mean over micro-batches of their means over tokens that count."""
    sums = (LOSSES * counts).view(MICRO_BATCHES, -1).sum(dim=1)
    return float((sums / counts.view(MICRO_BATCHES, -1).sum(dim=1).clamp(min=1)).mean())


def whole(cells: int) -> ElasticPlan:
    return make_plan((cells,), items=(whole_micro_batches(share_items(MICRO_BATCHES, cells), SIZE),))


@pytest.mark.parametrize("cells", [1, 2, 3, 5, 12])
def test_every_micro_batch_weighs_the_same_whichever_cell_runs_it(cells: int) -> None:
    plan = whole(cells)
    assert sum(run(plan, worker) for worker in range(cells)) == pytest.approx(want(), rel=1e-12)


@pytest.mark.parametrize("sizes", [[[3] * 8], [[3] * 4, [1] * 12], [[5, 5], [7], [4, 3]], [[1] * 24], [[24]]])
def test_items_that_cut_micro_batches_or_join_them_weigh_their_samples_as_whole_ones_do(sizes: list[list[int]]) -> None:
    plan = make_plan((len(sizes),), items=(cut(MICRO_BATCHES * SIZE, sizes),))
    assert sum(run(plan, worker) for worker in range(len(sizes))) == pytest.approx(want(), rel=1e-12)


def test_a_micro_batch_of_which_no_token_counts_weighs_nothing() -> None:
    counts = COUNTS.clone()
    counts[2 * SIZE : 3 * SIZE] = 0
    plan = make_plan((2,), items=(cut(MICRO_BATCHES * SIZE, [[5, 7], [5, 7]]),))
    assert sum(run(plan, worker, counts) for worker in range(2)) == pytest.approx(want(counts), rel=1e-12)


def test_a_whole_micro_batchs_loss_is_left_as_it_is() -> None:
    weights = Weights(micro_batch_size=SIZE, count_tokens=lambda number: SEQUENCE * SIZE)

    def loss_function(output: torch.Tensor) -> tuple[torch.Tensor, str]:
        return output.mean(), "report"

    assert weights.apply(loss_function, micro_batch(3, SIZE)) is loss_function


def test_an_evaluation_is_not_weighed() -> None:
    total = run(whole(3), 0, forward_only=True)
    own = [float((LOSSES * COUNTS)[2 * g : 2 * g + 2].sum() / COUNTS[2 * g : 2 * g + 2].sum()) for g in range(0, 12, 3)]
    assert total == pytest.approx(sum(own) / len(own), rel=1e-12)


def test_passes_of_steps_and_evaluations_are_counted_for_fault_scripts_and_others_are_not() -> None:
    places: list[tuple[int, str, int | None]] = []
    counter = PassCounter(lambda *place: places.append(place))
    counter.forward()
    counter.begin(4)
    counter.forward()
    counter.backward()
    counter.forward()
    counter.begin_evaluation(4)
    counter.forward_only()
    counter.forward_only()
    counter.begin(-1)
    counter.backward()
    counter.forward_only()
    assert places == [
        (4, "forward", 0), (4, "backward", 0), (4, "forward", 1), (4, "evaluate", 0), (4, "evaluate", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("sizes", [[[3] * 8], [[3] * 4, [1] * 12], [[2] * 12]])
def test_a_loss_function_that_gives_a_mean_alone_weighs_its_item_by_samples(sizes: list[list[int]]) -> None:
    weights = Weights(micro_batch_size=SIZE, count_tokens=lambda number: SEQUENCE * SIZE)
    total = 0.0
    for own in cut(MICRO_BATCHES * SIZE, sizes):
        for item in own:
            ((start, stop),) = item.ranges
            weighed = weights.apply(lambda output: (output.mean(), "report"), item)
            loss, report = weighed(LOSSES[start:stop])
            assert report == "report"
            total += float(loss) / MICRO_BATCHES  # as Megatron does
    assert total == pytest.approx(float(LOSSES.mean()), rel=1e-12)
