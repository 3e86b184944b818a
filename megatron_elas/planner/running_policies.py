"""What a running job does when another system's policy plans for it, for comparisons in the same runtime.

Each is what ``planner.policies`` says of it, as far as the runtime carries it out:

* ``torchft``: replicas (rows) that miss a cell are left out and their workers wait; the others run the whole batch, in
  whole micro-batches, in 1F1B.
* ``recycle``: whole micro-batches go to peers, backward is split where the job can, layers stay. All stages step their
  optimizers together, as the runtime does: the paper's staggered optimizer hides more.
* ``elaswave``: micro-batches reshaped in 1F1B at once, layers partitioned by minimax afterwards, while the job runs.
  A lost stage is dealt out anew. Clocks stay nominal. In jobs that keep their micro-batches these move whole.

A policy that cannot go on says so: NoFeasiblePlan.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_elas.planner.choices import Choice, Choices, best_of
from megatron_elas.planner.dataflow import is_possible
from megatron_elas.planner.finding import REGROUPING, find_plan
from megatron_elas.planner.policies import EXACT_ITEMS, RECYCLE_TRIES
from megatron_elas.planner.prediction import Candidate, Predictor
from megatron_elas.planner.search import stay, with_best_layers
from megatron_elas.planner.situation import Situation
from megatron_elas.planner.step_plan import Effort
from megatron_elas.schedule.timing import Deadlock
from megatron_elas.spec.errors import NoFeasiblePlan
from megatron_elas.spec.policy import RunningPolicy

_LOST_STAGE = Effort(evaluations=32, exact=False)
"""Of elaswave, to deal cells and layers out anew."""


def choose_like(policy: RunningPolicy, situation: Situation) -> Choice:
    """What the policy does right after a loss. Raises NoFeasiblePlan."""
    now = replace(situation, spares=0)
    if policy == "torchft":
        return _torchft(now)
    if policy == "recycle":
        return _recycle(now)
    if situation.lost_stages:
        reshaping = replace(REGROUPING, deals=("reshape", "reroute"), split=False, orders=False, divide=False)
        found, fits = find_plan(situation, (reshaping,), lambda _: _LOST_STAGE)
        return Choices(situation).in_turns(found.candidate, fits=fits)
    return Choices(now).in_turns(_reshaped(now))


def improve_like(policy: RunningPolicy, situation: Situation) -> Choice | None:
    """What the policy goes over to while the job runs; None: it stays as it is."""
    if policy != "elaswave":
        return None
    try:
        return Choices(situation).in_turns(with_best_layers(situation, _reshaped(situation)))
    except NoFeasiblePlan:
        return None


def _torchft(now: Situation) -> Choice:
    whole = tuple(sorted(set.intersection(*map(set, now.rows))))
    if not whole:
        raise NoFeasiblePlan(
            f"every replica lost a worker (rows left, by stage: {list(map(list, now.rows))}): with --policy torchft "
            f"none is left to go on. Restart from the newest checkpoint with --load, or use --policy ours"
        )
    now = replace(now, held=now.held or now.rows, rows=(whole,) * now.num_stages)
    return Choices(now).in_turns(stay(now))


def _recycle(now: Situation) -> Choice:
    choices = Choices(now)
    alone = choices.in_turns(stay(now))
    if not now.job.split_backward or now.num_stages * now.job.num_microbatches > EXACT_ITEMS:
        return alone
    candidate = stay(now, split=True)
    try:
        found = Predictor(now, exact=True, staggered=False).predict(candidate, RECYCLE_TRIES)
    except Deadlock:
        return alone
    ordered = choices.ordered(candidate, found.program) if found.found.tastes is not None else None
    return alone if ordered is None else best_of([alone, ordered])


def _reshaped(now: Situation) -> Candidate:
    possible = all(is_possible(now.job, len(rows), "reshape") for rows in now.rows)
    return stay(now, deal="reshape" if possible and not now.job.keeps_micro_batches else "reroute")
