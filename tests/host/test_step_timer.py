"""What a worker says of its steps is the time of its own computing, and leaves out whatever was cut."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_elas.host.step_timer import StepTimer
from megatron_elas.planner.plan import share_items
from megatron_elas.spec.items import Item, whole_micro_batches
from megatron_elas.spec.step_report import PassTotal, StepReport
from tests.host.test_pipeline import make_plan

ITEMS = tuple(whole_micro_batches(share_items(4, cells), 3) for cells in (1, 2))
PLAN = replace(make_plan((1, 2), items=ITEMS), epoch=0)
WORKER = 2


class Clock:
    """Goes on only when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def pass_(self, seconds: float) -> None:
        self.now_s += seconds


class Loop:
    """A worker of the second stage."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.told: list[StepReport] = []
        self.timer = StepTimer(WORKER, self.told.append, self.clock)

    def run(self, step: int, epoch: int = 0, seconds: float = 1.0, *, cut: bool = False) -> None:
        self.timer.begin(epoch, step)
        self.clock.pass_(seconds)
        if not cut:
            self.timer.end(replace(PLAN, epoch=epoch), step)

    def step(self, step: int, epoch: int = 0, seconds: float = 1.0) -> None:
        self.timer.enter()
        self.run(step, epoch, seconds)
        self.timer.leave(epoch)


def test_the_parts_of_a_step_are_told_with_what_they_hold() -> None:
    loop = Loop()
    timer, clock = loop.timer, loop.clock
    loop.step(0)
    timer.enter()
    clock.pass_(0.25)  # before the host's own step, as training sees it
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
    with timer.optimizing():
        clock.pass_(0.5)
        with timer.apart():
            clock.pass_(32)
            with timer.optimizing():
                clock.pass_(0.25)
            clock.pass_(64)
        clock.pass_(0.125)
    timer.end(PLAN, 1)
    clock.pass_(1000)
    timer.leave(0)
    first, second = loop.told
    assert first.first and first.passes == () and first.optimizer_s is None
    ended_s = second.ended_s
    assert ended_s is not None and second == StepReport(
        worker=WORKER, epoch=0, step=1, first_layer=PLAN.layers[1][0], last_layer=PLAN.layers[1][1], cells=2,
        step_s=161.125, stage=1, waited_s=16, optimizer_s=0.875, ended_s=ended_s,
        passes=(
            PassTotal(kind="forward", passes=2, samples=6, seconds=6),
            PassTotal(kind="backward", passes=2, samples=6, seconds=10),
        ),
    )  # fmt: skip


def test_passes_in_two_are_told_with_their_own_samples() -> None:
    loop = Loop()
    loop.step(0)
    items = (PLAN.items[0], ((Item(0, ((0, 6),)), Item(2, ((6, 9),))), (Item(1, ((9, 12),)),)))
    plan = replace(PLAN, items=items, orders=(("",), ("F0 B0 F2 B2 W2", "F1 B1")))
    worker = plan.placement.stages[1][0].workers[0]
    timer = StepTimer(worker, loop.told.append, loop.clock)
    timer.enter()
    timer.begin(0, 1)
    for kind in ("forward", "backward", "forward", "input_gradient", "weight_gradient"):
        with timer.pass_(kind):
            loop.clock.pass_(1)
    timer.end(plan, 1)
    timer.leave(0)
    assert loop.told[-1].passes == (
        PassTotal(kind="forward", passes=2, samples=9, seconds=2),
        PassTotal(kind="backward", passes=1, samples=6, seconds=1),
        PassTotal(kind="input_gradient", passes=1, samples=3, seconds=1),
        PassTotal(kind="weight_gradient", passes=1, samples=3, seconds=1),
    )


def test_the_first_step_under_a_plan_is_marked_and_holds_no_recovery() -> None:
    loop = Loop()
    loop.step(0)
    loop.step(1)
    loop.timer.enter()
    loop.run(2, cut=True)
    loop.clock.pass_(100)
    loop.run(2, epoch=1)
    loop.timer.leave(1)
    loop.step(3, epoch=1)
    assert [(r.epoch, r.step, r.step_s, r.first, r.again) for r in loop.told] == [
        (0, 0, 1, True, False), (0, 1, 1, False, False), (1, 2, 1, True, True), (1, 3, 1, False, False),
    ]  # fmt: skip


def test_of_steps_that_are_run_again_within_one_of_the_loop_the_last_is_told_with_its_own_time() -> None:
    loop = Loop()
    loop.step(0)
    loop.step(1)
    loop.timer.enter()
    loop.clock.pass_(100)
    loop.run(1, epoch=1)
    loop.run(2, epoch=1, seconds=2)
    loop.timer.leave(1)
    assert [(r.step, r.step_s, r.first, r.again) for r in loop.told[2:]] == [(2, 2, False, False)]


def test_a_step_that_has_run_before_is_marked_in_a_later_step_of_the_loop_too() -> None:
    loop = Loop()
    for step in (4, 5, 3, 4, 5, 6):
        loop.step(step)
    assert [report.again for report in loop.told] == [False, False, True, True, True, False]


def test_a_step_that_was_cut_or_followed_by_a_recovery_is_not_told() -> None:
    loop = Loop()
    loop.step(0)
    loop.timer.enter()
    loop.run(1, cut=True)  # and the others finished it
    loop.timer.leave(1)
    loop.timer.enter()
    loop.run(2)
    loop.clock.pass_(100)
    loop.timer.leave(1)
    loop.timer.enter()  # another worker ran the step while this one had no seat
    loop.timer.leave(1)
    assert [report.step for report in loop.told] == [0]


def test_passes_that_are_cut_short_or_belong_to_an_evaluation_are_not_counted() -> None:
    loop = Loop()
    with pytest.raises(RuntimeError), loop.timer.pass_("forward"):
        raise RuntimeError
    with loop.timer.pass_("forward"):
        loop.clock.pass_(7)
    loop.step(0)
    assert loop.told[0].passes == ()
