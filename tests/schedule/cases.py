"""Cases for tests of schedules: any items, any times; and a slow way to time them that shares no code."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from megatron_elas.schedule.actions import Action, Schedule
from megatron_elas.schedule.items import cut, deal_round, reroute, reshape
from megatron_elas.schedule.timing import Durations
from megatron_elas.spec.cost import PassTime, StageTimes
from megatron_elas.spec.items import StageItems


def times(forward: float, input_gradient: float, weight_gradient: float, fixed: float = 0.0) -> StageTimes:
    """Of a stage, per sample."""
    return StageTimes(
        forward=PassTime(sample_s=forward, fixed_s=fixed),
        input_gradient=PassTime(sample_s=input_gradient, fixed_s=fixed),
        weight_gradient=PassTime(sample_s=weight_gradient, fixed_s=fixed),
    )


UNIT = times(1, 1, 1)


def unit_durations(items: Sequence[StageItems]) -> Durations:
    """Each pass takes a second per sample, transfers none."""
    return Durations.of([UNIT] * len(items), items)


@st.composite
def stage_items(draw: st.DrawFn, rows: int, steps: int, size: int) -> StageItems:
    """Items of one stage, made by any of the builders."""
    total = rows * steps
    cells = draw(st.integers(1, rows))
    kind = draw(st.sampled_from(("round", "reroute", "reshape", "cut")))
    if kind == "round":
        return deal_round(total, size, cells)
    if kind == "reroute":
        alive = sorted(draw(st.sets(st.integers(0, rows - 1), min_size=cells, max_size=cells)))
        return reroute(total, size, alive, rows)
    if kind == "reshape":
        return reshape(total, size, cells, rows)
    left, sizes = total * size, []
    while left:
        sizes.append(draw(st.integers(1, min(left, 2 * size))))
        left -= sizes[-1]
    cells = min(cells, len(sizes))
    return cut(total * size, [sizes[cell::cells] for cell in range(cells)])


@st.composite
def all_items(draw: st.DrawFn) -> tuple[StageItems, ...]:
    """Items of up to four stages of the same batch."""
    rows, steps, size = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return tuple(draw(stage_items(rows, steps, size)) for _ in range(draw(st.integers(1, 4))))


@st.composite
def durations_of(draw: st.DrawFn, items: Sequence[StageItems]) -> Durations:
    """Different times on every cell, and links that take some."""
    second = st.integers(1, 8).map(float)
    cells = [
        [times(draw(second), draw(second), draw(second), draw(st.sampled_from((0.0, 0.5)))) for _ in cells]
        for cells in items
    ]
    links = [PassTime(sample_s=draw(st.sampled_from((0.0, 0.25))), fixed_s=draw(st.sampled_from((0.0, 1.0))))
             for _ in items[1:]]  # fmt: skip
    return Durations.of(cells, items, links)


def samples_of(schedule: Schedule, action: Action) -> set[int]:
    """Sample by sample."""
    for own in schedule.items[action.stage]:
        for item in own:
            if item.number == action.item:
                return {sample for start, stop in item.ranges for sample in range(start, stop)}
    raise KeyError(action)


def time_slowly(schedule: Schedule, durations: Durations) -> dict[Action, tuple[float, float]]:
    """(start, end) of every action, by going round until nothing changes; sample by sample."""
    orders = {place: schedule.orders[place[0]][place[1]] for place in schedule.cells()}
    cell_of = {action: place for place, order in orders.items() for action in order}
    holds = {action: samples_of(schedule, action) for action in cell_of}
    split = {(action.stage, action.item) for action in cell_of if action.kind == "W"}
    done: dict[Action, tuple[float, float]] = {}
    changed = True
    while changed:
        changed = False
        for place, order in orders.items():
            free = 0.0
            for action in order:
                if action not in done:
                    arrivals = []
                    step = {"F": -1, "B": 1, "W": 0}[action.kind]
                    for other, samples in holds.items():
                        shared = len(samples & holds[action])
                        if step and other.stage == action.stage + step and other.kind == action.kind and shared:
                            link = durations.links[min(action.stage, other.stage)]
                            arrivals.append(done[other][1] + link.seconds(shared) if other in done else None)
                    if None in arrivals:
                        break
                    start = max([free, *(arrival for arrival in arrivals if arrival is not None)])
                    own, size = durations.cells[place[0]][place[1]], len(holds[action])
                    takes = {"F": own.forward, "B": own.input_gradient, "W": own.weight_gradient}[action.kind]
                    end = start + takes.seconds(size)
                    if action.kind == "B" and (action.stage, action.item) not in split:
                        end += own.weight_gradient.seconds(size)
                    done[action] = (start, end)
                    changed = True
                free = done[action][1]
    assert len(done) == len(cell_of), "deadlock"
    return done
