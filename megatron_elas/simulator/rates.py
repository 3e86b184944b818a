"""How fast a policy trains with the cells that are left, kept for situations that come again.

Exact: the policy is asked about the very seats that are missing, at the resolution it chooses itself.

By symmetry: it is asked about one situation for all that are alike. Cells of a stage are alike, and so are the stages
between the first and the last. A step's time follows from how many samples the busiest cell of each stage has, which is
a whole number: all numbers of cells with the same one are alike. Where rows are whole or idle, only their number
counts; of pipelines of different lengths, how many rows miss how many cells. Jobs of very many rows are asked about
with fewer rows (``MOST_ROWS``, ``MOST_PIPELINES``) and as many samples for each; what the ring of more rows waits for
its latency is added.

Policies time large jobs by class, see ``planner.prediction``. Both together were within 2.1 % of the goodput of exact
simulations on grids of 24 to 96 cells, but for ``elaswave``, which they see up to 7 % too fast (2 % with 24 rows):
items of different sizes hold each other up, which only exact timing sees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from megatron_elas.planner.policies import POLICIES, Policy, ours, stock
from megatron_elas.planner.prediction import Predictor
from megatron_elas.planner.search import Freedom, stay
from megatron_elas.planner.situation import Situation
from megatron_elas.planner.step_plan import Effort
from megatron_elas.simulator.seats import Seat, Seats
from megatron_elas.spec.cluster import Cluster
from megatron_elas.spec.errors import BadUsage, NoFeasiblePlan
from megatron_elas.spec.job_profile import JobProfile

EXACT_ITEMS = 10_000
"""Most items (micro-batches times stages) of jobs that are simulated exactly unless asked otherwise."""
MOST_ROWS = 256
"""Rows of a job that stands for one of more rows."""
MOST_PIPELINES = 1024
"""The same where each row is a pipeline of its own."""
BY_CLASS = Effort(evaluations=12, exact=False)
"""Of our planner for situations by symmetry; more evaluations gain less than a percent at 100,000 devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A step of a policy."""

    step_s: float
    samples: int
    cells: int
    """That compute; more may have a seat and wait."""

    @property
    def samples_per_s(self) -> float:
        """Throughput."""
        return self.samples / self.step_s


class StepRates:
    """Of one policy for one job on one cluster. May be shared by simulations of both.

    Args:
        job: On its grid.
        cluster: Where.
        policy: One of ``planner.policies.POLICIES``.
        exact: Whether to ask about every situation; None: if the job is small.
        step: Asked instead of the policy of that name, which it is a variant of.
    """

    def __init__(
        self, job: JobProfile, cluster: Cluster, policy: str, *, exact: bool | None = None, step: Policy | None = None
    ) -> None:
        if policy not in POLICIES:
            raise BadUsage(f"there is no policy {policy!r}: name one of {', '.join(POLICIES)}")
        self.job, self.cluster, self.policy = job, cluster, policy
        self.begin = Situation.of(job, cluster)
        spec = job.spec
        self.exact = spec.pipeline_parallel * spec.num_microbatches <= EXACT_ITEMS if exact is None else exact
        self._step = step or POLICIES[policy]
        self._known: dict[Hashable, Rate | None] = {}
        self._model, self._ring_s = self.begin, 0.0
        self._of = _BY_SYMMETRY.get(policy, _by_load)
        if not self.exact:
            most = {"oobleck": MOST_PIPELINES}.get(policy, MOST_ROWS)
            if policy in _ANY_ROWS and spec.data_parallel > most:
                self._model = _with_rows(self.begin, most, spec.num_microbatches // spec.data_parallel)
                # A reduction and an all-gather, each once round the ring.
                self._ring_s = 2 * (spec.data_parallel - most) * self.begin.link.latency_s
            if policy == "ours" and step is None:
                self._step = by_class()
        whole = stock(self.begin)
        self.stock_samples_per_s = whole.samples_per_s
        self.busy_j_per_sample = self._busy_j(whole.step_s)
        own = self.rate(Seats(spec.pipeline_parallel, spec.data_parallel, 0))
        if own is None:
            raise NoFeasiblePlan(f"{policy} has no plan for {job.name} on {cluster.name}, even with all its devices")
        self.own = own

    @property
    def asked(self) -> int:
        """Situations that the policy was asked about."""
        return len(self._known)

    def rate(self, seats: Seats) -> Rate | None:
        """With some seats missing; None when the policy cannot go on."""
        # No stage of what stands for others is without a cell.
        if self.exact or max(seats.missing_of_stage) >= self.begin.job.data_parallel:
            return self._ask(frozenset(seats.missing), lambda: Model(self.begin, set(seats.missing), 1.0))
        key, model = self._of(seats, self.begin, self._model)
        return self._ask(key, model)

    def _ask(self, key: Hashable, model: Callable[[], Model]) -> Rate | None:
        if key not in self._known:
            self._known[key] = self._answer(model())
        return self._known[key]

    def _answer(self, model: Model) -> Rate | None:
        begin = model.begin
        try:
            found = self._step(begin, model.lost)
        except NoFeasiblePlan:
            return None
        return Rate(
            step_s=found.step_s + (self._ring_s if begin is self._model else 0.0),
            samples=round(found.samples * self.begin.batch_samples / begin.batch_samples),
            cells=round(found.cells * model.rows_each),
        )

    def _busy_j(self, step_s: float) -> float:
        """Joules that a sample's computing takes at the nominal clock, beyond what waiting devices draw."""
        begin = self.begin
        if begin.power is None:
            return 0.0
        energy = Predictor(begin, exact=self.exact, staggered=False).predict(stay(begin), 0).energy_j
        assert energy is not None
        waiting = begin.power.waiting_w * step_s * begin.num_cells * begin.job.tensor_parallel
        return (energy - waiting) / begin.batch_samples


def by_class(*, staggered: bool = False) -> Policy:
    """Our planner for situations by symmetry. A cell does not change its stage: it would stand for many."""
    return partial(ours, staggered=staggered, effort=BY_CLASS, freedom=Freedom(cells=False))


_ANY_ROWS = frozenset({"ours", "elaswave", "recycle", "oobleck"})
"""Policies to which the number of rows is nothing but a number; others share micro-batches by whole rows."""


class Model(NamedTuple):
    """A situation that stands for all that are alike."""

    begin: Situation
    lost: set[Seat]
    rows_each: float
    """Rows of the job that one of these rows stands for."""


Alike = tuple[Hashable, Callable[[], Model]]
"""What situations that are alike have in common, and what stands for them."""


def _by_load(seats: Seats, begin: Situation, model: Situation) -> Alike:
    """By the samples of the busiest cell of every stage, stages in the middle in ascending order."""
    rows, batch = begin.job.data_parallel, begin.batch_samples
    loads = [-(-batch // (rows - missing)) for missing in seats.missing_of_stage]
    key = (loads[0], *sorted(loads[1:-1]), *loads[1:][-1:])

    def find() -> Model:
        own = model.job.data_parallel
        widths = [max(1, -(-model.batch_samples // load)) for load in key]
        lost = {(stage, row) for stage, width in enumerate(widths) for row in range(width, own)}
        return Model(model, lost, rows / own)

    return key, find


def _by_whole_rows(seats: Seats, begin: Situation, model: Situation) -> Alike:
    """By how many micro-batches the busiest of the whole rows has: as a job of as few rows as have no more."""
    job = begin.job
    whole = job.data_parallel - len(seats.missing_of_row)
    each = -(-job.num_microbatches // whole) if whole else 0

    def find() -> Model:
        if not each:
            return Model(begin, set(seats.missing), 1.0)
        return Model(_with_rows(begin, -(-job.num_microbatches // each), each), set(), 1.0)

    return each, find


def _by_cells(seats: Seats, begin: Situation, model: Situation) -> Alike:
    """By the number of rows that the cells make up."""
    whole = seats.seated // begin.num_stages
    lost = {(stage, row) for stage in range(begin.num_stages) for row in range(whole, seats.rows)}
    return whole, lambda: Model(begin, lost, 1.0)


def _by_depths(seats: Seats, begin: Situation, model: Situation) -> Alike:
    """By how many rows miss how many cells, in as many rows as the model has."""
    scale = model.job.data_parallel / begin.job.data_parallel
    counts = Counter(seats.missing_of_row.values())
    scaled = []
    # From the emptiest rows on; what rounding adds to some is taken from the next.
    exact = given = 0.0
    for missing in sorted(counts, reverse=True):
        exact += counts[missing] * scale
        number = round(exact - given)
        given += number
        scaled.append((missing, number))
    key = tuple(pair for pair in scaled if pair[1])

    def find() -> Model:
        numbers = (missing for missing, number in key for _ in range(number))
        lost = {(stage, row) for row, missing in enumerate(numbers) for stage in range(missing)}
        return Model(model, lost, 1 / scale)

    return key, find


_BY_SYMMETRY: dict[str, Callable[[Seats, Situation, Situation], Alike]] = {
    "torchft": _by_whole_rows,
    "restart": _by_cells,
    "oobleck": _by_depths,
}


def _with_rows(begin: Situation, rows: int, each: int) -> Situation:
    job = begin.job
    return replace(
        begin,
        job=replace(job, data_parallel=rows, num_microbatches=each * rows),
        rows=(tuple(range(rows)),) * begin.num_stages,
        held=None,
    )
