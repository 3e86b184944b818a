"""Keeps what a worker did in its newest steps, with its times, and tells the steps that matter.

These are the last two finished ones before the worker runs under another plan (workers may be one step apart when the
membership ends); the first one under a plan that nothing disturbs, which is the second that it runs; one LATER steps
after that; and those that were asked for. A step that was cut is not told.

Collecting costs an append per pass: the step's timer has looked at the clock already.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from typing import NamedTuple

from megatron_elas.spec.items import CellItems
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.step_report import PASSES, StepReport
from megatron_elas.spec.step_trace import MOST_SPANS, Span, StepTrace, traces_steps

LATER = 5
"""Steps."""
KEPT = 2
"""Finished steps."""


class _Done(NamedTuple):
    """Something that was done."""

    kind: str
    start_s: float
    end_s: float
    apart_s: float


class _Part(NamedTuple):
    """What the worker is of its plan."""

    epoch: int
    cell: int
    items: CellItems
    order: tuple[str, ...]
    """Of its passes, as in ``ElasticPlan.orders``; empty: by kind, the items in order."""


class _Finished(NamedTuple):
    """A step."""

    report: StepReport
    part: _Part
    began_s: float
    """On the clock of ``done``."""
    began_at_s: float
    """``time.time()`` then."""
    done: tuple[_Done, ...]
    left_out: int


class StepTracer:
    """Of one worker; called by its StepTimer, on its main thread."""

    def __init__(
        self,
        worker: int,
        tell: Callable[[StepTrace], None],
        asked: Collection[int] = (),
        now: Callable[[], float] = time.time,
    ) -> None:
        """Nothing is under way.

        Args:
            worker: Its id.
            tell: Takes the trace of every step that matters.
            asked: Steps that are told besides.
            now: Gives the time of day, in seconds.
        """
        self._worker = worker
        self._tell = tell
        self._asked = asked
        self._now = now
        self._part: _Part | None = None
        """Of the newest plan that a step was finished under; None as well where the worker tells nothing."""
        self._epoch: int | None = None
        self._steps = 0
        """Finished under that plan."""
        self._kept: deque[_Finished] = deque(maxlen=KEPT)
        """Of that plan."""
        self._told: deque[tuple[int, int]] = deque(maxlen=2 * KEPT)
        """(epoch, step) of the newest ones."""
        self._running = False
        self._clear(0.0)

    def _clear(self, began_s: float) -> None:
        self._began_s = began_s
        self._done: list[_Done] = []
        self._left_out = 0
        self._doing: tuple[str, float] | None = None

    # ------------------------------------------------------------ the step

    def begin(self, epoch: int, began_s: float, now_s: float) -> None:
        """A run of a step begins.

        Args:
            epoch: Of its plan. With another than before, the newest steps of the one before are told.
            began_s: When the step began, on the timer's clock.
            now_s: What that clock shows now.
        """
        if self._epoch is not None and epoch != self._epoch:
            for finished in self._kept:
                self._tell_once(finished)
            self._kept.clear()
        self._clear(began_s)
        self._began_at_s = self._now() - (now_s - began_s)
        self._running = True

    def add(self, kind: str, start_s: float, end_s: float, apart_s: float) -> None:
        """A pass or a wait has ended."""
        if not self._running:  # of an evaluation
            return
        if len(self._done) < MOST_SPANS:
            self._done.append(_Done(kind, start_s, end_s, apart_s))
        else:
            self._left_out += 1

    def turn(self, kind: str | None, now_s: float) -> str | None:
        """The worker turns to something that is neither: exchange, optimizer, or None of that. Gives what it did."""
        before = self._doing
        if before is not None:
            self.add(before[0], before[1], now_s, 0.0)
        self._doing = None if kind is None else (kind, now_s)
        return None if before is None else before[0]

    @property
    def busy(self) -> bool:
        """Whether it is in an exchange or in the optimizer."""
        return self._doing is not None

    def end(self, plan: ElasticPlan, report: StepReport) -> None:
        """The run has ended, and counts."""
        self._running = False
        if plan.epoch != self._epoch:
            self._epoch, self._steps = plan.epoch, 0
            self._part = _find_part(plan, self._worker)
        self._steps += 1
        if self._part is None:
            return
        finished = _Finished(report, self._part, self._began_s, self._began_at_s, tuple(self._done), self._left_out)
        self._kept.append(finished)
        if self._steps in (2, 2 + LATER) or report.step in self._asked:
            self._tell_once(finished)

    def _tell_once(self, finished: _Finished) -> None:
        key = finished.report.epoch, finished.report.step
        if key not in self._told:
            self._told.append(key)
            self._tell(_make_trace(finished))


def _find_part(plan: ElasticPlan, worker: int) -> _Part | None:
    if not traces_steps(plan, worker):
        return None
    seat = plan.placement.seat(worker)
    order = tuple(plan.orders[seat.stage][seat.cell].split()) if plan.orders else ()
    return _Part(plan.epoch, seat.cell, plan.items_of(worker), order)


def _make_trace(finished: _Finished) -> StepTrace:
    report, part = finished.report, finished.part
    assert report.stage is not None
    samples = {item.number: item.samples for item in part.items}
    counts: dict[str, int] = defaultdict(int)
    passes = 0
    spans = []
    for done in sorted(finished.done, key=lambda done: done.start_s):
        item = None
        if done.kind in PASSES:
            item = _find_item(part, done.kind, passes, counts[done.kind])
            counts[done.kind] += 1
            passes += 1
        spans.append(
            Span(
                kind=done.kind,
                start_s=round(done.start_s - finished.began_s, 7),
                end_s=round(done.end_s - finished.began_s, 7),
                item=item,
                samples=0 if item is None else samples[item],
                apart_s=round(done.apart_s, 7),
            )
        )
    return StepTrace(
        worker=report.worker,
        epoch=report.epoch,
        step=report.step,
        stage=report.stage,
        cell=part.cell,
        first_layer=report.first_layer,
        last_layer=report.last_layer,
        began_s=finished.began_at_s,
        step_s=report.step_s,
        spans=tuple(spans),
        left_out=finished.left_out,
        first=report.first,
    )


def _find_item(part: _Part, kind: str, passes: int, of_kind: int) -> int | None:
    """The item of a pass.

    Args:
        part: Of the plan.
        kind: Of the pass.
        passes: So many came before in the step.
        of_kind: So many of the same kind.
    """
    if part.order:
        return int(part.order[passes][1:]) if passes < len(part.order) else None
    return part.items[of_kind].number if of_kind < len(part.items) else None
