"""Answers to ``elas``: pure functions of the controller's state."""

from __future__ import annotations

from collections.abc import Callable

from megatron_elas.control.messages import Answer
from megatron_elas.control.migration_block import describe_workers
from megatron_elas.control.states import Ended, Gathering, Resuming, Running, Settling, State, Stopping
from megatron_elas.spec.consistency import PROMISES
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.faults import Fault, check_faults, parse_fault


def check_injection(state: State, text: str, step_of: Callable[[int], int | None]) -> Fault | Answer:
    """The fault to pass on, or why not."""
    launch = state.roster.launch
    try:
        fault = parse_fault(text)
        check_faults([fault], launch.world_size)
    except BadUsage as error:
        return Answer(ok=False, text=str(error))
    if fault.worker not in state.roster.survivors:
        return Answer(ok=False, text=f"worker {fault.worker} takes no part: alive are {list(state.roster.survivors)}")
    at_step = step_of(fault.worker)
    if at_step is not None and fault.step < at_step:
        return Answer(ok=False, text=f"worker {fault.worker} is in step {at_step} already: choose a later step")
    return fault


def describe(
    state: State,
    step_of: Callable[[int], int | None],
    silence_of: Callable[[int], float | None],
    step_times: str = "",
) -> str:
    """A few lines for people: where the job is, what a step takes if that is known, then one line per worker."""
    replaced = state.roster.copies_replaced
    copies = [f"copies of optimizer states that differed from their owners and were replaced: {replaced}"]
    times = [f"step time: {step_times}"] if step_times else []
    job = state.roster.job
    level = [] if job is None else [f"consistency: {job.consistency}, {PROMISES[job.consistency]}"]
    faults = [f"scripted faults that have not struck: {', '.join(state.roster.unstruck)}"]
    return "\n".join(
        [
            _headline(state),
            *level,
            *times,
            *(copies if replaced else []),
            *(faults if state.roster.unstruck else []),
            *_worker_lines(state, step_of, silence_of),
        ]
    )


def _headline(state: State) -> str:
    roster = state.roster
    match state:
        case Gathering():
            return f"gathering: {len(roster.hellos)} of {roster.launch.world_size} workers joined"
        case Running(plan=plan):
            return f"running, epoch {plan.epoch}: {plan.describe()}{_describe_change(state)}"
        case Settling():
            return f"settling, epoch {state.epoch}: {len(state.reports)} of {len(roster.survivors)} survivors settled"
        case Resuming(plan=plan):
            return f"resuming, epoch {plan.epoch}: {plan.describe()}"
        case Stopping() | Ended():
            return f"{type(state).__name__.lower()} with exit code {state.exit_code} {state.sentence}".rstrip()


def _describe_change(state: Running) -> str:
    """What is planned or under way while training goes on."""
    search, migration = state.search, state.migration
    if migration is not None:
        target = migration.target
        there = f"{len(migration.reports)} of {len(target.placement.workers)} workers have gone over"
        leaving = f", {describe_workers(migration.leaving)} will leave" if migration.leaving else ""
        return f"\ngoing over to epoch {target.epoch}: {target.describe()}; {there}{leaving}"
    if search is None:
        return ""
    purpose = "a better plan is looked for" if search.layers is None else "a plan with the layers asked for is made"
    return f"\n{f'a plan without {describe_workers(search.drained)} is made' if search.drained else purpose}"


def _worker_lines(
    state: State, step_of: Callable[[int], int | None], silence_of: Callable[[int], float | None]
) -> list[str]:
    lines = []
    for worker in range(state.roster.launch.world_size):
        if worker in state.roster.lost:
            loss = state.roster.lost[worker]
            text = f"lost ({loss.reason}, {loss.detail})"
        elif worker in state.roster.drained:
            text = "drained" if worker in state.roster.exited else "drained, leaving"
        elif worker in state.roster.finished:
            text = "finished"
        elif worker in state.roster.hellos:
            hello = state.roster.hellos[worker]
            silence_s = silence_of(worker)
            heard = "" if silence_s is None else f", heard {silence_s:.1f} s ago"
            at_step = step_of(worker)
            text = f"step {'not heard yet' if at_step is None else at_step}, pid {hello.pid} on {hello.host}{heard}"
        else:
            text = "exited" if worker in state.roster.exited else "not joined"
        lines.append(f"worker {worker}: {text}")
    return lines
