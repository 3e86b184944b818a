"""What a running job runs in a step under a candidate: items, warm-ups or orders, its seconds, and whether it fits.

Every item of every cell is timed, as the job runs it. What a search has timed may be one cell for each stage, and
knows nothing of cells that join.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from megatron_elas.planner.cost_model import crossing
from megatron_elas.planner.dataflow import Dealt, deal_stages
from megatron_elas.planner.prediction import Candidate, stage_tail_s
from megatron_elas.planner.situation import Situation, divided
from megatron_elas.schedule.lockstep import Known
from megatron_elas.schedule.one_f_one_b import stock_warmup
from megatron_elas.schedule.orders import PlanOrders, check_reading, read_orders, write_orders
from megatron_elas.schedule.timing import Deadlock, Durations, Program
from megatron_elas.schedule.warmups import find_order, find_warmups, time_order
from megatron_elas.spec.cluster import Link
from megatron_elas.spec.cost import CostSums, JobCost, PassTime, StageTimes
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.items import StageItems
from megatron_elas.spec.plan import ElasticPlan

Layers = tuple[tuple[int, int], ...]
"""Of every stage: ``[start, stop)``."""


class Work(NamedTuple):
    """What stages run in a step, and how."""

    layers: Layers
    items: tuple[StageItems, ...]
    warmups: tuple[int, ...]
    orders: PlanOrders
    """Empty: 1F1B with the warm-ups."""
    step_s: float
    """Predicted, every item of every cell timed."""


class Choice(NamedTuple):
    """What a running job may do in a situation."""

    candidate: Candidate
    work: Work
    fits: bool
    """Into the memory. What a profile says of it is an estimate, and no reason to end a job."""


def best_of(choices: Sequence[Choice]) -> Choice:
    """The fastest of those that fit, the first one of several."""
    return max(choices, key=lambda choice: (choice.fits, -choice.work.step_s))


class Choices:
    """Makes choices for one situation; what several of them have is looked at once."""

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._dealt, self._known = Dealt(), Known()
        self._times: dict[tuple[Layers, tuple[int, ...]], Times] = {}

    def in_turns(self, candidate: Candidate, *, fits: bool = True) -> Choice:
        """The candidate in 1F1B. ``fits``: into the limits that it was found with."""
        job = divided(self._situation.job, candidate.size)
        items = deal_stages(job, candidate.names, candidate.deals, self._dealt)
        layers, times = self._layers_and_times(candidate)
        order = find_order(items, times.stages, times.links, self._known)
        filled = filled_bytes(self._situation.cost, layers, items, order.warmups)
        work = Work(layers, items, order.warmups, (), order.step_s + times.tail_s)
        return Choice(candidate, work, fits and filled <= self._situation.memory_bytes)

    def ordered(self, candidate: Candidate, program: Program, *, fits: bool = True) -> Choice | None:
        """The candidate in an order of its items; None where the running job cannot carry it out."""
        try:
            check_reading(program.schedule)
            program.check_joined()
        except (BadUsage, Deadlock):
            return None
        items = program.flow.stages
        layers, times = self._layers_and_times(candidate)
        filled = _ordered_bytes(self._situation.cost, layers, program)
        step_s = program.run(Durations.of(times.stages, items, times.links)).step_s + times.tail_s
        work = Work(layers, items, find_warmups(items), write_orders(program.schedule), step_s)
        return Choice(candidate, work, fits and filled <= self._situation.memory_bytes)

    def _layers_and_times(self, candidate: Candidate) -> tuple[Layers, Times]:
        layers = tuple(pairwise(candidate.cuts))
        key = layers, candidate.widths
        if key not in self._times:
            self._times[key] = times_of(*key, self._situation.cost, self._situation.link)
        return layers, self._times[key]


class Times(NamedTuple):
    """Of stages of some layers."""

    stages: tuple[StageTimes, ...]
    links: tuple[PassTime, ...]
    tail_s: float
    """After the last gradient."""


def times_of(layers: Layers, widths: Sequence[int], cost: JobCost, link: Link) -> Times:
    """How long passes, transfers and what follows them take, on stages of as many cells."""
    sums = CostSums(cost)
    tails = [
        stage_tail_s(cost, link, first, last, width, sums) for (first, last), width in zip(layers, widths, strict=True)
    ]
    stages = tuple(cost.stage_times(first, last) for first, last in layers)
    return Times(stages, (crossing(cost, link),) * (len(layers) - 1), max(tails))


def time_plan(plan: ElasticPlan, cost: JobCost, link: Link) -> float:
    """Seconds of a step under a plan, every item as it is dealt and in the plan's order."""
    times = times_of(plan.layers, list(map(len, plan.items)), cost, link)
    if plan.orders:
        program = Program(read_orders(plan.items, plan.orders))
        return program.run(Durations.of(times.stages, plan.items, times.links)).step_s + times.tail_s
    return time_order(plan.items, warmups_of(plan), times.stages, times.links) + times.tail_s


def plan_bytes(plan: ElasticPlan, cost: JobCost) -> int:
    """Of the fullest device under a plan."""
    if plan.orders:
        return _ordered_bytes(cost, plan.layers, Program(read_orders(plan.items, plan.orders)))
    return filled_bytes(cost, plan.layers, plan.items, warmups_of(plan))


def warmups_of(plan: ElasticPlan) -> tuple[int, ...]:
    """Of every stage."""
    widths = [len(cells) for cells in plan.items]
    return plan.warmups or tuple(stock_warmup(stage, widths) for stage in range(len(widths)))


def filled_bytes(cost: JobCost, layers: Layers, items: tuple[StageItems, ...], warmups: Sequence[int]) -> int:
    """Of the fullest device in 1F1B."""
    # Few stages, and few of their cells, have other sizes than the rest.
    distinct = {id(cells): cells for cells in items}
    sizes = {key: {tuple([item.samples for item in own]) for own in cells} for key, cells in distinct.items()}
    return max(
        cost.device_bytes(
            first,
            last,
            cells=len(cells),
            in_flight=max(_most_in_flight(own, ahead + 1) for own in sizes[id(cells)]),
            largest_item=max(map(max, sizes[id(cells)])),
        )
        for (first, last), cells, ahead in zip(layers, items, warmups, strict=True)
    )


def _most_in_flight(sizes: Sequence[int], items: int) -> int:
    """Most samples of so many items that follow one another."""
    window = most = sum(sizes[:items])
    for gone, new in zip(sizes, sizes[items:], strict=False):
        window += new - gone
        most = max(most, window)
    return most


def _ordered_bytes(cost: JobCost, layers: Layers, program: Program) -> int:
    """Of the fullest device in the order of a schedule."""
    flow = program.flow
    most = 0
    for cell, steps in enumerate(program.steps):
        stage = flow.stage_of_cell[cell]
        (first, last), width = layers[stage], len(flow.stages[stage])
        whole, kept = cost.activation_bytes(first, last), cost.kept_bytes(first, last)
        split = {item for kind, item in steps if kind == "W"}
        held = peak = 0.0
        for kind, item in steps:
            samples = flow.samples[item]
            if kind == "F":
                held += samples * whole
            elif kind == "B":
                held -= samples * (whole - kept if item in split else whole)
            else:
                held -= samples * kept
            peak = max(peak, held)
        largest = max((flow.samples[item] for item in flow.own[cell]), default=0)
        filled = cost.state_bytes(first, last, width) + largest * cost.working_bytes(first, last) + peak
        most = max(most, round(filled))
    return most
