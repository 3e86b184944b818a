"""The steps that matter are told, with every pass at its time, and each once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise

import pytest

from megatron_elas.host.step_timer import StepTimer
from megatron_elas.host.step_tracer import LATER, StepTracer
from megatron_elas.planner.plan import share_items
from megatron_elas.spec.items import whole_micro_batches
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.step_trace import MOST_SPANS, Span, StepTrace
from tests.host.test_pipeline import make_plan
from tests.host.test_step_timer import Clock

ITEMS = tuple(whole_micro_batches(share_items(4, cells), 3) for cells in (1, 2))
PLAN = replace(make_plan((1, 2), items=ITEMS), epoch=0)
WORKER = 2
"""The second cell of the second stage: items 1 and 3."""
DAY_S = 1e9
"""The time of day when the clock shows 0."""


class Loop:
    """A worker of the second stage that runs its passes in each step."""

    def __init__(self, asked: Collection[int] = (), plan: ElasticPlan = PLAN) -> None:
        self.clock = Clock()
        self.told: list[StepTrace] = []
        self.plan = plan
        tracer = StepTracer(WORKER, self.told.append, asked, lambda: DAY_S + self.clock())
        self.timer = StepTimer(WORKER, lambda report: None, self.clock, tracer)

    def step(self, step: int, epoch: int = 0, *, cut: bool = False, passes: int = 2) -> None:
        self.timer.enter()
        self.timer.begin(epoch, step)
        for _ in range(passes):
            with self.timer.waiting():
                self.clock.pass_(8)
            for kind in ("forward", "backward"):
                with self.timer.pass_(kind):
                    self.clock.pass_(2)
        if not cut:
            self.timer.end(replace(self.plan, epoch=epoch), step)
        self.timer.leave(epoch)

    @property
    def steps(self) -> list[tuple[int, int]]:
        return [(trace.epoch, trace.step) for trace in self.told]


def test_everything_in_a_step_is_at_its_time_and_nothing_overlaps() -> None:
    loop = Loop(asked={1})
    loop.step(0)
    timer, clock = loop.timer, loop.clock
    timer.enter()
    clock.pass_(0.25)
    began_s = clock()
    timer.begin(0, 1)
    for _ in range(2):
        with timer.waiting():
            clock.pass_(8)
        with timer.pass_("forward"):
            clock.pass_(1)
            with timer.apart():
                clock.pass_(16)
            clock.pass_(2)
        with timer.pass_("backward"):
            clock.pass_(5)
    with timer.exchanging():
        clock.pass_(3)
    with timer.optimizing():
        clock.pass_(0.5)
        with timer.apart():
            clock.pass_(32)
            with timer.optimizing():
                clock.pass_(0.25)
            clock.pass_(64)
        clock.pass_(0.125)
    timer.end(PLAN, 1)
    timer.leave(0)
    (trace,) = loop.told
    assert (trace.worker, trace.epoch, trace.step, trace.stage, trace.cell) == (WORKER, 0, 1, 1, 1)
    assert (trace.first_layer, trace.last_layer) == PLAN.layers[1]
    assert trace.began_s == DAY_S + began_s - 0.25, "as training sees it"
    told = [(span.kind, span.item, span.samples, span.end_s - span.start_s, span.apart_s) for span in trace.spans]
    assert told == [
        ("wait", None, 0, 8, 0), ("forward", 1, 3, 19, 16), ("backward", 1, 3, 5, 0),
        ("wait", None, 0, 8, 0), ("forward", 3, 3, 19, 16), ("backward", 3, 3, 5, 0),
        ("exchange", None, 0, 3, 0),
        ("optimizer", None, 0, 0.5, 0), ("exchange", None, 0, 32, 0), ("optimizer", None, 0, 0.25, 0),
        ("exchange", None, 0, 64, 0), ("optimizer", None, 0, 0.125, 0),
    ]  # fmt: skip
    assert trace.spans[0].start_s == 0.25 and trace.spans[-1].end_s == trace.step_s == trace.end_s
    assert all(before.end_s == after.start_s for before, after in pairwise(trace.spans))


def test_without_events_the_second_step_is_told_and_one_a_little_later() -> None:
    loop = Loop()
    for step in range(30):
        loop.step(step)
    assert loop.steps == [(0, 1), (0, 1 + LATER)]
    assert not any(trace.first for trace in loop.told)


def test_around_a_loss_the_newest_steps_are_told_and_the_first_one_undisturbed() -> None:
    loop = Loop()
    for step in range(20):
        loop.step(step)
    loop.step(20, cut=True)
    for step in range(20, 40):
        loop.step(step, epoch=1)
    assert loop.steps[2:] == [(0, 18), (0, 19), (1, 21), (1, 21 + LATER)]


def test_what_was_told_or_asked_for_is_told_once() -> None:
    loop = Loop(asked={0, 1, 3})
    for step in range(3):
        loop.step(step)
    for step in range(3, 6):
        loop.step(step, epoch=1)
    for step in range(6, 8):
        loop.step(step, epoch=2)
    assert loop.steps == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (1, 5), (2, 7)]
    assert [trace.first for trace in loop.told] == [True, False, False, True, False, False, False]


def test_nothing_of_a_cut_step_or_an_evaluation_is_in_a_trace() -> None:
    loop = Loop()
    loop.step(0)
    with pytest.raises(RuntimeError), loop.timer.optimizing():
        raise RuntimeError
    loop.step(1, cut=True)
    with loop.timer.pass_("forward"):
        loop.clock.pass_(7)
    loop.step(1)
    with loop.timer.pass_("forward"):
        loop.clock.pass_(7)
    (trace,) = loop.told
    assert [span.kind for span in trace.spans] == ["wait", "forward", "backward"] * 2


def test_an_order_of_passes_says_which_items_they_are_of() -> None:
    order = "F1 F3 B3 B1 W1 W3"
    plan = replace(PLAN, orders=((" ".join(f"F{g} B{g}" for g in range(4)),), ("F0 B0 F2 B2", order)))
    loop = Loop(asked={0}, plan=plan)
    timer = loop.timer
    timer.enter()
    timer.begin(0, 0)
    for kind in ("forward", "input_gradient", "weight_gradient"):
        for _ in range(2):
            with timer.pass_(kind):
                loop.clock.pass_(1)
    timer.end(plan, 0)
    assert [span.item for span in loop.told[0].spans] == [1, 3, 3, 1, 1, 3]


def test_a_step_of_very_many_passes_is_told_in_part() -> None:
    loop = Loop(asked={0})
    loop.step(0, passes=1000)
    (trace,) = loop.told
    assert len(trace.spans) == MOST_SPANS and trace.left_out == 3000 - MOST_SPANS
    assert trace.spans[0] == Span(kind="wait", start_s=0, end_s=8)


def test_a_worker_that_is_not_the_first_lane_tells_nothing() -> None:
    cells = tuple(tuple(replace(cell, workers=(10 + i, 20 + i)) for i, cell in enumerate(stage))
                  for stage in PLAN.placement.stages)  # fmt: skip
    plan = replace(PLAN, placement=replace(PLAN.placement, stages=cells))
    for worker, steps in ((10, [1]), (20, [])):
        told: list[StepTrace] = []
        clock = Clock()
        timer = StepTimer(worker, lambda report: None, clock, StepTracer(worker, told.append))
        for step in range(3):
            timer.enter()
            timer.begin(0, step)
            clock.pass_(1)
            timer.end(plan, step)
            timer.leave(0)
        assert [trace.step for trace in told] == steps
