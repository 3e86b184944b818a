"""The plan of four axes for a step: dataflow, graph, frequency, randomness; with what it was chosen over, and why.

``make_plan`` gives a good one at once, ``improve_plan`` a better one later, to move to while training goes on.
``planner.plan`` makes the running job's plan of it, with the freedom that the runtime has today.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron_elas.planner import clocks as _clocks
from megatron_elas.planner.backups import place_backups
from megatron_elas.planner.clocks import Clocked
from megatron_elas.planner.dataflow import Dealt, deal_items, deal_stages, is_stock
from megatron_elas.planner.layer_moves import Cell as CellName
from megatron_elas.planner.layer_moves import SliceMove, list_moves, ring_backups
from megatron_elas.planner.layouts import Layout
from megatron_elas.planner.prediction import Candidate, Prediction, Predictor
from megatron_elas.planner.search import Freedom, as_level_allows, homes, search
from megatron_elas.planner.seating import seat_workers
from megatron_elas.planner.situation import SPARE, Situation, divided
from megatron_elas.spec.items import StageItems
from megatron_elas.spec.layout import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long to look for a plan. Counted, not measured, so that the same inputs give the same plan."""

    evaluations: int
    """Most orders to time."""
    exact: bool
    """Time every item of every cell; else one cell for each stage, which is as fast for any number of workers."""


_LISTED = 8
"""Most rows that are named one by one."""
QUICK = Effort(evaluations=3, exact=False)
"""While workers wait for the plan."""
THOROUGH = Effort(evaluations=120, exact=True)
"""While training goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Which draws a cell makes. A draw is keyed by (seed, step, sample, layer, site), so this says all there is."""

    stage: int
    cell: int
    layers: tuple[int, int]
    """First, and one past the last."""
    samples: tuple[tuple[int, int], ...]
    """Ranges of the global batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What was chosen for a situation."""

    situation: Situation
    prediction: Prediction
    nothing: Prediction | None
    """To do nothing: layers stay, whole micro-batches move, 1F1B. None: it does not fit the memory."""
    nominal: Clocked
    boosted: Clocked
    """The busiest stages faster."""
    slowed: Clocked
    """Instead: nominal clocks, with stages that wait slower. Less energy, for a step that is hardly longer."""
    freedom: Freedom
    effort: Effort
    evaluations: int
    exhausted: bool
    """Nothing was left to try."""

    @property
    def candidate(self) -> Candidate:
        """Cells, layers and items."""
        return self.prediction.candidate

    @property
    def step_s(self) -> float:
        """Predicted, at the chosen clocks, which are the boosted ones."""
        return self.boosted.timed.step_s

    @property
    def clocks(self) -> tuple[float, ...]:
        """Of every stage."""
        return self.boosted.clocks

    def moved_layers(self) -> tuple[tuple[int, int, int], ...]:
        """(layer, stage before, stage to be) of layers that the stage's cells, most of them, do not have now."""
        own = homes(self.situation, self.candidate)
        return tuple(
            (layer, self.situation.home(layer), stage)
            for stage, (first, last) in enumerate(pairwise(self.candidate.cuts))
            for layer in range(first, last)
            if own[layer] != stage
        )

    def moves(self, backups: Mapping[CellName, CellName] | None = None) -> Iterator[SliceMove]:
        """Which slice of which layer's state goes from which cell to which.

        Args:
            backups: Who holds the copy of a lost cell's slices; None: the next cell of its stage that is left.

        Raises:
            StateInvalid: A lost cell has no backup that is left.
        """
        held = self.situation.held or self.situation.rows
        if backups is None:
            backups = ring_backups(held, self.situation.rows)
        return list_moves(self.situation, self.candidate, held, backups)

    def moved_bytes(self) -> int:
        """Of optimizer state, all lanes, that some cell sends to another; weights are made of it."""
        count = sum(move.numel for move in self.moves())
        return count * self.situation.cost.optimizer_bytes * self.situation.job.tensor_parallel

    def items(self, stage: int) -> StageItems:
        """Of every cell of a stage."""
        job = divided(self.situation.job, self.candidate.size)
        return deal_items(job, self.candidate.names[stage], self.candidate.deals[stage])

    def all_items(self, known: Dealt | None = None) -> tuple[StageItems, ...]:
        """Of every stage and cell, see ``deal_stages``."""
        job = divided(self.situation.job, self.candidate.size)
        return deal_stages(job, self.candidate.names, self.candidate.deals, known)

    def streams(self) -> tuple[Stream, ...]:
        """Which cell draws the random numbers of which samples in which layers."""
        streams = []
        for stage, (layers, items) in enumerate(zip(pairwise(self.candidate.cuts), self.all_items(), strict=True)):
            for cell, own in enumerate(items):
                samples = _joined(sorted(part for item in own for part in item.ranges))
                streams.append(Stream(stage=stage, cell=cell, layers=layers, samples=samples))
        return tuple(streams)

    def place(
        self, old: Placement, domains: Mapping[int, str], *, before: Placement | None = None, replicas: int = 1
    ) -> tuple[Placement, tuple[tuple[int, int], ...]]:
        """Workers in the plan's cells, and (owner, backup) in different failure domains where there are such.

        Args:
            old: Without the lost workers. Cells that move may get another row, see ``Candidate.names``; workers of
                cells that the plan does not seat are spare.
            domains: Of every worker.
            before: With the lost workers: spare ones keep the lanes that they had in it where they can.
            replicas: Backups of every worker.
        """
        placement = seat_workers(self.candidate, old, self.situation.job.tensor_parallel, before or old)
        return placement, place_backups(placement, domains, replicas)

    def carried_out(self) -> Situation:
        """The situation once cells, layers and state are where the plan wants them; what the next loss starts from."""
        spares = self.situation.num_cells - sum(self.candidate.widths)
        return replace(self.situation, cuts=self.candidate.cuts, rows=self.candidate.names, held=None, spares=spares)

    def explain(self) -> str:
        """What the plan does and why, in sentences."""
        return "\n".join(
            [*self._explain_cells(), *self._explain_work(), *self._explain_time(), *self._explain_clocks()]
        )

    def _explain_cells(self) -> list[str]:
        now, new = self.situation, self.candidate
        widths = " ".join(map(str, new.widths))
        layout = Layout(new.rows, new.origins)
        lines = [f"Cells per stage: {widths} ({now.surviving_share:.1%} of the cells at the job's begin)."]
        if new.num_stages != now.num_stages:
            lines.append(f"The pipeline has {new.num_stages} stages instead of {now.num_stages}.")
        for stage, (origins, rows) in enumerate(zip(new.origins, new.rows, strict=True)):
            for origin in sorted(set(origins) - {layout.homes[stage]}):
                own = [row for other, row in zip(origins, rows, strict=True) if other == origin]
                if origin == SPARE:
                    lines.append(f"Spare workers make {_count(len(own), 'cell')} of stage {stage}.")
                    continue
                which = f"{len(own)} rows" if len(own) > _LISTED else f"row{'s' * (len(own) > 1)} {_words(own)}"
                was = f"stage {origin}" if new.num_stages == now.num_stages else f"what was stage {origin}"
                lines.append(f"Stage {stage} gets {which} of {was}.")
        layers = [last - first for first, last in pairwise(new.cuts)]
        text = (
            f"{_count(len(self.moved_layers()), 'layer')} to other stages; {self.moved_bytes() / 1e9:.1f} GB are sent"
        )
        lines.append(f"Layers per stage: {' '.join(map(str, layers))}; {text}.")
        return lines

    def _explain_work(self) -> list[str]:
        new, job = self.candidate, divided(self.situation.job, self.candidate.size)
        lines = []
        if new.size != self.situation.job.micro_batch_size:
            lines.append(
                f"Micro-batches are cut into parts of {new.size} samples: shorter items leave smaller bubbles."
            )
        words = {
            "reroute": "takes whole micro-batches of lost rows over",
            "reshape": "runs larger micro-batches, as many as before",
            "mix": "takes whole micro-batches over and shares the last ones sample by sample",
        }
        for stage, (rows, deal) in enumerate(zip(new.rows, new.deals, strict=True)):
            if len(rows) > job.data_parallel:
                lines.append(f"Stage {stage} deals its micro-batches to more cells than there are rows.")
            elif not is_stock(job, rows):
                lines.append(f"Stage {stage} {words[deal]}.")
        if job.keeps_micro_batches:
            gradients = ", and gradients are fp16" if job.fp16 else ""
            lines.append(f"Micro-batches are neither cut nor joined: consistency is {job.consistency}{gradients}.")
        split = any(self.prediction.schedule.is_split(*place) for place in self.prediction.schedule.cells())
        if split:
            lines.append("Backward is split: weight gradients fill what would be bubbles.")
        if self.freedom.staggered:
            lines.append("Stages step their optimizers one by one; norms are checked after the fact.")
        return lines

    def _explain_time(self) -> list[str]:
        how = "every item on every cell" if self.effort.exact else "one cell for each stage"
        step = self.prediction.step_s
        lines = [f"Predicted step: {step:.4g} s ({how} timed; {_count(self.evaluations, 'order')} tried)."]
        if self.situation.lost_stages:
            lines.append("To do nothing is not possible: a stage has no cell left.")
        elif self.nothing is None:
            lines.append("To do nothing does not fit the memory.")
        else:
            lines.append(
                f"To do nothing takes {self.nothing.step_s:.4g} s, {self.nothing.step_s / step:.2f} times as long."
            )
        busy = self.nominal.timed.busy_s
        stage = busy.index(max(busy))
        lines.append(
            f"Stage {stage} is the busiest: {busy[stage]:.4g} s, {busy[stage] / step:.0%} of the step; "
            f"no order of these items is faster than {self.prediction.bound_s:.4g} s."
        )
        return lines

    def _explain_clocks(self) -> list[str]:
        if self.situation.clock is None:
            return []
        lines = []
        for name, clocked in (
            ("nominal", self.nominal),
            ("boosted", self.boosted),
            ("with waiting stages slowed", self.slowed),
        ):
            energy = "" if clocked.timed.energy_j is None else f", {clocked.timed.energy_j / 1e3:.4g} kJ"
            settings = " ".join(f"{clock:g}" for clock in clocked.clocks)
            lines.append(f"Clocks {name}: {settings}: {clocked.timed.step_s:.4g} s{energy}.")
        return lines


def make_plan(
    situation: Situation, freedom: Freedom | None = None, effort: Effort = QUICK, seeds: tuple[Candidate, ...] = ()
) -> StepPlan:
    """A plan for a situation.

    Args:
        situation: Who is left, and what the layers cost.
        freedom: What may change; None: everything that a synchronous step allows. Jobs that keep their micro-batches
            have less, see ``search.as_level_allows``.
        effort: How long to look.
        seeds: Tried first, such as the candidates of earlier plans.

    Raises:
        NoFeasiblePlan: Nothing fits the memory.
    """
    freedom = as_level_allows(freedom or Freedom(), situation.job)
    predictor = Predictor(situation, exact=effort.exact, staggered=freedom.staggered)
    found = search(predictor, freedom, effort.evaluations, seeds)
    nominal = _clocks.nominal(predictor, found.best)
    return StepPlan(
        situation=situation,
        prediction=found.best,
        nothing=found.nothing,
        nominal=nominal,
        boosted=_clocks.boost(predictor, found.best, nominal),
        slowed=_clocks.slow(predictor, found.best, nominal),
        freedom=freedom,
        effort=effort,
        evaluations=found.evaluations,
        exhausted=found.exhausted,
    )


def improve_plan(plan: StepPlan, effort: Effort = THOROUGH) -> StepPlan:
    """A plan that is no slower, at the resolution of the new effort."""
    return make_plan(plan.situation, plan.freedom, effort, (plan.candidate,))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _words(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


def _joined(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
