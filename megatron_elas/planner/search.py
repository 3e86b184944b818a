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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

from megatron_elas.planner.dataflow import DEALS, Deal, busiest_share, is_possible, is_stock
from megatron_elas.planner.layouts import FEW_STAGES, Layout, homes_of, list_layouts, seat_cells
from megatron_elas.planner.partition import Partitioner
from megatron_elas.planner.prediction import Candidate, Prediction, Predictor, stage_loads
from megatron_elas.planner.situation import SPARE, Situation, divided
from megatron_elas.schedule.timing import Deadlock
from megatron_elas.spec.errors import NoFeasiblePlan

CELL_MOVE = 0.01
"""Share of the step time that a plan has to win by moving cells."""
_SAME = 1e-9
"""Times as near as this are equal: sums in another order."""
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
    for candidate, tries in state.steps():
        if state.best is not None and predictor.evaluations + max(1, tries) > evaluations:
            exhausted = False
            break
        state.tell(candidate, tries if freedom.orders else 0)
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
    candidate = prediction.candidate
    if situation is not None and situation.lost_stages:
        layers = situation.cost.layers
        stage = sum(layer.parameters for layer in layers) / situation.num_stages
        moved = received_parameters(situation, candidate) / max(1.0, stage * sum(candidate.widths))
    else:
        moved = float(any(len(set(own) - {SPARE}) > 1 for own in candidate.origins))
    return prediction.step_s * (1 + CELL_MOVE * moved)


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


class _Search:
    def __init__(self, predictor: Predictor, freedom: Freedom, seeds: Sequence[Candidate]) -> None:
        self.predictor, self.freedom, self.seeds = predictor, freedom, seeds
        self.situation = predictor.situation
        self.partitioner = Partitioner(self.situation.cost, self.situation.memory_bytes)
        self.still = None if self.situation.lost_stages else stay(self.situation)
        """To do nothing."""
        self.best: Prediction | None = None
        self.nothing: Prediction | None = None
        self.tried: dict[Candidate, int] = {}
        """Most tries so far."""

    def steps(self) -> Iterator[tuple[Candidate, int]]:
        """(candidate, tries), adapted to what was told."""
        situation, freedom = self.situation, self.freedom
        if self.still is not None:
            yield self.still, 0
        for candidate in self.seeds:
            yield candidate, 8 if candidate.split else 2
        ranked = self._ranked()
        quick = 1 if freedom.split else 0
        for candidate in ranked[:4]:
            yield candidate, quick
        if freedom.cells and situation.lost_stages:
            yield from self._neighbours(0)
            yield from self._other_shares()
        if freedom.layers and "reshape" in freedom.deals and self.still is not None:
            reshaped = stay(situation, deal="reshape")
            if self._is_possible(reshaped):
                yield from self._partitioned(reshaped)
        for candidate in ranked[:4]:
            yield candidate, 3
        # As long as ReCycle is searched by the policy of that name: ours is not behind it for want of tries.
        if self.still is not None:
            yield from self._thorough(replace(self.still, split=freedom.split), 24)
        yield from self._neighbours(3)
        for candidate in ranked[4:16]:
            yield candidate, 3
        yield from self._thorough(self.best.candidate if self.best else None, 16)
        yield from self._neighbours(8)
        for candidate in ranked[16:]:
            yield candidate, 3
        yield from self._neighbours(16)
        yield from self._thorough(self.best.candidate if self.best else None, 64)

    def tell(self, candidate: Candidate, tries: int) -> None:
        """Time a candidate and keep it if it is better."""
        if self.tried.get(candidate, -1) >= tries:
            return
        self.tried[candidate] = tries
        try:
            found = self.predictor.predict(candidate, tries)
        except Deadlock:
            self.predictor.evaluations += 1
            return
        if candidate == self.still and len(self.tried) == 1:
            self.nothing = found
        if self.best is None or self._is_better(found, self.best):
            self.best = found

    def _is_better(self, new: Prediction, old: Prediction) -> bool:
        new_s, old_s = objective_s(new, self.situation), objective_s(old, self.situation)
        if abs(new_s - old_s) > _SAME * min(new_s, old_s):
            return new_s < old_s
        return self._changes(new.candidate) < self._changes(old.candidate)

    def _changes(self, candidate: Candidate) -> tuple[int, int, int, bool]:
        moved = received_parameters(self.situation, candidate)
        return -sum(candidate.widths), moved, -candidate.size, candidate.split

    def _thorough(self, candidate: Candidate | None, tries: int) -> Iterator[tuple[Candidate, int]]:
        if candidate is not None:
            yield candidate, tries

    def _partitioned(self, candidate: Candidate) -> Iterator[tuple[Candidate, int]]:
        try:
            yield with_best_layers(self.situation, candidate, self.partitioner), 0
        except NoFeasiblePlan:
            return

    def _ranked(self) -> list[Candidate]:
        """All combinations that are worth a try, by a rough estimate of their time."""
        found: dict[Candidate, tuple[float, int]] = {}
        for layout in list_layouts(self.situation, cells=self.freedom.cells):
            for size in self._sizes(len(layout.rows)):
                for deals in self._deals(layout, size):
                    plain = Candidate(
                        rows=layout.rows, origins=layout.origins, cuts=(), deals=deals, size=size, split=False
                    )
                    for cuts in self._cuts(plain):
                        whole_s, split_s = self._estimates(replace(plain, cuts=cuts))
                        if self.freedom.split:
                            found.setdefault(replace(plain, cuts=cuts, split=True), (split_s, len(found)))
                        found.setdefault(replace(plain, cuts=cuts), (whole_s, len(found)))
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
        choices: dict[tuple[Deal, ...], None] = {}
        for deal in self.freedom.deals:
            choices[tuple(deal if deal in own else own[0] for own in possible)] = None
        least = [
            min(own, key=partial(busiest_share, job, len(rows)))
            for own, rows in zip(possible, layout.rows, strict=True)
        ]
        choices[tuple(least)] = None
        return list(choices)

    def _cuts(self, candidate: Candidate) -> list[tuple[int, ...]]:
        cuts = []
        if self.freedom.layers:
            with suppress(NoFeasiblePlan):
                cuts.append(with_best_layers(self.situation, candidate, self.partitioner).cuts)
        if candidate.num_stages == self.situation.num_stages and self.situation.cuts not in cuts:
            cuts.append(self.situation.cuts)
        return cuts

    def _is_possible(self, candidate: Candidate) -> bool:
        job = divided(self.situation.job, candidate.size)
        return all(
            is_stock(job, rows) or is_possible(job, len(rows), deal)
            for rows, deal in zip(candidate.rows, candidate.deals, strict=True)
        )

    def _estimates(self, candidate: Candidate) -> tuple[float, float]:
        """Seconds without and with split backward: the busiest stage, and what others take to fill the pipeline."""
        loads = stage_loads(self.situation, candidate)
        busy = self.partitioner.stage_seconds(candidate.cuts, loads)
        items = [seconds / load.items for seconds, load in zip(busy, loads, strict=True)]
        tail = max(self.predictor.tails(candidate))
        whole, split = (
            max(seconds + share * (sum(items) - own) for seconds, own in zip(busy, items, strict=True)) + tail
            for share in ((0.15, 0.15) if self.freedom.staggered else (1.0, 0.45))
        )
        return whole, split

    def _other_shares(self) -> Iterator[tuple[Candidate, int]]:
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
                variants += [(self._estimates(own)[0], own) for own in self._with_cuts(other)]
            for _, candidate in sorted(variants, key=lambda variant: variant[0]):
                yield candidate, 0
                if self.best is not best:
                    break
            if self.best is best:
                return
            best = self.best

    def _shifted_widths(self, candidate: Candidate) -> Iterator[tuple[int, ...]]:
        """Of all pairs of stages where they are few, else from the least to the most busy."""
        busy = self.partitioner.stage_seconds(candidate.cuts, stage_loads(self.situation, candidate))
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

    def _neighbours(self, tries: int) -> Iterator[tuple[Candidate, int]]:
        """One layer from one stage to another, those between passing theirs on; again from what got better."""
        if not self.freedom.layers:
            return
        seen: set[tuple[int, ...]] = set()
        best = self.best
        while best is not None:
            for candidate in self._shifted(best.candidate):
                if candidate.cuts not in seen:
                    seen.add(candidate.cuts)
                    yield candidate, tries if candidate.split else min(tries, 2)
                    if self.best is not best:
                        break
            if self.best is best:
                return
            best = self.best

    def _shifted(self, candidate: Candidate) -> Iterator[Candidate]:
        busy = self.partitioner.stage_seconds(candidate.cuts, stage_loads(self.situation, candidate))
        slow_first = sorted(range(len(busy)), key=lambda stage: -busy[stage])
        for giver in slow_first[: max(2, len(busy) // 2)]:
            for taker in reversed(slow_first):
                cuts = list(candidate.cuts)
                for boundary in range(giver + 1, taker + 1):
                    cuts[boundary] -= 1
                for boundary in range(taker + 1, giver + 1):
                    cuts[boundary] += 1
                if taker != giver and all(first < last for first, last in pairwise(cuts)):
                    yield replace(candidate, cuts=tuple(cuts))
