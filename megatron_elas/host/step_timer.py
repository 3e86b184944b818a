"""Takes the time of a worker's passes, of its optimizer and of whole steps, for the planner.

Where the plan splits backward passes, there are two kinds in their place: gradients of inputs, and those of weights.

A pass is one item through this worker's layers: forward from when its input is here to its output (on the last
stage, to its loss), backward from when the gradient of that output is here to the gradient of the input. Reading a
item's samples, and what the workers of a cell say to each other in a pass, are parts of it. Waiting for other
stages is not, nor is waiting for parameters that are gathered over the stage's cells.

Of the optimizer its own computing counts: gradients to fp32, clipping, the update, masters to parameters. The norm, the
exchange with backups and the gather do not.

Times are of the wall clock and nothing is synchronised for them, so they hold for CPUs. An accelerator is given its
work and does it later, and would have to be asked with events on its streams.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_elas.host.step_tracer import StepTracer
from megatron_elas.schedule.orders import split_items
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.step_report import PASSES, PassTotal, StepReport


@dataclass(slots=True)
class _Total:
    count: int = 0
    seconds: float = 0.0


class StepTimer:
    """Of one worker; called on its main thread.

    A training loop's step is ``enter``, one or several runs of a step (``begin`` to ``end``; a run that is cut short
    has no end), and ``leave``, which tells the times of the last run. Passes outside of a run, such as an evaluation's,
    are forgotten.
    """

    def __init__(
        self,
        worker: int,
        tell: Callable[[StepReport], None],
        clock: Callable[[], float] = time.perf_counter,
        tracer: StepTracer | None = None,
    ) -> None:
        """Nothing is under way.

        Args:
            worker: Its id.
            tell: Takes the report of every finished step.
            clock: Gives seconds; never goes back.
            tracer: Told of everything with its times; None: nobody wants to know.
        """
        self._tracer = tracer
        self._worker = worker
        self._tell = tell
        self._clock = clock
        self._entered_s = 0.0
        self._runs = 0
        """Of steps, since ``enter``."""
        self._report: StepReport | None = None
        """Of the last run since ``enter``, if it was not cut short."""
        self._began_s = 0.0
        self._first = self._again = False
        self._epoch: int | None = None
        """Of the last run that was not cut short."""
        self._newest = -1
        """The highest step that has begun here."""
        self._reset()

    def _reset(self) -> None:
        self._passes = {kind: _Total() for kind in PASSES}
        self._waited = _Total()
        self._optimized = _Total()
        self._apart_s = 0.0

    # ------------------------------------------------------------ the step

    def enter(self) -> None:
        """The training loop comes to a step."""
        self._entered_s = self._clock()
        self._runs = 0
        self._report = None

    def begin(self, epoch: int, step: int) -> None:
        """A run of a step begins, under the plan of this epoch."""
        self._reset()
        self._report = None
        self._first, self._again = epoch != self._epoch, step <= self._newest
        self._newest = max(self._newest, step)
        self._runs += 1
        # Before any other run is the recovery that it came of, or another step.
        now_s = self._clock()
        self._began_s = now_s if self._runs > 1 or self._first else self._entered_s
        if self._tracer is not None:
            self._tracer.begin(epoch, self._began_s, now_s)

    def end(self, plan: ElasticPlan, step: int) -> None:
        """That run has ended. Where the clock shows no time between its ends, there is no report of it."""
        self._epoch = plan.epoch
        with contextlib.suppress(BadUsage):
            self._report = self._make_report(plan, step)
            if self._tracer is not None:
                self._tracer.end(plan, self._report)

    def _make_report(self, plan: ElasticPlan, step: int) -> StepReport:
        stage = plan.placement.seat(self._worker).stage
        first_layer, last_layer = plan.layers[stage]
        samples = _samples_by_kind(plan, self._worker)
        return StepReport(
            worker=self._worker,
            epoch=plan.epoch,
            step=step,
            first_layer=first_layer,
            last_layer=last_layer,
            cells=len(plan.placement.stages[stage]),
            step_s=self._clock() - self._began_s,
            passes=tuple(
                PassTotal(kind=kind, passes=total.count, samples=samples[kind], seconds=total.seconds)
                for kind, total in self._passes.items()
                if total.count
            ),
            optimizer_s=self._optimized.seconds if self._optimized.count else None,
            waited_s=self._waited.seconds,
            ended_s=time.time(),
            stage=stage,
            first=self._first,
            again=self._again,
        )

    def leave(self, epoch: int) -> None:
        """The training loop goes on; the epoch is what it is now."""
        report, self._report = self._report, None
        if report is not None and report.epoch == epoch:  # else a recovery has come after the run
            self._tell(report)

    # ------------------------------------------------------------ its parts

    @contextmanager
    def pass_(self, kind: str) -> Iterator[None]:
        """A pass of one of ``spec.step_report.PASSES``."""
        with self._adding_to(self._passes[kind], kind):
            yield

    @contextmanager
    def optimizing(self) -> Iterator[None]:
        """The optimizer computes."""
        with self._adding_to(self._optimized), self._doing("optimizer"):
            yield

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """With others: gradients, losses, copies. Counts for nothing but traces."""
        with self._doing("exchange"):
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For the input of a pass."""
        with self._adding_to(self._waited, "wait"):
            yield

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What this takes is no part of the pass, or of the optimizer's computing, that it lies in."""
        began_s, apart_s = self._clock(), self._apart_s
        try:
            if self._tracer is not None and self._tracer.busy:
                with self._doing("exchange"):
                    yield
            else:
                yield
        finally:
            self._apart_s = apart_s + self._clock() - began_s

    @contextmanager
    def _doing(self, kind: str) -> Iterator[None]:
        """What is traced: not the passes, and not when it is cut short."""
        if self._tracer is None:
            yield
            return
        before = self._tracer.turn(kind, self._clock())
        yield
        self._tracer.turn(before, self._clock())

    @contextmanager
    def _adding_to(self, total: _Total, traced: str | None = None) -> Iterator[None]:
        """Not counted when it is cut short: neither is its step."""
        began_s, apart_s = self._clock(), self._apart_s
        yield
        ended_s, apart_s = self._clock(), self._apart_s - apart_s
        total.count += 1
        total.seconds += ended_s - began_s - apart_s
        if traced is not None and self._tracer is not None:
            self._tracer.add(traced, began_s, ended_s, apart_s)


def _samples_by_kind(plan: ElasticPlan, worker: int) -> dict[str, int]:
    """Of all passes of a kind that the worker runs in a step."""
    seat = plan.placement.seat(worker)
    split = split_items(plan.orders[seat.stage][seat.cell]) if plan.orders else frozenset()
    items = plan.items_of(worker)
    in_two = sum(item.samples for item in items if item.number in split)
    whole = sum(item.samples for item in items)
    return {
        "forward": whole, "backward": whole - in_two, "input_gradient": in_two, "weight_gradient": in_two,
    }  # fmt: skip
