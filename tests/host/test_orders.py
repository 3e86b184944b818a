"""Jobs that run their passes in the orders of a plan train to the bit as with the stock schedule, or unsplit.

What is compared runs the same items in the same order: where every cell's backward passes come in the order of its
items, the stock schedule; otherwise the same orders with every weight gradient in its backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_elas.spec.plan import ElasticPlan
from tests.host.restage_jobs import UNTIED, Worker, losses, make_plan, run_job, states
from tests.host.test_restage import find_stale
from tests.schedule.plan_orders import Kind, make_orders, without_split

pytestmark = pytest.mark.process

STEPS, CHANGE_AT = 4, 1
PP1, PP2, PP4 = (f"--pipeline-model-parallel-size={depth}" for depth in (1, 2, 4))
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
RECOMPUTE = ("--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1")
HALVES = [(0, 2), (2, 4)]
TWO_BY_TWO = make_plan(1, [[[0], [1]], [[2], [3]]], HALVES)
FOUR = make_plan(1, [[[0]], [[1]], [[2]], [[3]]], [(0, 1), (1, 2), (2, 3), (3, 4)])
ALONE = make_plan(1, [[[0], [1]]], [(0, 4)])
UNEVEN = make_plan(1, [[[0], [1]], [[2]]], [(0, 3), (3, 4)])
LANES = make_plan(1, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], HALVES)


_added: list[int] = []
"""Of this worker: sizes of the weights whose gradients were put off, as they were added."""


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> Iterator[None]:
    """Imported before workers are forked, because it takes seconds. They count what they put off."""
    import megatron.training  # noqa: F401

    from megatron_elas.host.split_backward import Deferred

    original = Deferred._add

    def count(item: Deferred, parameter: Any, gradient: Any) -> None:
        _added.append(parameter.numel())
        original(item, parameter, gradient)

    with mock.patch.object(Deferred, "_add", count):
        yield


def look(attached: Any) -> dict[str, Any]:
    """What the last step was, and what it left."""
    from megatron_elas.host import split_backward

    report = attached.timer._make_report(attached.route.plan, STEPS - 1)
    return {
        "passes": {total.kind: (total.passes, total.samples) for total in report.passes},
        "deferred": split_backward.deferred(),
        "added": len(_added),
        "stale": {name: found for name, found in find_stale(attached).items() if found},
    }


def count_deferred(plan: ElasticPlan, worker: int) -> dict[str, tuple[int, int]]:
    """Passes and samples of every kind that the worker runs."""
    seat, items = plan.placement.seat(worker), plan.items_of(worker)
    split = {word[1:] for word in plan.orders[seat.stage][seat.cell].split() if word[0] == "W"}
    put_off = [item for item in items if str(item.number) in split]
    rest = [item for item in items if str(item.number) not in split]
    kinds = {"forward": list(items), "backward": rest, "input_gradient": put_off, "weight_gradient": put_off}
    return {kind: (len(own), sum(item.samples for item in own)) for kind, own in kinds.items() if own}


def assert_equal(run: Sequence[Worker], calm: Sequence[Worker]) -> None:
    """Losses as printed, weights and moments to the last bit."""
    assert losses(run) == losses(calm) and len(losses(calm)) == STEPS
    ours, theirs = states(run), states(calm)
    assert ours.keys() == theirs.keys()
    assert [key for key in theirs if not bool((ours[key] == theirs[key]).all())] == []


def check(
    folder: Path, flags: Sequence[str], workers: int, base: ElasticPlan, kind: Kind, *, stock: bool
) -> list[Worker]:
    """Train by orders of that kind, and as said above."""
    orders = make_orders(base.items, kind)
    plan = replace(base, orders=orders)
    unsplit: Mapping[int, ElasticPlan] = {CHANGE_AT: base if stock else replace(base, orders=without_split(orders))}
    calm = run_job(folder / "calm", flags, workers, unsplit, steps=STEPS)
    run = run_job(folder / "run", flags, workers, {CHANGE_AT: plan}, steps=STEPS, look=look)
    assert_equal(run, calm)
    for worker in plan.placement.workers:
        found = run[worker].found
        assert found["passes"] == count_deferred(plan, worker)
        assert found["deferred"] is None and found["stale"] == {}
        # Query, key and value; projection; two of the MLP; and the output layer.
        (first, last), seat = plan.layers_of(worker), plan.placement.seat(worker)
        has_head = seat.stage == plan.placement.num_stages - 1 and (UNTIED in flags or seat.stage > 0)
        split = found["passes"].get("weight_gradient", (0, 0))[0]
        assert found["added"] == (STEPS - CHANGE_AT) * split * (4 * (last - first) + has_head)
    return run


def test_a_split_pass_of_one_stage_has_the_bits_of_the_stock_schedule(tmp_path: Path) -> None:
    check(tmp_path, (PP1, UNTIED, *OVERLAP), 2, ALONE, "late", stock=True)


CASES = [
    pytest.param((PP2, UNTIED), 4, TWO_BY_TWO, "whole", False, id="2x2-whole"),
    pytest.param((PP2, UNTIED), 4, TWO_BY_TWO, "late", False, id="2x2-late"),
    pytest.param((PP2, UNTIED, *OVERLAP, "--bf16"), 4, TWO_BY_TWO, "split", False, id="2x2-overlap-bf16"),
    pytest.param((PP2, *OVERLAP, "--no-align-grad-reduce"), 4, TWO_BY_TWO, "split", False, id="2x2-tied-not-aligned"),
    pytest.param((PP1, *OVERLAP), 2, ALONE, "late", True, id="1x2-tied"),
    pytest.param((PP4, UNTIED), 4, FOUR, "split", True, id="4x1-split"),
    pytest.param((PP4, UNTIED, *RECOMPUTE), 4, FOUR, "split", True, id="4x1-recompute"),
    pytest.param((PP2, UNTIED, *OVERLAP), 4, UNEVEN, "split", False, id="2-and-1-split"),
    pytest.param((PP2, UNTIED, "--calculate-per-token-loss"), 4, UNEVEN, "late", False, id="2-and-1-per-token"),
    pytest.param(
        (PP2, UNTIED, "--tensor-model-parallel-size=2", "--sequence-parallel", "--bf16", *OVERLAP), 8, LANES, "split",
        False, id="tp2-sp-bf16",
    ),
    pytest.param(
        (PP2, "--tensor-model-parallel-size=2", "--add-qkv-bias", "--qk-layernorm", "--normalization=LayerNorm"), 8,
        LANES, "split", False, id="tp2-biases",
    ),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "workers", "base", "kind", "stock"), CASES)
def test_orders_train_with_the_bits_of_passes_in_one(
    flags: tuple[str, ...], workers: int, base: ElasticPlan, kind: Kind, stock: bool, tmp_path: Path
) -> None:
    check(tmp_path, flags, workers, base, kind, stock=stock)
