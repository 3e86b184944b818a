"""How long a step takes under a candidate plan: the schedule evaluation that planner, policies and simulator share.

**Synchronous**: the step is the time from the first forward pass to the last gradient of any cell, then the longest
reduction, optimizer step and all-gather of any stage. The gradients' norm is known before any parameter changes.

**Staggered**: every stage reduces, applies and gathers as soon as its own gradients are complete, and begins the next
step at once, so that the pipeline's fill hides behind the end of the step before. The step is what passes between
two steps once they follow each other steadily. Norms and overflows are then checked after the fact, which asks the
runtime for an undo; today's runtime is synchronous.

Two resolutions, with the same code behind them: **exact** times every item on every cell; **by class** times one cell
for each stage, the busiest one, which has the stage's samples divided evenly. The latter costs as much for 100,000
workers as for 100. It equals the former where the samples of every micro-step divide by the cells, and is too low by
up to a tenth where four rows of one sample are left with three cells; more rows bring the two together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from megatron_elas.planner.cost_model import stage_durations, stage_limits
from megatron_elas.planner.dataflow import Deal, busiest_share, deal_items
from megatron_elas.planner.layouts import Layout
from megatron_elas.planner.partition import StageLoad
from megatron_elas.planner.situation import Rows, Situation, divided
from megatron_elas.schedule.actions import Schedule, StageItems
from megatron_elas.schedule.greedy import Limit
from megatron_elas.schedule.items import count_samples, micro_batch
from megatron_elas.schedule.one_f_one_b import stock_warmups
from megatron_elas.schedule.routes import Flow
from megatron_elas.schedule.split_backward import Stock, split_backward
from megatron_elas.schedule.timing import Durations, Program
from megatron_elas.spec.cluster import Link
from megatron_elas.spec.cost import JobCost, PassTime, StageTimes

_STEPS = 6
"""Steps that are timed one after the other to see how they follow each other steadily."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What may be planned. Cells are named by the stage they are on now and their row."""

    rows: Rows
    """Of every stage to be: rows of its cells. With ``origins`` of the same shape these name the cells."""
    origins: Rows
    """Of every stage to be: the stage that each cell is on now."""
    cuts: tuple[int, ...]
    deals: tuple[Deal, ...]
    """Of every stage."""
    size: int
    """Samples of a micro-batch: the job's, or a part of it that divides it."""
    split: bool
    """Weight gradients may be passes of their own."""

    @property
    def num_stages(self) -> int:
        """Pipeline depth."""
        return len(self.rows)

    @property
    def widths(self) -> tuple[int, ...]:
        """Cells of every stage."""
        return tuple(map(len, self.rows))

    @property
    def names(self) -> Rows:
        """Of every stage to be: rows of its cells once they are there, ascending; see ``layouts.Layout``."""
        return Layout(self.rows, self.origins).names


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A candidate with the best order that was found for it."""

    candidate: Candidate
    step_s: float
    """From one step's begin to the next one's."""
    bound_s: float
    """No order of these items on these layers is faster."""
    schedule: Schedule
    """By class: of one cell for each stage."""
    energy_j: float | None
    """Of all devices with a seat, in a step at the nominal clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A schedule at given clocks."""

    step_s: float
    energy_j: float | None
    busy_s: tuple[float, ...]
    """Of every stage: seconds that its busiest cell computes."""


class _Dealt(NamedTuple):
    """Items of all stages, with what is often asked of them."""

    items: tuple[StageItems, ...]
    flow: Flow
    shares: tuple[tuple[tuple[int, int], ...], ...]
    """``shares[stage][cell]``: samples and items."""

    @staticmethod
    def of(items: tuple[StageItems, ...]) -> _Dealt:
        """From the items alone."""
        shares = tuple(tuple((count_samples(own), len(own)) for own in cells) for cells in items)
        return _Dealt(items, Flow(items), shares)


class Predictor:
    """Times candidates for one situation."""

    def __init__(self, situation: Situation, *, exact: bool, staggered: bool) -> None:
        self.situation = situation
        self.exact = exact
        self.staggered = staggered
        self.evaluations = 0
        """So far: one for each candidate, and one for each order that was tried for it beyond the first."""
        self._program: Program | None = None
        """The one that was timed last."""
        self._flows: dict[object, _Dealt] = {}
        self._stocks: dict[int, Stock] = {}
        """By the identity of the flow, which is kept."""

    def predict(self, candidate: Candidate, tries: int = 1) -> Prediction:
        """The candidate with the best of some orders.

        Args:
            candidate: Whose layers fit the memory.
            tries: Orders besides 1F1B; 0: 1F1B alone.

        Raises:
            Deadlock: Memory is too small for all of them.
        """
        items, flow, shares = self._items(candidate)
        durations, limits = self._durations(candidate), self._limits(candidate, items)
        tails = self.tails(candidate)

        def period(schedule: Schedule) -> float:
            return _period_s(Program(schedule, flow), durations, tails)

        least = None
        if self.staggered:
            least = max(map(max, _work_s(durations, shares)))
        found = split_backward(
            items,
            durations,
            limits,
            tries=tries,
            split=candidate.split,
            flow=flow,
            stock=self._stock(flow) if not tries else None,
            measure=period if self.staggered else None,
            least_s=least,
        )
        stock = self._stocks.get(id(flow))
        if stock is not None and found.schedule is stock.program.schedule:
            self._program = stock.program
        self.evaluations += max(1, found.tries)
        tail = 0.0 if self.staggered else max(tails)
        step_s = found.step_s + tail
        work = _work_s(durations, shares)
        return Prediction(
            candidate=candidate,
            step_s=step_s,
            bound_s=min(step_s, found.bound_s + tail),
            schedule=found.schedule,
            energy_j=self._energy(candidate, work, step_s, None),
        )

    def time(self, candidate: Candidate, schedule: Schedule, clocks: Sequence[float] | None = None) -> Timed:
        """The same order at other clocks."""
        _, flow, shares = self._items(candidate)
        durations, tails = self._durations(candidate, clocks), self.tails(candidate)
        if self._program is None or self._program.schedule is not schedule:
            self._program = Program(schedule, flow)
        program = self._program
        if self.staggered:
            step_s = _period_s(program, durations, tails)
        else:
            step_s = program.run(durations).step_s + max(tails)
        work = _work_s(durations, shares)
        return Timed(
            step_s=step_s,
            energy_j=self._energy(candidate, work, step_s, clocks),
            busy_s=tuple(map(max, work)),
        )

    def tails(self, candidate: Candidate) -> tuple[float, ...]:
        """Of every stage: seconds of reduction, optimizer and all-gather, none of them overlapped."""
        cost, link = self.situation.cost, self.situation.link
        tails = []
        for (first, last), cells in zip(pairwise(candidate.cuts), candidate.widths, strict=True):
            tails.append(stage_tail_s(cost, link, first, last, cells))
        return tuple(tails)

    def _energy(
        self, candidate: Candidate, work: Sequence[Sequence[float]], step_s: float, clocks: Sequence[float] | None
    ) -> float | None:
        power = self.situation.power
        if power is None:
            return None
        total = 0.0
        for stage, own in enumerate(work):
            clock = clocks[stage] if clocks else 1.0
            each = sum(power.energy_j(busy, max(0.0, step_s - busy), clock) for busy in own)
            total += each if self.exact else each * candidate.widths[stage]
        return total * self.situation.job.tensor_parallel

    def _items(self, candidate: Candidate) -> _Dealt:
        dealt = (candidate.rows, candidate.origins, candidate.deals) if self.exact else candidate.num_stages
        key = (dealt, candidate.size)
        found = self._flows.get(key)
        if found is None:
            job = divided(self.situation.job, candidate.size)
            if self.exact:
                items = tuple(map(deal_items, (job,) * candidate.num_stages, candidate.names, candidate.deals))
            else:
                width = job.data_parallel * job.micro_batch_size
                steps = job.num_microbatches // job.data_parallel
                items = ((tuple(micro_batch(m, width) for m in range(steps)),),) * candidate.num_stages
            found = self._flows[key] = _Dealt.of(items)
        return found

    def _stock(self, flow: Flow) -> Stock:
        found = self._stocks.get(id(flow))
        if found is None:
            found = self._stocks[id(flow)] = Stock.of(flow)
        return found

    def _durations(self, candidate: Candidate, clocks: Sequence[float] | None = None) -> Durations:
        situation = self.situation
        items = self._items(candidate).items
        exact = stage_durations(situation.cost, candidate.cuts, items, clocks=clocks, link=situation.link)
        if self.exact:
            return exact
        cells = []
        for stage, (times, *_) in enumerate(exact.cells):
            samples, passes = self._shares(candidate, stage)
            cells.append((_scaled(times, samples, passes),))
        links = [
            PassTime(sample_s=link.sample_s / min(pair), fixed_s=link.fixed_s)
            for link, pair in zip(exact.links, pairwise(candidate.widths), strict=True)
        ]
        return Durations(cells=tuple(cells), links=tuple(links))

    def _limits(self, candidate: Candidate, items: Sequence[StageItems]) -> tuple[Limit, ...]:
        situation = self.situation
        if self.exact:
            return stage_limits(situation.cost, candidate.cuts, items, situation.memory_bytes)
        job = divided(situation.job, candidate.size)
        limits = []
        for stage, (first, last) in enumerate(pairwise(candidate.cuts)):
            cells = candidate.widths[stage]
            room = situation.cost.samples_that_fit(
                first,
                last,
                cells=cells,
                memory_bytes=situation.memory_bytes,
                largest_item=busiest_share(job, cells, candidate.deals[stage]).largest_item,
            )
            share, passes = self._shares(candidate, stage)
            # Where one item stands for several, these are in memory one after the other.
            samples = room / share * max(1.0, passes)
            limits.append(Limit(samples=samples, kept_share=situation.cost.kept_share(first, last)))
        return tuple(limits)

    def _shares(self, candidate: Candidate, stage: int) -> tuple[float, float]:
        """Samples and passes of the stage's busiest cell, as parts of those of the one cell that stands for it."""
        job = divided(self.situation.job, candidate.size)
        share = busiest_share(job, candidate.widths[stage], candidate.deals[stage])
        batch = job.num_microbatches * job.micro_batch_size
        return share.samples / batch, share.items * job.data_parallel / job.num_microbatches


def stage_tail_s(cost: JobCost, link: Link, first: int, last: int, cells: int) -> float:
    """Seconds of reduction, optimizer and all-gather of the stage of layers ``[first, last)``, none overlapped."""
    parameters = cost.parameters(first, last)
    reduced = link.ring_s(parameters * cost.gradient_bytes, cells)
    gathered = link.ring_s(parameters * cost.weight_bytes, cells)
    return reduced + cost.optimizer_s(first, last, cells) + gathered


def stage_loads(situation: Situation, candidate: Candidate) -> tuple[StageLoad, ...]:
    """What the busiest cells of a candidate's stages run, and hold at once with 1F1B, whatever layers they get."""
    job = divided(situation.job, candidate.size)
    widths = candidate.widths
    shares = [busiest_share(job, cells, deal) for cells, deal in zip(widths, candidate.deals, strict=True)]
    ahead = stock_warmups(widths, [share.items for share in shares])
    return tuple(
        StageLoad(
            samples=share.samples,
            items=share.items,
            cells=cells,
            in_flight=min((before + 1) * share.largest_item, share.samples),
            largest_item=share.largest_item,
        )
        for share, cells, before in zip(shares, widths, ahead, strict=True)
    )


def _period_s(program: Program, durations: Durations, tails: Sequence[float]) -> float:
    """Seconds between steps that follow each other steadily."""
    begins = [0.0] * len(tails)
    latest = []
    for _ in range(_STEPS):
        timeline = program.run(durations, begins)
        begins = [timeline.stage_end_s(stage) + tail for stage, tail in enumerate(tails)]
        latest.append(max(begins))
    # Between steps of one phase: what a pattern over up to three steps adds on average.
    return (latest[-1] - latest[-4]) / 3


def _scaled(times: StageTimes, samples: float, passes: float) -> StageTimes:
    """Passes of parts of the samples, so many times."""
    forward, input_gradient, weight_gradient = (
        PassTime(sample_s=each.sample_s * samples, fixed_s=each.fixed_s * passes)
        for each in (times.forward, times.input_gradient, times.weight_gradient)
    )
    return StageTimes(forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient)


def _work_s(durations: Durations, shares: Sequence[Sequence[tuple[int, int]]]) -> list[list[float]]:
    """Seconds that every cell of every stage computes."""
    return [
        [
            samples * times.sample_s + items * times.fixed_s
            for times, (samples, items) in zip(all_times, own, strict=True)
        ]
        for all_times, own in zip(durations.cells, shares, strict=True)
    ]
