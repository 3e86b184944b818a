"""The search for a running job's plan: what it may change, and what happens where nothing fits the memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count

from megatron_elas.planner.prediction import Candidate
from megatron_elas.planner.search import Freedom
from megatron_elas.planner.situation import Situation
from megatron_elas.planner.step_plan import Effort, StepPlan, make_plan
from megatron_elas.spec.errors import NoFeasiblePlan
from megatron_elas.spec.job import JobSpec

RUNTIME = Freedom(layers=False, cells=False)
"""What the runtime carries out in any step, if the job's backward passes can be split: see ``as_job_allows``."""
RESTAGING = replace(RUNTIME, layers=True)
"""What it carries out in a recovery in which models are made anew, cells staying, and beside training."""
REGROUPING = replace(RESTAGING, cells=True)
"""And where they do not."""
MORE_MEMORY = 1.1
"""By which the limit is raised when no plan fits."""


def as_job_allows(freedom: Freedom, job: JobSpec, *, exact: bool = True, whole: bool = False) -> Freedom:
    """As much of it as the job's workers carry out.

    Args:
        freedom: To be narrowed.
        job: Whether passes may come in any order, backward being split.
        exact: Whether every item is timed; an order of one cell for each stage is none for all of them.
        whole: Micro-batches are neither cut nor joined.
    """
    if not (job.split_backward and exact):
        freedom = replace(freedom, split=False, orders=False)
    return freedom.with_whole_micro_batches() if whole else freedom


def find_plan(
    situation: Situation,
    freedoms: Sequence[Freedom],
    effort: Callable[[Situation], Effort],
    seeds: tuple[Candidate, ...] = (),
    *,
    whole: bool = False,
) -> tuple[StepPlan, bool]:
    """A plan, and whether it fits the memory.

    What a profile says of memory is an estimate, and no reason to end a job. So when nothing fits, limits are raised
    until something does, which then is near the least that any plan takes.

    Args:
        situation: Who is left.
        freedoms: One after the other, as long as nothing fits.
        effort: How long to look.
        seeds: See ``make_plan``.
        whole: See ``as_job_allows``.
    """
    for more in count():
        room = replace(situation, memory_bytes=math.ceil(situation.memory_bytes * MORE_MEMORY**more))
        own = effort(room)
        for freedom in freedoms:
            allowed = as_job_allows(freedom, situation.job, exact=own.exact, whole=whole)
            with suppress(NoFeasiblePlan):
                return make_plan(room, allowed, own, seeds), more == 0
    raise AssertionError
