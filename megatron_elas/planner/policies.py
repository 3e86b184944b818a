"""What other systems do after a loss, under the same costs and the same timing: for comparison with our planner.

Each policy takes the job as it began and the cells that were lost, and gives the step that it goes on with.

* ``recycle`` (ReCycle, arXiv 2405.14009): micro-batches of lost workers go whole to data-parallel peers of their stage;
  backward is split, weight gradients fill bubbles; optimizers are staggered. Layers stay. Its schedules are for
  what failures leave: without a loss it is stock 1F1B.
* ``torchft`` (TorchFT): a replica that lost a worker is left out whole. Either the batch shrinks, or the replicas that
  are left run more micro-batches each. Stock 1F1B.
* ``oobleck`` (Oobleck, arXiv 2309.08125): every row is a pipeline of its own; one that lost workers goes on as a
  shorter pipeline from a template with its own layer partition; micro-batches are shared by the pipelines' speed. A
  pipeline too short for the memory borrows from the longest one, or is given up and its workers wait.
* ``elaswave`` (ElasWave, arXiv 2510.00606): micro-batches reshaped, layers partitioned anew by minimax, clocks of the
  busiest stages raised. 1F1B.
* ``restart``: stock Megatron started again from a checkpoint on as many whole replicas as the workers that are left
  make up, and as divide the batch.
* ``ours``: ``planner.step_plan``; synchronous unless asked otherwise, as today's runtime is.

What the papers leave to a solver (ReCycle's schedule) is searched by ``schedule.split_backward``. Recovery time is no
part of a step. Jobs of more than ``EXACT_ITEMS`` items are timed by class, see ``prediction``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from itertools import pairwise

from megatron_elas.planner.clocks import boost
from megatron_elas.planner.dataflow import Deal
from megatron_elas.planner.partition import partition
from megatron_elas.planner.prediction import Candidate, Predictor, stage_loads
from megatron_elas.planner.search import Freedom, stay, with_best_layers
from megatron_elas.planner.situation import Situation
from megatron_elas.planner.step_plan import Effort, StepPlan, make_plan
from megatron_elas.schedule.timing import Deadlock
from megatron_elas.spec.cost import JobCost, UnitCost
from megatron_elas.spec.errors import NoFeasiblePlan

Lost = Collection[tuple[int, int]]
"""Cells (stage, row)."""

RECYCLE_TRIES = 24
"""Orders that are tried for ReCycle; more hardly help it."""
EXACT_ITEMS = 10_000
"""Most items of all cells together that are timed one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStep:
    """How a policy goes on."""

    policy: str
    step_s: float
    samples: int
    """Trained in a step; fewer than the batch where it shrinks."""
    cells: int
    """That compute; the others wait."""
    what: str
    """In words."""
    candidate: Candidate | None = None
    """None where stages do not all have the same layers on all rows."""
    plan: StepPlan | None = None
    """Ours only."""

    @property
    def samples_per_s(self) -> float:
        """Throughput."""
        return self.samples / self.step_s


Policy = Callable[[Situation, Lost], PolicyStep]


def _on_all_cells(
    policy: str, now: Situation, step_s: float, candidate: Candidate, what: str, plan: StepPlan | None = None
) -> PolicyStep:
    """A step of the whole batch on every cell of the situation."""
    return PolicyStep(
        policy=policy,
        step_s=step_s,
        samples=now.batch_samples,
        cells=now.num_cells,
        what=what,
        candidate=candidate,
        plan=plan,
    )


def stock(begin: Situation) -> PolicyStep:
    """No loss: 1F1B on the job's own grid. What throughput is compared with. Raises NoFeasiblePlan."""
    candidate = stay(begin)
    step_s = _time(_predictor(begin), candidate, 0)
    return _on_all_cells("stock", begin, step_s, candidate, "1F1B on all cells")


def recycle(begin: Situation, lost: Lost, *, staggered: bool = True) -> PolicyStep:
    """Whole micro-batches to peers, split backward, staggered optimizers. Raises NoFeasiblePlan."""
    if not lost:
        return replace(stock(begin), policy="recycle")
    now = begin.without(lost)
    candidate = stay(now, split=True)
    step_s = _time(_predictor(now, staggered=staggered), candidate, RECYCLE_TRIES)
    return _on_all_cells("recycle", now, step_s, candidate, "whole micro-batches rerouted to peers, backward split")


def torchft(begin: Situation, lost: Lost, *, keep_batch: bool = True) -> PolicyStep:
    """Replicas that are not whole are left out. Raises NoFeasiblePlan when none is whole."""
    job = begin.job
    whole = tuple(row for row in range(job.data_parallel) if all(row != other for _, other in lost))
    if not whole:
        raise NoFeasiblePlan(f"every replica lost a worker ({sorted(lost)}): none is left to go on")
    per_row = job.num_microbatches // job.data_parallel
    if not keep_batch:
        job = replace(job, data_parallel=len(whole), num_microbatches=per_row * len(whole))
        whole = tuple(range(len(whole)))
    now = replace(begin, job=job, rows=(whole,) * begin.num_stages)
    candidate = stay(now)
    step_s = _time(_predictor(now), candidate, 0)
    return _on_all_cells(
        "torchft",
        now,
        step_s,
        candidate,
        f"{len(whole)} whole replicas go on with {'more micro-batches' if keep_batch else 'a smaller batch'}",
    )


def elaswave(begin: Situation, lost: Lost) -> PolicyStep:
    """Reshape, minimax partition, clocks of the busiest raised. Raises NoFeasiblePlan."""
    now = begin.without(lost)
    deal: Deal = "reroute" if now.job.keeps_micro_batches else "reshape"
    candidate = with_best_layers(now, stay(now, deal=deal))
    predictor = _predictor(now)
    try:
        found = predictor.predict(candidate, 0)
    except Deadlock as error:
        raise NoFeasiblePlan(f"reshaped micro-batches do not fit the memory: {error}") from error
    clocked = boost(predictor, found)
    return _on_all_cells("elaswave", now, clocked.timed.step_s, candidate, f"micro-batches {deal}d, layers by minimax")


def restart(begin: Situation, lost: Lost) -> PolicyStep:
    """A stock job on fewer whole replicas. Raises NoFeasiblePlan."""
    job, stages = begin.job, begin.num_stages
    left = begin.num_cells - len(set(lost))
    fitting = [rows for rows in range(left // stages, 0, -1) if job.num_microbatches % rows == 0]
    if not fitting:
        raise NoFeasiblePlan(f"{left} cells are too few for a pipeline of {stages} stages")
    rows = fitting[0]
    now = replace(begin, job=replace(job, data_parallel=rows), rows=(tuple(range(rows)),) * stages)
    candidate = stay(now)
    step_s = _time(_predictor(now), candidate, 0)
    return _on_all_cells("restart", now, step_s, candidate, f"started again with {rows} replicas")


def oobleck(begin: Situation, lost: Lost) -> PolicyStep:
    """Pipelines of several lengths, each with its template. Raises NoFeasiblePlan."""
    job = begin.job
    broken = [row for _, row in set(lost)]
    depths = _depths([begin.num_stages - broken.count(row) for row in range(job.data_parallel)], begin)
    single = {depth: _Template(begin, depth, len(depths)) for depth in set(depths)}
    counts = _share_by_speed([single[depth] for depth in depths], job.num_microbatches)
    pipelines = [single[depth].predict(count) for depth, count in zip(depths, counts, strict=True)]
    # Layers are reduced between pipelines once all are done.
    step_s = max(pipelines) + max(template.exchange_s for template in single.values())
    return PolicyStep(
        policy="oobleck",
        step_s=step_s,
        samples=begin.batch_samples,
        cells=sum(depths),
        what=f"pipelines of {', '.join(map(str, depths))} stages with {', '.join(map(str, counts))} micro-batches",
    )


def ours(
    begin: Situation,
    lost: Lost,
    *,
    staggered: bool = False,
    effort: Effort | None = None,
    freedom: Freedom | None = None,
) -> PolicyStep:
    """Our planner's choice. Raises NoFeasiblePlan."""
    now = begin.without(lost)
    freedom = replace(freedom or Freedom(), staggered=staggered)
    effort = effort or Effort(evaluations=60, exact=_is_small(now))
    plan = make_plan(now, freedom, effort)
    if staggered:  # who may stagger need not
        together = make_plan(now, replace(freedom, staggered=False), effort, (plan.candidate,))
        plan = min(plan, together, key=lambda each: each.step_s)
    return _on_all_cells("ours", now, plan.step_s, plan.candidate, "as planned; plan.explain() says what and why", plan)


POLICIES: dict[str, Policy] = {
    "recycle": recycle,
    "torchft": torchft,
    "oobleck": oobleck,
    "elaswave": elaswave,
    "restart": restart,
    "ours": ours,
}


def _is_small(situation: Situation) -> bool:
    return situation.num_stages * situation.job.num_microbatches <= EXACT_ITEMS


def _predictor(situation: Situation, *, staggered: bool = False) -> Predictor:
    return Predictor(situation, exact=_is_small(situation), staggered=staggered)


def _time(predictor: Predictor, candidate: Candidate, tries: int) -> float:
    try:
        return predictor.predict(candidate, tries).step_s
    except Deadlock as error:
        raise NoFeasiblePlan(f"the step does not fit the memory: {error}") from error


class _Template:
    """A pipeline of one row, with its layers; its state is shared with the same layers of the other pipelines."""

    def __init__(self, begin: Situation, depth: int, pipelines: int) -> None:
        cost = _shared(begin.cost, pipelines)
        job = replace(begin.job, pipeline_parallel=depth, data_parallel=1)
        even = tuple(cost.num_layers * stage // depth for stage in range(depth + 1))
        self.situation = replace(begin, job=job, cost=cost, cuts=even, rows=((0,),) * depth)
        loads = stage_loads(self.situation, stay(self.situation))
        cuts = partition(cost, loads, begin.memory_bytes).cuts
        self.situation = replace(self.situation, cuts=cuts)
        largest = max(cost.parameters(first, last) for first, last in pairwise(cuts))
        self.exchange_s = begin.link.ring_s(largest * cost.reduced_bytes, pipelines) + begin.link.ring_s(
            largest * cost.weight_bytes, pipelines
        )
        self._known: dict[int, float] = {}

    def predict(self, count: int) -> float:
        """Seconds of this many micro-batches, optimizer included."""
        if count not in self._known:
            now = replace(self.situation, job=replace(self.situation.job, num_microbatches=count))
            self._known[count] = _time(_predictor(now), stay(now), 0)
        return self._known[count]


def _shared(cost: JobCost, owners: int) -> JobCost:
    """Costs of a row alone whose optimizer state is shared by as many pipelines as there are."""
    if not cost.optimizer_sharded:
        return cost

    def part(unit: UnitCost) -> UnitCost:
        return replace(unit, optimizer_s=unit.optimizer_s / owners)

    known = {id(unit): part(unit) for unit in cost.layers}
    return replace(
        cost,
        embedding=part(cost.embedding),
        layers=tuple(known[id(unit)] for unit in cost.layers),
        head=part(cost.head),
        loss=part(cost.loss),
        optimizer_bytes=-(-cost.optimizer_bytes // owners),
        optimizer_sharded=False,
    )


def _depths(depths: list[int], begin: Situation) -> list[int]:
    """Stages of every pipeline, none shorter than the memory allows."""
    known: dict[int, int] = {}
    while depths:
        if len(depths) not in known:
            known[len(depths)] = _shortest(begin, len(depths))
        least = known[len(depths)]
        short = min(depths)
        if short >= least:
            return sorted(depths, reverse=True)
        longest = max(depths)
        if longest > least:
            depths[depths.index(longest)] -= 1
            depths[depths.index(short)] += 1
        else:
            depths.remove(short)
    raise NoFeasiblePlan("no pipeline of the workers that are left holds the model: restart on more workers")


def _shortest(begin: Situation, pipelines: int) -> int:
    for depth in range(1, begin.num_stages + 1):
        try:
            template = _Template(begin, depth, pipelines)
            template.predict(max(1, 2 * depth))
        except NoFeasiblePlan:
            continue
        return depth
    return begin.num_stages + 1


def _share_by_speed(templates: list[_Template], count: int) -> list[int]:
    """Micro-batches of every pipeline so that the last one ends as early as can be; each has one at least."""
    lines = []
    for template in templates:
        few = 2 * template.situation.num_stages
        slope = (template.predict(2 * few) - template.predict(few)) / few
        lines.append((template.predict(few) - few * slope, slope))
    counts = [1] * len(templates)
    ends = [(constant + 2 * slope, pipeline) for pipeline, (constant, slope) in enumerate(lines)]
    heapify(ends)
    for _ in range(count - len(templates)):
        end, pipeline = ends[0]
        counts[pipeline] += 1
        heapreplace(ends, (end + lines[pipeline][1], pipeline))
    return counts
