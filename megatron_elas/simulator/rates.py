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
from collections.abc import Callable, Collection, Hashable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from megatron_elas.planner.finding import REGROUPING, RESTAGING, RUNTIME, as_job_allows
from megatron_elas.planner.policies import POLICIES, Lost, Policy, PolicyStep, ours, stock
from megatron_elas.planner.prediction import Predictor
from megatron_elas.planner.search import Freedom, stay
from megatron_elas.planner.situation import Situation
from megatron_elas.planner.step_plan import Effort
from megatron_elas.simulator.moved_state import Held, busiest_bytes
from megatron_elas.simulator.seats import Seat, Seats
from megatron_elas.spec.cluster import Cluster
from megatron_elas.spec.errors import BadUsage, NoFeasiblePlan
from megatron_elas.spec.job_profile import JobProfile

EXACT_ITEMS = 10_000
"""Most items (micro-batches times stages) of jobs that are simulated exactly unless asked otherwise."""
MOST_ROWS = 256
"""Rows of a job that stands for one of more rows."""
MOST_PIPELINES = 512
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
    held: Held | None = None
    """Which cells have which layers; None where rows have layers of their own."""

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
        staggered: Whether ours steps its optimizers stage by stage, as ReCycle does; today's runtime does not.
        step: Asked instead of the policy of that name, which it is a variant of.
    """

    def __init__(
        self,
        job: JobProfile,
        cluster: Cluster,
        policy: str,
        *,
        exact: bool | None = None,
        staggered: bool = False,
        step: Policy | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise BadUsage(f"there is no policy {policy!r}: name one of {', '.join(POLICIES)}")
        self.job, self.cluster, self.policy = job, cluster, policy
        self.begin = Situation.of(job, cluster)
        spec = job.spec
        self.exact = spec.pipeline_parallel * spec.num_microbatches <= EXACT_ITEMS if exact is None else exact
        self._step = step or POLICIES[policy]
        self._known: dict[Hashable, Rate | None] = {}
        self._of = _BY_SYMMETRY.get(policy, _by_load)
        if policy == "ours" and step is None:
            self._step = partial(ours, staggered=staggered) if self.exact else by_class(staggered=staggered)
        whole = Model.of(self.begin, spec.data_parallel, spec.num_microbatches // spec.data_parallel)
        if self.exact:
            whole = whole._replace(begin=self.begin)
        stock_s = stock(whole.begin).step_s + whole.ring_s
        self.stock_samples_per_s = self.begin.batch_samples / stock_s
        self.busy_j_per_sample = self._busy_j(whole.begin)
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
        own = self.exact or max(seats.missing_of_stage) >= seats.rows
        if own:
            key, model = _as_it_is(seats, self.begin)
        else:
            key, model = self._of(seats, self.begin)
        if key not in self._known:
            self._known[key] = self._ask(model(), known=own)
        return self._known[key]

    def moved_s(self, before: Rate, after: Rate, lost: Collection[Seat] = ()) -> float:
        """How long the busiest link is busy when the plan changes.

        Args:
            before: With the plan that there is.
            after: With the plan to be.
            lost: Seats whose cells are gone since ``before``.
        """
        if before.held is None or after.held is None:
            return 0.0
        begin = self.begin
        moved = busiest_bytes(begin.cost, before.held, after.held, lost, begin.job.data_parallel)
        return begin.link.transfer_s(moved)

    def _ask(self, model: Model, *, known: bool) -> Rate | None:
        try:
            found = self._step(model.begin, model.lost)
        except NoFeasiblePlan:
            return None
        return Rate(
            step_s=found.step_s + model.ring_s,
            samples=round(found.samples * self.begin.batch_samples / model.begin.batch_samples),
            cells=round(found.cells * model.rows / model.begin.job.data_parallel),
            held=None if found.candidate is None else Held.of(found.candidate, known=known),
        )

    def _busy_j(self, begin: Situation) -> float:
        """Joules that a sample's computing takes at the nominal clock, beyond what waiting devices draw."""
        if begin.power is None:
            return 0.0
        found = Predictor(begin, exact=self.exact, staggered=False).predict(stay(begin), 0)
        assert found.energy_j is not None
        waiting_j = begin.power.waiting_w * found.step_s * begin.num_cells * begin.job.tensor_parallel
        return (found.energy_j - waiting_j) / begin.batch_samples


def by_class(*, staggered: bool = False) -> Policy:
    """Our planner for situations by symmetry. A cell does not change its stage, as it would stand for many, unless a
    stage has none left.
    """

    def step(begin: Situation, lost: Lost) -> PolicyStep:
        gone = Counter(stage for stage, _ in lost)
        empty = any(gone[stage] == len(rows) for stage, rows in enumerate(begin.rows))
        return ours(begin, lost, staggered=staggered, effort=BY_CLASS, freedom=Freedom(cells=empty))

    return step


def today(begin: Situation, lost: Lost) -> PolicyStep:
    """Our planner with the freedom that a running job has that never migrates: samples to peers, in items of any size
    in the order of 1F1B at nominal clocks; layers and cells move only when memory or a lost stage makes them. Raises
    NoFeasiblePlan.
    """
    gone = Counter(stage for stage, _ in lost)
    empty = any(gone[stage] == len(rows) for stage, rows in enumerate(begin.rows))
    exact = begin.num_stages * begin.job.num_microbatches <= EXACT_ITEMS
    effort = Effort(evaluations=BY_CLASS.evaluations, exact=exact)
    for freedom in () if empty else (RUNTIME, RESTAGING):
        with suppress(NoFeasiblePlan):
            allowed = as_job_allows(freedom, begin.job, exact=exact)
            return _at_nominal_clocks(ours(begin, lost, effort=effort, freedom=allowed))
    allowed = as_job_allows(REGROUPING, begin.job, exact=exact)
    return _at_nominal_clocks(ours(begin, lost, effort=effort, freedom=allowed))


def _at_nominal_clocks(found: PolicyStep) -> PolicyStep:
    assert found.plan is not None
    return replace(found, step_s=found.plan.nominal.timed.step_s)


class Model(NamedTuple):
    """A situation that stands for all that are alike."""

    begin: Situation
    lost: set[Seat]
    rows: int
    """Of the job, that those of this situation stand for."""

    @staticmethod
    def of(begin: Situation, rows: int, each: int, most: int = MOST_ROWS) -> Model:
        """Nothing lost, of so many rows with so many micro-batches each, in no more than ``most`` rows."""
        own = min(rows, most)
        situation = replace(
            begin,
            job=replace(begin.job, data_parallel=own, num_microbatches=each * own),
            rows=(tuple(range(own)),) * begin.num_stages,
            held=None,
        )
        return Model(situation, set(), rows)

    @property
    def ring_s(self) -> float:
        """Latency of a reduction and an all-gather that go round more rows than this situation has."""
        return 2 * (self.rows - self.begin.job.data_parallel) * self.begin.link.latency_s


Alike = tuple[Hashable, Callable[[], Model]]
"""What situations that are alike have in common, and what stands for them."""


def _as_it_is(seats: Seats, begin: Situation) -> Alike:
    return frozenset(seats.missing), lambda: Model(begin, set(seats.missing), seats.rows)


def _by_load(seats: Seats, begin: Situation) -> Alike:
    """By the samples of the busiest cell of every stage, stages in the middle in ascending order."""
    job, batch = begin.job, begin.batch_samples
    loads = [-(-batch // (job.data_parallel - missing)) for missing in seats.missing_of_stage]
    key = (loads[0], *sorted(loads[1:-1]), *loads[1:][-1:])

    def find() -> Model:
        model = Model.of(begin, job.data_parallel, job.num_microbatches // job.data_parallel)
        own = model.begin.job.data_parallel
        widths = [max(1, -(-model.begin.batch_samples // load)) for load in key]
        return model._replace(lost={(stage, row) for stage, width in enumerate(widths) for row in range(width, own)})

    return key, find


def _by_whole_rows(seats: Seats, begin: Situation) -> Alike:
    """By how many micro-batches the busiest of the whole rows has: as a job of as few rows as have no more."""
    count = begin.job.num_microbatches
    whole = seats.rows - len(seats.missing_of_row)
    if not whole:
        return 0, _as_it_is(seats, begin)[1]
    each = -(-count // whole)
    return each, lambda: Model.of(begin, -(-count // each), each)


def _by_cells(seats: Seats, begin: Situation) -> Alike:
    """By the number of rows that the cells make up, as far as it divides the batch."""
    count = begin.job.num_microbatches
    rows = next((rows for rows in range(seats.seated // seats.stages, 0, -1) if count % rows == 0), 0)
    if not rows:
        return 0, _as_it_is(seats, begin)[1]
    return rows, lambda: Model.of(begin, rows, count // rows)


def _by_depths(seats: Seats, begin: Situation) -> Alike:
    """By how many rows miss how many cells, in as many rows as stand for all."""
    job = begin.job
    scale = min(1.0, MOST_PIPELINES / job.data_parallel)
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
        model = Model.of(begin, job.data_parallel, job.num_microbatches // job.data_parallel, MOST_PIPELINES)
        return model._replace(lost={(stage, row) for row, missing in enumerate(numbers) for stage in range(missing)})

    return key, find


_BY_SYMMETRY: dict[str, Callable[[Seats, Situation], Alike]] = {
    "torchft": _by_whole_rows,
    "restart": _by_cells,
    "oobleck": _by_depths,
}
