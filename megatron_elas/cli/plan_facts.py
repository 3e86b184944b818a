"""What there is to say of a plan, as numbers: for the text and for the JSON of ``elas plan``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from megatron_elas.planner.dataflow import busiest_share
from megatron_elas.planner.layouts import Layout
from megatron_elas.planner.policies import EXACT_ITEMS
from megatron_elas.planner.prediction import Predictor
from megatron_elas.planner.situation import divided
from megatron_elas.planner.step_plan import StepPlan
from megatron_elas.schedule.checks import Fault, find_faults, peak_samples, receives_ahead
from megatron_elas.schedule.greedy import Limit
from megatron_elas.schedule.items import count_samples
from megatron_elas.schedule.timing import Timeline
from megatron_elas.spec.cluster import Cluster
from megatron_elas.spec.layout import Placement

Span = tuple[int, int]
"""The least and the most of any cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """One stage under the plan."""

    stage: int
    first_layer: int
    last_layer: int
    """One past the last."""
    cells: tuple[tuple[int, int], ...]
    """(Stage that the cell is on before, row) of each."""
    home: int
    """Stage before that most of the cells are on."""
    items: Span
    """Per cell and step."""
    item_samples: Span
    """Of an item."""
    samples: Span
    """Per cell and step."""
    clock: float
    """1.0 is nominal."""
    busy_s: float
    """Of the busiest cell."""
    memory_bytes: int
    """Of a device of the fullest cell, when it holds most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveFacts:
    """What is sent before the plan is in force. Weights are made of the optimizer's masters, so these count."""

    layers: int
    """That change their stage."""
    transfers: int
    """Of one lane: slices with one sender and one receiver each."""
    total_bytes: int
    """Of all lanes."""
    sent_bytes: int
    """By the device that sends most."""
    received_bytes: int
    """By the device that receives most."""
    seconds: float
    """That the busiest link takes, at the bandwidth between nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupFacts:
    """Who keeps whose copy of the optimizer's state under the plan."""

    pairs: tuple[tuple[int, int], ...]
    """(Owner, backup): workers by the number they began with."""
    in_own_domain: int
    """Owners whose backup would die with them."""
    most_wards: int
    """Of any worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderFacts:
    """The schedule, and what was checked in it."""

    timeline: Timeline
    """At the plan's clocks."""
    exact: bool
    """Every cell; else one for each stage."""
    faults: tuple[Fault, ...]
    actions: int
    receives_ahead: int | None
    """How many actions ahead receives are posted where sends wait for them; None: not looked at, there are too many."""


def stage_facts(plan: StepPlan, predictor: Predictor) -> tuple[StageFacts, ...]:
    """Of every stage. The predictor has the resolution that the plan was made with."""
    situation, new, schedule = plan.situation, plan.candidate, plan.prediction.schedule
    job = divided(situation.job, new.size)
    limits = predictor.limits(new)
    homes = Layout(new.rows, new.origins).homes
    facts = []
    for stage, (first, last) in enumerate(pairwise(new.cuts)):
        share = busiest_share(job, new.widths[stage], new.deals[stage])
        if plan.effort.exact:
            own = schedule.items[stage]
            items = _span(map(len, own))
            sizes = _span(item.samples for cell in own for item in cell)
            samples = _span(map(count_samples, own))
        else:
            items, samples = (share.items, share.items), (share.samples, share.samples)
            sizes = (share.largest_item, share.largest_item)
        facts.append(
            StageFacts(
                stage=stage,
                first_layer=first,
                last_layer=last,
                cells=tuple(zip(new.origins[stage], new.rows[stage], strict=True)),
                home=homes[stage],
                items=items,
                item_samples=sizes,
                samples=samples,
                clock=plan.clocks[stage],
                busy_s=plan.boosted.timed.busy_s[stage],
                memory_bytes=_memory_bytes(plan, stage, limits[stage], share.largest_item),
            )
        )
    return tuple(facts)


def move_facts(plan: StepPlan) -> MoveFacts:
    """What goes from where to where, added up. Raises StateInvalid when a copy that is needed is lost."""
    situation = plan.situation
    sent: Counter[tuple[int, int]] = Counter()
    received: Counter[tuple[int, int]] = Counter()
    transfers = 0
    for move in plan.moves():
        sent[move.source] += move.numel
        received[move.target] += move.numel
        transfers += 1
    each = situation.cost.optimizer_bytes
    most_sent, most_received = (max(side.values(), default=0) * each for side in (sent, received))
    return MoveFacts(
        layers=len(plan.moved_layers()),
        transfers=transfers,
        total_bytes=sum(sent.values()) * each * situation.job.tensor_parallel,
        sent_bytes=most_sent,
        received_bytes=most_received,
        seconds=max(most_sent, most_received) / situation.link.bandwidth,
    )


def backup_facts(plan: StepPlan, cluster: Cluster, lost: frozenset[tuple[int, int]]) -> BackupFacts:
    """Backups of a job whose workers sit on the cluster's devices in order.

    Args:
        plan: After the loss.
        cluster: With as many devices as the job has workers, or more.
        lost: Cells (stage, row) of the job as it began, all of whose workers are lost.
    """
    begin = Placement.initial(plan.situation.job)
    gone = {worker for s, r in lost for worker in begin.stages[s][r].workers}
    domains = {worker: str(cluster.domain_of(worker)) for worker in begin.workers}
    _, pairs = plan.place(begin.without(gone), domains)
    wards = Counter(backup for _, backup in pairs)
    return BackupFacts(
        pairs=pairs,
        in_own_domain=sum(domains[owner] == domains[backup] for owner, backup in pairs),
        most_wards=max(wards.values(), default=0),
    )


def order_facts(plan: StepPlan, predictor: Predictor) -> OrderFacts:
    """The schedule over time, checked. Raises Deadlock when it cannot be carried out."""
    schedule = plan.prediction.schedule
    timeline = predictor.timeline(plan.candidate, schedule, plan.clocks)
    faults = find_faults(schedule, predictor.limits(plan.candidate))
    return OrderFacts(
        timeline=timeline,
        exact=plan.effort.exact,
        faults=faults,
        actions=schedule.num_actions,
        receives_ahead=receives_ahead(schedule) if schedule.num_actions <= EXACT_ITEMS and not faults else None,
    )


def _memory_bytes(plan: StepPlan, stage: int, limit: Limit, largest_item: int) -> int:
    """What the fullest cell's device holds at most: state, working memory, and the part of its room that is taken."""
    new, situation = plan.candidate, plan.situation
    first, last = new.cuts[stage], new.cuts[stage + 1]
    schedule = plan.prediction.schedule
    peak = max(peak_samples(schedule, stage, cell, limit.kept_share) for cell in range(len(schedule.items[stage])))
    fixed = situation.cost.device_bytes(first, last, cells=new.widths[stage], in_flight=0, largest_item=largest_item)
    return fixed + round(peak / limit.samples * max(0, situation.memory_bytes - fixed))


def _span(numbers: Iterable[int]) -> Span:
    known = list(numbers)
    return min(known), max(known)
