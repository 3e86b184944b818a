"""Whether a change of plan that somebody asks for can be planned: a pure function of the controller's state."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_elas.control.events import ChangeAsked
from megatron_elas.control.states import Ended, Gathering, Resuming, Running, Settling, State, Stopping
from megatron_elas.spec.plan import ElasticPlan


def find_problem(state: State, change: ChangeAsked) -> str | None:
    """Why not, as a sentence; None when the planner may be asked."""
    match state:
        case Gathering():
            return "training has not begun yet: ask again when it runs"
        case Settling() | Resuming():
            return "the job recovers from a loss: ask again when it runs, see elas status"
        case Stopping() | Ended():
            return "the job is ending"
        case Running():
            return (
                _find_ban(state)
                or _find_bad_worker(state, change.drained)
                or _find_bad_layers(state.plan, change.layers)
                or _find_change(state)
            )


def _find_ban(state: Running) -> str | None:
    job = state.roster.job
    if state.roster.finished:
        return "training is done"
    if job is None or job.migration == "off":
        return (
            "--elastic-migration off leaves layers where they are, so nobody can go over to another plan: start the "
            "job with --elastic-migration async or blocking"
        )
    return None


def _find_change(state: Running) -> str | None:
    """That is under way already."""
    if state.migration is not None:
        return f"the job is going over to epoch {state.migration.epoch}: ask again when it has, see elas status"
    if state.search is not None and state.search.asked:
        return "another change is being planned: ask again when it is done, see elas status"
    return None


def _find_bad_worker(state: Running, workers: Sequence[int]) -> str | None:
    roster, placement = state.roster, state.plan.placement
    leaving = set(workers)
    for worker in sorted(leaving):
        if not 0 <= worker < roster.launch.world_size:
            return f"worker {worker} is not one of 0 to {roster.launch.world_size - 1}"
        if worker in roster.lost:
            return f"worker {worker} is lost already: {roster.lost[worker].detail}"
        if worker in roster.drained:
            return f"worker {worker} was drained already"
        seat = placement.find_seat(worker)
        if seat is None:
            return f"worker {worker} is a spare: it has nothing that it could hand over"
        mates = placement.stages[seat.stage][seat.cell].workers
        if not leaving >= set(mates):
            staying = ", ".join(str(mate) for mate in mates if mate not in leaving)
            return (
                f"worker {worker} is in the tensor-parallel cell {list(mates)}, which leaves as a whole: drain "
                f"{staying} with it"
            )
    if leaving and leaving >= set(placement.workers):
        return "nobody would be left: drain fewer workers, or end the job with SIGTERM to elasrun"
    return None


def _find_bad_layers(plan: ElasticPlan, layers: Sequence[int] | None) -> str | None:
    if layers is None:
        return None
    total, stages = plan.layers[-1][1], plan.placement.num_stages
    if len(layers) == stages and sum(layers) == total and min(layers) >= 1:
        return None
    now = ",".join(str(stop - start) for start, stop in plan.layers)
    return (
        f"the layers {','.join(map(str, layers))} do not fit {stages} stages with {total} layers in all, which are "
        f"{now} now: give one number, 1 or more, for each stage"
    )
