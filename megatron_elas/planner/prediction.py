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
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from megatron_elas.planner.cost_model import crossing, stage_limits
from megatron_elas.planner.dataflow import Deal, busiest_share, deal_stages
from megatron_elas.planner.layouts import Layout
from megatron_elas.planner.partition import StageLoad
from megatron_elas.planner.situation import Rows, Situation, divided
from megatron_elas.schedule.actions import Schedule
from megatron_elas.schedule.greedy import Limit, Taste
from megatron_elas.schedule.items import count_samples
from megatron_elas.schedule.one_f_one_b import stock_warmups
from megatron_elas.schedule.routes import Flow
from megatron_elas.schedule.split_backward import Found, Stock, bound_s, split_backward
from megatron_elas.schedule.timing import Durations, Program, Timeline
from megatron_elas.spec.cluster import Link
from megatron_elas.spec.cost import CostSums, JobCost, PassTime, StageTimes
from megatron_elas.spec.device import PowerCurve
from megatron_elas.spec.items import StageItems, micro_batch
from megatron_elas.spec.job import JobSpec

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
    found: Found = field(repr=False, compare=False)
    energy_j: float | None
    """Of all devices with a seat, in a step at the nominal clock."""

    @property
    def program(self) -> Program:
        """The order, ready to be timed. By class: of one cell for each stage."""
        return self.found.program

    @property
    def schedule(self) -> Schedule:
        """The order. By class: of one cell for each stage."""
        return self.found.schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A schedule at given clocks."""

    step_s: float
    energy_j: float | None
    busy_s: tuple[float, ...]
    """Of every stage: seconds that its busiest cell computes."""


class _Dealt:
    """Items of all stages, with what is often asked of them."""

    def __init__(self, items: tuple[StageItems, ...]) -> None:
        self.items = items
        self.flow = Flow(items)
        self.shares = tuple(tuple((count_samples(own), len(own)) for own in cells) for cells in items)
        """``shares[stage][cell]``: samples and items."""

    @cached_property
    def stock(self) -> Stock:
        """1F1B of them."""
        return Stock.of(self.flow)


class Predictor:
    """Times candidates for one situation."""

    def __init__(self, situation: Situation, *, exact: bool, staggered: bool) -> None:
        self.situation = situation
        self.exact = exact
        self.staggered = staggered
        self.evaluations = 0
        """So far: one for each candidate, and one for each order that was tried for it beyond the first."""
        self._costs: dict[float, CostSums] = {}
        self._jobs: dict[int, JobSpec] = {}
        self._tails: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, ...]] = {}
        self._flows: dict[object, _Dealt] = {}

    def predict(
        self,
        candidate: Candidate,
        tries: int = 1,
        first: Sequence[Taste] | None = None,
        *,
        seed: int = 0,
        unless_s: float | None = None,
    ) -> Prediction:
        """The candidate with the best of some orders.

        Args:
            candidate: Whose layers fit the memory.
            tries: Orders besides 1F1B; 0: 1F1B alone.
            first: Tastes that were good for a similar candidate, to begin with.
            seed: Of the changes that are made to them.
            unless_s: Where no order is faster than this, 1F1B is all that is tried.

        Raises:
            Deadlock: Memory is too small for all of them.
        """
        dealt = self._items(candidate)
        durations, limits = self._durations(candidate), self._limits(candidate, dealt.items)
        tails, work = self.tails(candidate), _work_s(durations, dealt.shares)

        def period(program: Program) -> float:
            return _period_s(program, durations, tails)

        tail = 0.0 if self.staggered else max(tails)
        busiest_s = max(map(max, work))
        if unless_s is not None:
            least_s = busiest_s
            if not self.staggered:
                least_s = bound_s(dealt.items, durations, limits, split=candidate.split) + tail
            tries = 0 if least_s >= unless_s else tries
        found = split_backward(
            dealt.items,
            durations,
            limits,
            tries=tries,
            split=candidate.split,
            flow=dealt.flow,
            stock=dealt.stock,
            first=first,
            seed=seed,
            measure=period if self.staggered else None,
            least_s=busiest_s if self.staggered else None,
        )
        self.evaluations += max(1, found.tries)
        step_s = found.step_s + tail
        return Prediction(
            candidate=candidate,
            step_s=step_s,
            bound_s=min(step_s, found.bound_s + tail),
            found=found,
            energy_j=self._energy(candidate, work, step_s, None),
        )

    def time(self, candidate: Candidate, order: Schedule | Program, clocks: Sequence[float] | None = None) -> Timed:
        """The same order at other clocks."""
        dealt = self._items(candidate)
        durations, tails = self._durations(candidate, clocks), self.tails(candidate)
        program = order if isinstance(order, Program) else Program(order, dealt.flow)
        if self.staggered:
            step_s = _period_s(program, durations, tails)
        else:
            step_s = program.run(durations).step_s + max(tails)
        work = _work_s(durations, dealt.shares)
        return Timed(
            step_s=step_s,
            energy_j=self._energy(candidate, work, step_s, clocks),
            busy_s=tuple(map(max, work)),
        )

    def limits(self, candidate: Candidate) -> tuple[Limit, ...]:
        """What fits on the cells of every stage of the schedules that ``predict`` gives for the candidate."""
        return self._limits(candidate, self._items(candidate).items)

    def timeline(self, candidate: Candidate, schedule: Schedule, clocks: Sequence[float] | None = None) -> Timeline:
        """When everything of a step happens, up to the last gradient. Raises Deadlock."""
        return Program(schedule, self._items(candidate).flow).run(self._durations(candidate, clocks))

    def tails(self, candidate: Candidate) -> tuple[float, ...]:
        """Of every stage: seconds of reduction, optimizer and all-gather, none of them overlapped."""
        cost, link = self.situation.cost, self.situation.link
        known = self._tails.get((candidate.cuts, candidate.widths))
        if known is not None:
            return known
        sums = self.sums(1.0)
        tails = []
        for (first, last), cells in zip(pairwise(candidate.cuts), candidate.widths, strict=True):
            tails.append(stage_tail_s(cost, link, first, last, cells, sums))
        found = self._tails[candidate.cuts, candidate.widths] = tuple(tails)
        return found

    def _energy(
        self, candidate: Candidate, work: Sequence[Sequence[float]], step_s: float, clocks: Sequence[float] | None
    ) -> float | None:
        power = self.situation.power
        if power is None:
            return None
        return sum(
            self._stage_energy(candidate, stage, own, step_s, clocks[stage] if clocks else 1.0, power)
            for stage, own in enumerate(work)
        )

    def _stage_energy(
        self,
        candidate: Candidate,
        stage: int,
        work: Sequence[float],
        step_s: float,
        clock: float,
        power: PowerCurve,
    ) -> float:
        own = sum(power.energy_j(busy, max(0.0, step_s - busy), clock) for busy in work)
        cells = 1 if self.exact else candidate.widths[stage]
        return own * cells * self.situation.job.tensor_parallel

    def stage_energy_j(self, candidate: Candidate, stage: int, step_s: float, clock: float, power: PowerCurve) -> float:
        """Of all devices of a stage in a step of this length, at this clock."""
        times = self._stage_times(candidate, stage, clock)
        work = [
            samples * times.sample_s + items * times.fixed_s for samples, items in self._items(candidate).shares[stage]
        ]
        return self._stage_energy(candidate, stage, work, step_s, clock, power)

    def _job(self, size: int) -> JobSpec:
        if size not in self._jobs:
            self._jobs[size] = divided(self.situation.job, size)
        return self._jobs[size]

    def sums(self, clock: float) -> CostSums:
        """Of the situation's cost, at a clock."""
        if clock not in self._costs:
            self._costs[clock] = CostSums(self.situation.cost, clock)
        return self._costs[clock]

    def _items(self, candidate: Candidate) -> _Dealt:
        dealt = (candidate.rows, candidate.origins, candidate.deals) if self.exact else candidate.num_stages
        key = (dealt, candidate.size)
        found = self._flows.get(key)
        if found is None:
            job = self._job(candidate.size)
            if self.exact:
                items = deal_stages(job, candidate.names, candidate.deals)
            else:
                width = job.data_parallel * job.micro_batch_size
                steps = job.num_microbatches // job.data_parallel
                items = ((tuple(micro_batch(m, width) for m in range(steps)),),) * candidate.num_stages
            found = self._flows[key] = _Dealt(items)
        return found

    def _durations(self, candidate: Candidate, clocks: Sequence[float] | None = None) -> Durations:
        cost, link = self.situation.cost, self.situation.link
        items = self._items(candidate).items
        times_of = [
            self._stage_times(candidate, stage, clocks[stage] if clocks else 1.0)
            for stage in range(candidate.num_stages)
        ]
        each = crossing(cost, link)
        links = [each] * (len(items) - 1)
        if not self.exact:
            # Cells send side by side.
            links = [
                PassTime(sample_s=each.sample_s / min(pair), fixed_s=each.fixed_s)
                for pair in pairwise(candidate.widths)
            ]
        return Durations.of(times_of, items, links)

    def _stage_times(self, candidate: Candidate, stage: int, clock: float) -> StageTimes:
        times = self.sums(clock).stage_times(candidate.cuts[stage], candidate.cuts[stage + 1])
        return times if self.exact else _scaled(times, *self._shares(candidate, stage))

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
        job = self._job(candidate.size)
        share = busiest_share(job, candidate.widths[stage], candidate.deals[stage])
        batch = job.num_microbatches * job.micro_batch_size
        return share.samples / batch, share.items * job.data_parallel / job.num_microbatches


def stage_tail_s(cost: JobCost, link: Link, first: int, last: int, cells: int, sums: CostSums | None = None) -> float:
    """Seconds of reduction, optimizer and all-gather of a stage of layers ``[first, last)``, one after the other."""
    sums = sums or CostSums(cost)
    parameters = sums.parameters(first, last)
    reduced = link.ring_s(parameters * cost.reduced_bytes, cells)
    gathered = link.ring_s(parameters * cost.weight_bytes, cells)
    return reduced + sums.optimizer_s(first, last) / (cells if cost.optimizer_sharded else 1) + gathered


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
