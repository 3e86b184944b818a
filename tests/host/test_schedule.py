"""Every micro-batch weighs the same, whichever cell runs it."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from megatron_elas.host.pipeline import Route, RoutedPipeline
from megatron_elas.host.schedule import PassCounter, route_schedule
from tests.host.test_pipeline import make_plan


def stock_schedule(*, forward_step_func: Any, num_microbatches: int, forward_only: bool = False, **more: Any) -> Any:
    """Divides every loss by the number of micro-batches of its own rank, as Megatron's schedules do."""
    total = Fraction(0)
    for _ in range(num_microbatches):
        output, loss_function = forward_step_func("data", "model")
        total += loss_function(output)[0] / num_microbatches
    return total


def forward_step(data: Any, model: Any) -> tuple[Any, Any]:
    return Fraction(1), lambda output: (output, "tokens", "report")


def run(plan: Any, worker: int, **more: Any) -> Fraction:
    route = Route(plan, worker)
    pipeline = RoutedPipeline(None, route, None)  # type: ignore[arg-type]
    counter = PassCounter(lambda *place: None)
    schedule = route_schedule(
        stock_schedule, route, pipeline, counter, num_rows=2, per_token_loss=False, keep_losses=lambda losses: None
    )
    return schedule(forward_step_func=forward_step, num_microbatches=6, **more)


@pytest.mark.parametrize("cells", [1, 2, 3, 5, 12])
def test_the_weights_of_a_stage_add_up_to_one_and_are_equal_per_micro_batch(cells: int) -> None:
    plan = make_plan((cells,), 12)
    sums = [run(plan, worker) for worker in range(cells)]
    assert sum(sums) == pytest.approx(1, abs=1e-12)
    for worker, total in enumerate(sums):
        assert total == pytest.approx(len(plan.items[0][worker]) / 12, abs=1e-12)


def test_an_evaluation_is_not_weighed() -> None:
    assert run(make_plan((3,), 12), 0, forward_only=True) == 1


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
