"""The search for a plan: candidates in a fixed order, the best so far, stopped by a number of evaluations.

Objective, in this order:

1. least predicted step time, to which a hundredth is added where cells change their stage: the whole state of a stage
   then goes to each of them, which a smaller gain does not pay for. When a stage is lost, all that is possible moves
   layers: a hundredth is added for as many as a stage has, that every cell gets on average;
2. most cells with a seat: so state is kept in more places;
3. fewest parameters that cells get and did not have;
4. fewest changes: the job's own micro-batches before parts of them, backward whole before split;
5. the candidate that came first.

The order of candidates depends only on what was found before, never on how many evaluations are allowed. So more
evaluations never give a worse plan, and the same inputs give the same plan on any machine. The first candidate is to do
nothing: layers stay, whole micro-batches move, 1F1B. No plan is worse than that. When a stage is lost, there is no
such candidate, and cells and layers that nobody holds are shared out anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

from megatron_elas.planner.cost_model import crossing
from megatron_elas.planner.dataflow import DEALS, Deal, Share, busiest_share, is_possible, is_stock
from megatron_elas.planner.layouts import FEW_STAGES, Layout, homes_of, list_layouts, seat_cells
from megatron_elas.planner.partition import Fill, Partitioner, StageLoad
from megatron_elas.planner.prediction import Candidate, Prediction, Predictor, stage_loads
from megatron_elas.planner.situation import SPARE, Situation, divided
from megatron_elas.schedule.greedy import Taste
from megatron_elas.schedule.timing import Deadlock
from megatron_elas.spec.errors import NoFeasiblePlan
from megatron_elas.spec.job import JobSpec

CELL_MOVE = 0.01
"""Share of the step time that a plan has to win by moving cells."""
_SAME = 1e-9
"""Times as near as this are equal: sums in another order."""
_FILL_LEFT = 0.15
"""Of a pass of one item through all stages, where steps follow each other without waiting for all stages."""
_ITEMS_PER_STAGE = 8
"""Micro-batches are not cut further once a cell has as many items for every stage: bubbles are small by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Freedom:
    """What a plan may change, beside moving whole micro-batches."""

    layers: bool = True
    """Layers may move between stages."""
    cells: bool = True
    """Cells may move between stages, and the pipeline may become shallower."""
    deals: tuple[Deal, ...] = DEALS
    split: bool = True
    """Backward may be split."""
    divide: bool = True
    """Micro-batches may be cut into smaller ones on all stages."""
    orders: bool = True
    """Passes may come in another order than that of 1F1B."""
    staggered: bool = False
    """Stages step their optimizers one by one; see ``prediction``."""

    def with_whole_micro_batches(self) -> Freedom:
        """As much of it as neither cuts nor joins micro-batches."""
        return replace(self, deals=("reroute",), divide=False)


def as_level_allows(freedom: Freedom, job: JobSpec) -> Freedom:
    """As much of it as keeps the job at its level of consistency."""
    return freedom.with_whole_micro_batches() if job.keeps_micro_batches else freedom


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What a search ended with."""

    best: Prediction
    nothing: Prediction | None
    """To do nothing; None where memory does not allow it."""
    evaluations: int
    tried: int
    """Candidates."""
    exhausted: bool
    """There was nothing left to try."""


def search(predictor: Predictor, freedom: Freedom, evaluations: int, seeds: Sequence[Candidate] = ()) -> Searched:
    """The best candidate found.

    Args:
        predictor: Of the situation.
        freedom: What may change.
        evaluations: Most orders to time; at least the first candidate that fits is always timed.
        seeds: Tried right after doing nothing, such as an earlier plan.

    Raises:
        NoFeasiblePlan: Nothing that was tried fits the memory.
    """
    state = _Search(predictor, freedom, seeds)
    exhausted = True
    for attempt in state.attempts():
        if state.best is not None and predictor.evaluations + max(1, attempt.tries) > evaluations:
            exhausted = False
            break
        state.make(attempt)
    if state.best is None:
        situation = predictor.situation
        raise NoFeasiblePlan(
            f"no plan for {situation.describe_cells()} fits {situation.memory_bytes / 1e9:.1f} GB: "
            f"use smaller micro-batches, recomputation or more stages"
        )
    return Searched(
        best=state.best,
        nothing=state.nothing,
        evaluations=predictor.evaluations,
        tried=len(state.tried),
        exhausted=exhausted,
    )


def stay(situation: Situation, *, deal: Deal = "reroute", split: bool = False) -> Candidate:
    """Layers and cells where they are. Raises NoFeasiblePlan when a stage is lost."""
    for stage in situation.lost_stages:
        raise NoFeasiblePlan(
            f"stage {stage} lost all its cells: its layers have no live holder. Restart from the newest checkpoint "
            f"with --load, or run with more data-parallel rows"
        )
    return Candidate(
        rows=situation.rows,
        origins=tuple((stage,) * len(rows) for stage, rows in enumerate(situation.rows)),
        cuts=situation.cuts,
        deals=(deal,) * situation.num_stages,
        size=situation.job.micro_batch_size,
        split=split,
    )


def objective_s(prediction: Prediction, situation: Situation | None = None) -> float:
    """Seconds that predictions are compared by.

    Args:
        prediction: Of a step.
        situation: Needed where a stage is lost.
    """
    return prediction.step_s * _price(prediction.candidate, situation)


def _price(candidate: Candidate, situation: Situation | None) -> float:
    """By which a step counts as longer for what is moved."""
    if situation is not None and situation.lost_stages:
        layers = situation.cost.layers
        stage = sum(layer.parameters for layer in layers) / situation.num_stages
        moved = received_parameters(situation, candidate) / max(1.0, stage * sum(candidate.widths))
    else:
        moved = float(any(len(set(own) - {SPARE}) > 1 for own in candidate.origins))
    return 1 + CELL_MOVE * moved


def with_best_layers(situation: Situation, candidate: Candidate, partitioner: Partitioner | None = None) -> Candidate:
    """The candidate with the partition that suits it. Raises NoFeasiblePlan."""
    partitioner = partitioner or Partitioner(situation.cost, situation.memory_bytes)
    found = partitioner.find(stage_loads(situation, candidate), homes(situation, candidate))
    return replace(candidate, cuts=found.cuts)


def homes(situation: Situation, candidate: Candidate) -> tuple[int, ...]:
    """Of every layer: the candidate's stage whose cells have it now, -1 for none."""
    return homes_of(situation, candidate.origins)


def received_parameters(situation: Situation, candidate: Candidate) -> int:
    """Of one lane, over all cells: of layers that they get and do not have now."""
    sums = list(accumulate((layer.parameters for layer in situation.cost.layers), initial=0))
    received = 0
    for origins, (first, last) in zip(candidate.origins, pairwise(candidate.cuts), strict=True):
        for origin, cells in Counter(origins).items():
            missing = sums[last] - sums[first]
            if origin != SPARE:
                start, stop = max(first, situation.cuts[origin]), min(last, situation.cuts[origin + 1])
                missing -= sums[max(start, stop)] - sums[start]
            received += cells * missing
    return received


class _Attempt(NamedTuple):
    """A candidate to be timed."""

    candidate: Candidate
    tries: int
    first: tuple[Taste, ...] | None = None
    """Tastes to begin with."""
    only_if_better: bool = False
    """Not to be tried where no order of its items can be better than the best so far."""


class _Search:
    def __init__(self, predictor: Predictor, freedom: Freedom, seeds: Sequence[Candidate]) -> None:
        self.predictor, self.freedom, self.seeds = predictor, freedom, seeds
        self.situation = predictor.situation
        self.partitioner = Partitioner(self.situation.cost, self.situation.memory_bytes, predictor.sums)
        self._known_loads: dict[object, tuple[StageLoad, ...]] = {}
        self.still = None if self.situation.lost_stages else stay(self.situation)
        """To do nothing."""
        self.best: Prediction | None = None
        self.nothing: Prediction | None = None
        self.tried: dict[Candidate, int] = {}
        """Most tries so far."""

    def attempts(self) -> Iterator[_Attempt]:
        """What to try, adapted to what was found."""
        for attempt in self._attempts():
            # Where orders are those of 1F1B, none is tried.
            yield attempt if self.freedom.orders else _Attempt(attempt.candidate, 0)

    def _attempts(self) -> Iterator[_Attempt]:
        situation, freedom = self.situation, self.freedom
        if self.still is not None:
            yield _Attempt(self.still, 0)
        for candidate in self.seeds:
            yield _Attempt(candidate, 8 if candidate.split else 2)
        likely = self._ranked(freedom.split)
        for candidate in likely[:4]:
            yield _Attempt(candidate, 1 if freedom.split else 0)
        if freedom.cells and situation.lost_stages:
            yield from self._neighbours(0, 32)
            yield from self._other_shares()
        if freedom.layers and "reshape" in freedom.deals and self.still is not None:
            reshaped = stay(situation, deal="reshape")
            if self._is_possible(reshaped):
                yield from self._partitioned(reshaped)
        for candidate in self._hopeful(likely[:4]):
            yield _Attempt(candidate, 3)
        # As long as ReCycle is searched by the policy of that name: ours is not behind it for want of tries.
        if self.still is not None:
            yield _Attempt(replace(self.still, split=freedom.split), 24, only_if_better=True)
        yield from self._neighbours(2, 8)
        ranked = self._ranked(False, likely) if freedom.split else likely
        for candidate in self._hopeful(ranked[:16]):
            yield _Attempt(candidate, 3)
        yield from self._refined(16)
        yield from self._neighbours(4, 16)
        yield from self._refined(32)
        for candidate in self._hopeful(ranked[16:]):
            yield _Attempt(candidate, 3)
        yield from self._neighbours(16, 32)
        yield from self._refined(128)

    def make(self, attempt: _Attempt) -> None:
        """Time a candidate and keep it if it is better."""
        candidate, tries = attempt.candidate, attempt.tries
        if attempt.first is None:
            if self.tried.get(candidate, -1) >= tries:
                return
            self.tried[candidate] = tries
        try:
            found = self.predictor.predict(
                candidate,
                tries,
                attempt.first,
                seed=self.predictor.evaluations,
                unless_s=self._limit_s(candidate) if attempt.only_if_better else None,
            )
        except Deadlock:
            self.predictor.evaluations += 1
            return
        if self.best is None:
            self.nothing = found if candidate == self.still else None
        if self.best is None or self._is_better(found, self.best):
            self.best = found

    def _limit_s(self, candidate: Candidate) -> float | None:
        """Below which a candidate's step is better than the best one."""
        if self.best is None:
            return None
        return objective_s(self.best, self.situation) / _price(candidate, self.situation)

    def _hopeful(self, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        """Those that may be better than the best so far."""
        for candidate in candidates:
            limit_s = self._limit_s(candidate)
            # An estimate is low by more than it errs where items are of unequal size.
            if limit_s is None or self.freedom.staggered or self._estimate_s(candidate) < limit_s * 1.002:
                yield candidate

    def _is_better(self, new: Prediction, old: Prediction) -> bool:
        new_s, old_s = objective_s(new, self.situation), objective_s(old, self.situation)
        if abs(new_s - old_s) > _SAME * min(new_s, old_s):
            return new_s < old_s
        return self._changes(new.candidate) < self._changes(old.candidate)

    def _changes(self, candidate: Candidate) -> tuple[int, int, int, bool]:
        moved = received_parameters(self.situation, candidate)
        return -sum(candidate.widths), moved, -candidate.size, candidate.split

    def _partitioned(self, candidate: Candidate) -> Iterator[_Attempt]:
        try:
            yield _Attempt(with_best_layers(self.situation, candidate, self.partitioner), 0)
        except NoFeasiblePlan:
            return

    def _refined(self, tries: int) -> Iterator[_Attempt]:
        """More orders like the best one."""
        if self.best is not None and self.best.found.tastes is not None:
            yield _Attempt(self.best.candidate, tries, self.best.found.tastes)

    def _ranked(self, split: bool, others: Sequence[Candidate] = ()) -> list[Candidate]:
        """All combinations that are worth a try, and others, by a rough estimate of their time."""
        found = {candidate: self._estimate_s(candidate) for candidate in others}
        for layout in list_layouts(self.situation, cells=self.freedom.cells):
            for size in self._sizes(len(layout.rows)):
                for deals in self._deals(layout, size):
                    plain = Candidate(
                        rows=layout.rows, origins=layout.origins, cuts=(), deals=deals, size=size, split=split
                    )
                    for cuts in self._cuts(plain):
                        candidate = replace(plain, cuts=cuts)
                        found.setdefault(candidate, self._estimate_s(candidate))
        # Those of one estimate stay in this order.
        return sorted(found, key=found.__getitem__)

    def _sizes(self, stages: int) -> list[int]:
        job = self.situation.job
        sizes = [job.micro_batch_size]
        if self.freedom.divide:
            per_row = job.num_microbatches // job.data_parallel
            for size in range(job.micro_batch_size - 1, 0, -1):
                divides = job.micro_batch_size % size == 0
                if divides and per_row * (job.micro_batch_size // size) <= _ITEMS_PER_STAGE * stages:
                    sizes.append(size)
        return sizes

    def _deals(self, layout: Layout, size: int) -> list[tuple[Deal, ...]]:
        """One for all stages; and for each stage the one that gives its busiest cell least."""
        job = divided(self.situation.job, size)
        possible: list[list[Deal]] = []
        for rows in layout.rows:
            if is_stock(job, rows):
                possible.append(["reroute"])
            else:
                possible.append([deal for deal in self.freedom.deals if is_possible(job, len(rows), deal)])
        if not all(possible):
            return []
        choices = [tuple(deal if deal in own else own[0] for own in possible) for deal in self.freedom.deals]
        choices.append(
            tuple(
                min(own, key=partial(busiest_share, job, len(rows)))
                for own, rows in zip(possible, layout.rows, strict=True)
            )
        )
        if self.predictor.exact:
            return list(dict.fromkeys(choices))
        # By class, deals that give busiest cells the same are the same.
        kept: dict[tuple[Share, ...], tuple[Deal, ...]] = {}
        for deals in choices:
            shares = (busiest_share(job, len(rows), deal) for rows, deal in zip(layout.rows, deals, strict=True))
            kept.setdefault(tuple(shares), deals)
        return list(kept.values())

    def _cuts(self, candidate: Candidate) -> list[tuple[int, ...]]:
        cuts: list[tuple[int, ...]] = []
        if self.freedom.layers:
            loads = self._loads(candidate)
            fills = [None] if self.freedom.staggered else [self._fill(candidate, loads), None]
            with suppress(NoFeasiblePlan):
                for fill in fills:
                    found = self.partitioner.find(loads, homes(self.situation, candidate), fill).cuts
                    if found not in cuts:
                        cuts.append(found)
        if candidate.num_stages == self.situation.num_stages and self.situation.cuts not in cuts:
            cuts.append(self.situation.cuts)
        return cuts

    def _loads(self, candidate: Candidate) -> tuple[StageLoad, ...]:
        key = (candidate.widths, candidate.deals, candidate.size)
        found = self._known_loads.get(key)
        if found is None:
            found = self._known_loads[key] = stage_loads(self.situation, candidate)
        return found

    def _fill(self, candidate: Candidate, loads: Sequence[StageLoad]) -> Fill:
        samples = sum(load.samples / load.items for load in loads) / len(loads)
        return Fill(samples, crossing(self.situation.cost, self.situation.link).seconds(samples), candidate.split)

    def _is_stock(self, candidate: Candidate, stage: int) -> bool:
        return len(candidate.rows[stage]) == self.situation.job.data_parallel

    def _is_possible(self, candidate: Candidate) -> bool:
        job = divided(self.situation.job, candidate.size)
        return all(
            is_stock(job, rows) or is_possible(job, len(rows), deal)
            for rows, deal in zip(candidate.rows, candidate.deals, strict=True)
        )

    def _estimate_s(self, candidate: Candidate) -> float:
        """Seconds that the step hardly falls below."""
        loads, tails = self._loads(candidate), self.predictor.tails(candidate)
        steady = self.freedom.staggered
        spans = self.partitioner.spans(candidate.cuts, loads, self._fill(candidate, loads), steady=steady)
        if not steady:
            return max(spans) + max(tails)
        # What is left of the pipeline's filling.
        busy = self.partitioner.stage_seconds(candidate.cuts, loads)
        passing = _FILL_LEFT * sum(seconds / load.items for seconds, load in zip(busy, loads, strict=True))
        return max(span + tail for span, tail in zip(spans, tails, strict=True)) + passing

    def _other_shares(self) -> Iterator[_Attempt]:
        """A cell from one stage to another, when all are dealt out anew; again from what got better."""
        seen: set[tuple[int, ...]] = set()
        best = self.best
        while best is not None:
            seen.add(best.candidate.widths)
            variants: list[tuple[float, Candidate]] = []
            for widths in self._shifted_widths(best.candidate):
                if widths in seen:
                    continue
                seen.add(widths)
                layout = seat_cells(self.situation, widths)
                other = replace(best.candidate, rows=layout.rows, origins=layout.origins, cuts=())
                variants += [(self._estimate_s(own), own) for own in self._with_cuts(other)]
            for _, candidate in sorted(variants, key=lambda variant: variant[0]):
                yield _Attempt(candidate, 0)
                if self.best is not best:
                    break
            if self.best is best:
                return
            best = self.best

    def _shifted_widths(self, candidate: Candidate) -> Iterator[tuple[int, ...]]:
        """Of all pairs of stages where they are few, else from the least to the most busy."""
        busy = self.partitioner.stage_seconds(candidate.cuts, self._loads(candidate))
        by_work = sorted(range(len(busy)), key=lambda stage: busy[stage])
        few = 2 if len(busy) > FEW_STAGES else FEW_STAGES
        for giver in by_work[:few]:
            for taker in reversed(by_work[-few:]):
                widths = list(candidate.widths)
                widths[giver] -= 1
                widths[taker] += 1
                if giver != taker and widths[giver] and widths[taker] <= self.situation.job.num_microbatches:
                    yield tuple(widths)

    def _with_cuts(self, plain: Candidate) -> list[Candidate]:
        return [replace(plain, cuts=cuts) for cuts in self._cuts(plain)]

    def _neighbours(self, tries: int, most: int) -> Iterator[_Attempt]:
        """A stage dealt otherwise, or one layer from one stage to another, those between passing theirs on; again from
        what got better.

        Args:
            tries: Orders like that of the best one.
            most: Of each best one: the most likely ones.
        """
        seen: set[Candidate] = set()
        best = self.best
        while best is not None:
            others = [*self._dealt_otherwise(best.candidate), *self._shifted(best.candidate)]
            likely = sorted(others, key=self._estimate_s)
            for candidate in self._hopeful(likely if self.freedom.staggered else likely[:most]):
                if candidate not in seen:
                    seen.add(candidate)
                    yield _Attempt(candidate, tries, None if self.freedom.staggered else best.found.tastes)
                    if self.best is not best:
                        break
            if self.best is best:
                return
            best = self.best

    def _dealt_otherwise(self, candidate: Candidate) -> Iterator[Candidate]:
        for stage in range(candidate.num_stages):
            for deal in self.freedom.deals:
                if deal != candidate.deals[stage]:
                    deals = (*candidate.deals[:stage], deal, *candidate.deals[stage + 1 :])
                    other = replace(candidate, deals=deals)
                    is_new = not self._is_stock(candidate, stage) and self._is_possible(other)
                    if is_new and self.partitioner.fits(other.cuts, self._loads(other)):
                        yield other

    def _shifted(self, candidate: Candidate) -> Iterator[Candidate]:
        if not self.freedom.layers:
            return
        stages = range(candidate.num_stages)
        loads = self._loads(candidate)
        for giver in stages:
            for taker in stages:
                cuts = list(candidate.cuts)
                for boundary in range(giver + 1, taker + 1):
                    cuts[boundary] -= 1
                for boundary in range(taker + 1, giver + 1):
                    cuts[boundary] += 1
                is_new = taker != giver and all(first < last for first, last in pairwise(cuts))
                if is_new and self.partitioner.fits(cuts, loads):
                    yield replace(candidate, cuts=tuple(cuts))
